"""The whole router in two launches, Pallas on Triton: the product in slices of the channels, then scores and selection.

A library splits so deep and narrow a product too (384 rows, 384 experts, 5120 channels are nine tiles for 132
multiprocessors), into as many slices as it likes for the shape, and adds them up in a launch of its own. Here the slices
are always the same, so that a row's bits do not depend on the number of rows, and the selection adds them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import cdiv
from . import one_kernel

ARCHES = one_kernel.ARCHES
BY_NAME_ONLY = "on an H200 it gains nothing at 384 experts: 13.1 us of kernels, one_kernel 12.8; at 96 it is 7.9 to 9.5"
ROWS = 64  # of one program of the product
EXPERTS = 128  # likewise, at most
STEP = 64  # channels at a time
SLICES = 8  # of the channels, at most: 144 programs in a verify step


def _slices(h: int) -> int:
    return min(SLICES, (h // STEP) & -(h // STEP))


def refuses(x, gate, bias, *, k, scale, precision):
    """Why this is not the way for these arguments, or None."""
    if not x.dtype == gate.dtype == jnp.bfloat16:
        return f"x is {x.dtype} and gate {gate.dtype}, the product is for bfloat16"
    if x.shape[1] % STEP:
        return f"rows of {x.shape[1]} channels, the product wants a multiple of {STEP}"
    return one_kernel.refuses(x, gate, bias, k=k, scale=scale, precision=precision)


def _product_body(x, gate, z, *, total: int, h: int):
    """x bf16[T, H], gate bf16[E', H] of this tile's experts, z f32[1, T, E']: one slice of the product of a tile of rows."""
    from jax.experimental.pallas import triton as plt

    experts, length = gate.shape[0], h // _slices(h)
    iota = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    first = pl.program_id(1) * ROWS
    row, channel = iota((ROWS, STEP), 0) + first, iota((ROWS, STEP), 1) + pl.program_id(0) * length
    expert, of_gate = iota((experts, STEP), 0), iota((experts, STEP), 1) + pl.program_id(0) * length
    there = {} if total % ROWS == 0 else {"mask": row < total, "other": 0.0}

    def step(i, sums):
        a = plt.load(x.at[row, channel + i * STEP], **there)
        b = plt.load(gate.at[expert, of_gate + i * STEP])
        return sums + jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    sums = jax.lax.fori_loop(0, length // STEP, step, jnp.zeros((ROWS, experts), jnp.float32))
    row, column = iota((ROWS, experts), 0) + first, iota((ROWS, experts), 1)
    plt.store(z.at[jnp.zeros_like(row), row, column], sums, mask=None if total % ROWS == 0 else row < total)


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def product(x, gate, *, interpret: bool = False):
    """f32[slices, T, E] whose sum over the slices is x @ gate^T."""
    from jax.experimental.pallas import triton as plt

    (t, h), e = x.shape, gate.shape[0]
    slices, width = _slices(h), min(EXPERTS, e & -e)
    return pl.pallas_call(
        functools.partial(_product_body, total=t, h=h),
        out_shape=jax.ShapeDtypeStruct((slices, t, e), jnp.float32),
        grid=(slices, cdiv(t, ROWS), e // width),
        in_specs=[pl.BlockSpec((t, h), lambda s, i, j: (0, 0)), pl.BlockSpec((width, h), lambda s, i, j: (j, 0))],
        out_specs=pl.BlockSpec((1, t, width), lambda s, i, j: (s, 0, j)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        name="router_product",
    )(x, gate)


def router(x, gate, bias, *, k: int, scale: float, precision: str, interpret: bool = False):
    """See `api.router`."""
    del precision
    return one_kernel.select(product(x, gate, interpret=interpret), bias, k=k, scale=scale, interpret=interpret)
