"""The entry of a site in one launch, Pallas on Triton: a program owns a row and reads its streams once.

XLA makes three passes over the streams (their squares, the collapse, its norm) with the collapse in memory between them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ARCHES = ("sm_90", "sm_100", "sm_103")
WIDTH = 1024  # channels at a time; the collapsed row stays in registers
MOST_PARTS = 16


def _width(h: int) -> int:
    """The largest power of two up to WIDTH that divides h."""
    return min(WIDTH, h & -h)


def refuses(streams, pre, weight, *, eps):
    """Why the kernel does not take these arguments, or None."""
    del pre, weight, eps
    h = streams.shape[-1]
    if streams.dtype != jnp.bfloat16:
        return f"streams are {streams.dtype}, the kernel is for bfloat16"
    if h > MOST_PARTS * _width(h) or _width(h) < 32:
        return f"rows of {h} channels, the kernel wants at most {MOST_PARTS} equal powers of two from 32 to {WIDTH}"
    return None


def _body(streams, pre, weight, u, r, *, m: int, h: int, eps: float):
    """streams bf16[1, M, H], pre f32[1, M], weight bf16[H]; u bf16[1, H], r f32[1]."""
    width = _width(h)
    of_streams, of_x = jnp.zeros(width, jnp.float32), jnp.zeros(width, jnp.float32)
    mix = [pre[0, j] for j in range(m)]
    kept = []
    for i in range(h // width):
        part = pl.ds(i * width, width)
        x = jnp.zeros(width, jnp.float32)
        for j in range(m):
            v = streams[0, j, part].astype(jnp.float32)
            of_streams += v * v
            x += mix[j] * v
        x = x.astype(jnp.bfloat16)
        kept.append(x)
        of_x += jnp.square(x.astype(jnp.float32))
    r[0] = jax.lax.rsqrt(jnp.sum(of_streams) / (m * h) + eps)
    factor = jax.lax.rsqrt(jnp.sum(of_x) / h + eps)
    for i, x in enumerate(kept):
        part = pl.ds(i * width, width)
        u[0, part] = (x.astype(jnp.float32) * factor * weight[part].astype(jnp.float32)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # lowered once for all layers
def hyper_enter(streams, pre, weight, *, eps: float, interpret: bool = False):
    """See `api.hyper_enter`. A row's bits do not depend on the rows beside it."""
    from jax.experimental.pallas import triton as plt

    t, m, h = streams.shape
    return pl.pallas_call(
        functools.partial(_body, m=m, h=h, eps=eps),
        out_shape=(jax.ShapeDtypeStruct((t, h), jnp.bfloat16), jax.ShapeDtypeStruct((t,), jnp.float32)),
        grid=(t,),
        in_specs=[
            pl.BlockSpec((1, m, h), lambda i: (i, 0, 0)),
            pl.BlockSpec((1, m), lambda i: (i, 0)),
            pl.BlockSpec((h,), lambda i: (0,)),
        ],
        out_specs=(pl.BlockSpec((1, h), lambda i: (i, 0)), pl.BlockSpec((1,), lambda i: (i,))),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="hyper_enter",
    )(streams, pre, weight)
