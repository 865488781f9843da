"""Small kernels for the deviceless harness's own test: one per code generator."""

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


def _plain():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    return (lambda a: jnp.tanh(a) * 2.0), (x,)


def case(name: str):
    """name -> (function, abstract arguments)."""
    return {"mosaic": _mosaic, "pallas_triton": _pallas_triton, "plain": _plain}[name]()
