"""Small kernels for the deviceless harness's own test: one per code generator."""

import os

import jax
import jax.numpy as jnp


def _mosaic():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return plgpu.kernel(body, out_type=x, kernel_name="sample_mosaic"), (x,)


def _pallas_triton():
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    params = plt.CompilerParams(num_warps=4)
    return pl.pallas_call(body, out_shape=x, compiler_params=params, name="sample_pallas_triton"), (x,)


def _jax_triton():
    import jax_triton
    import triton
    import triton.language as tl

    @triton.jit
    def sample_jax_triton(x_ptr, o_ptr, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(o_ptr + i, tl.load(x_ptr + i) * 2.0)

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    # The target's capability comes from the harness: there is no device to ask.
    capability = int(os.environ["DEVICELESS_CAPABILITY"])
    call = lambda a: jax_triton.triton_call(
        a, kernel=sample_jax_triton, out_shape=x, grid=(1,), n=1024, compute_capability=capability
    )
    return call, (x,)


def _plain():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    return (lambda a: jnp.tanh(a) * 2.0), (x,)


def case(name: str):
    """name -> (function, abstract arguments)."""
    return {"jax_triton": _jax_triton, "mosaic": _mosaic, "pallas_triton": _pallas_triton, "plain": _plain}[name]()
