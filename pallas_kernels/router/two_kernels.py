"""The whole router in two launches, Pallas on Triton: the product in slices of the channels, then scores and selection.

A library splits so deep and narrow a product too (384 rows, 384 experts, 5120 channels are nine tiles for 132
multiprocessors), into as many slices as it likes for the shape, and adds them up in a launch of its own. Here the slices
are always the same, so that a row's bits do not depend on the number of rows, and the selection adds them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import cdiv
from . import one_kernel

ARCHES = one_kernel.ARCHES


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the product is cut up. rows, experts: of one program's tile, powers of two of at least 16, the last tile's rest
    masked; step: channels at a time, a power of two that divides them all; slices: of the channels, at most one a step, in
    whole steps, as equal as these allow; warps and stages (of loads under way) of one program.

    It must not depend on the number of rows: a row's bits do not."""

    rows: int = 64
    experts: int = 128
    step: int = 64
    slices: int = 7
    warps: int = 4
    stages: int = 8


def tiling(experts: int) -> Tiling:
    """For so many experts: 126 programs in a verify step of 384 rows with 384 experts and with 96, 80 in a draft step of 320
    rows with 128, each with most or all of its loads under way at once. On an H200 both kernels take 10.7, 6.7 and 6.7 us
    there, one_kernel's 13.1, 8.9 and 8.7."""
    if experts == 128:
        return Tiling(slices=16, stages=6)
    if experts % 128 == 0:
        return Tiling(slices=7, stages=8)
    return Tiling(experts=min(32, experts & -experts), slices=7, stages=12)


def refuses(x, gate, bias, *, k, scale, precision):
    """Why this is not the way for these arguments, or None."""
    if not x.dtype == gate.dtype == jnp.bfloat16:
        return f"x is {x.dtype} and gate {gate.dtype}, the product is for bfloat16"
    step = tiling(gate.shape[0]).step
    if x.shape[1] % step:
        return f"rows of {x.shape[1]} channels, the product wants a multiple of {step}"
    return one_kernel.refuses(x, gate, bias, k=k, scale=scale, precision=precision)


def _product_body(x, gate, z, *, tile: Tiling):
    """x bf16[T, H], gate bf16[E, H], z f32[slices, T, E]: one slice of the product of a tile of rows and experts."""
    from jax.experimental.pallas import triton as plt

    (slices, total, experts), steps = z.shape, x.shape[1] // tile.step
    iota = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    part, first, start = pl.program_id(0), pl.program_id(1) * tile.rows, pl.program_id(2) * tile.experts
    begin, count = part * (steps // slices), steps // slices
    if steps % slices:
        begin = part * steps // slices
        count = (part + 1) * steps // slices - begin

    def place(height, first, size):  # the tile's rows and first channels, and which of the rows there are
        row = iota((height, tile.step), 0) + first
        there = {} if size % height == 0 else {"mask": row < size, "other": 0.0}
        return row, iota((height, tile.step), 1) + begin * tile.step, there

    row, channel, rows_there = place(tile.rows, first, total)
    expert, of_gate, experts_there = place(tile.experts, start, experts)

    def step(i, sums):
        a = plt.load(x.at[row, channel + i * tile.step], **rows_there)
        b = plt.load(gate.at[expert, of_gate + i * tile.step], **experts_there)
        return sums + jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    shape = tile.rows, tile.experts
    sums = jax.lax.fori_loop(0, count, step, jnp.zeros(shape, jnp.float32))
    row, column = iota(shape, 0) + first, iota(shape, 1) + start
    there = None if total % tile.rows == experts % tile.experts == 0 else (row < total) & (column < experts)
    plt.store(z.at[jnp.full_like(row, part), row, column], sums, mask=there)


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))  # lowered once for all layers
def product(x, gate, *, tile: Tiling | None = None, interpret: bool = False):
    """f32[slices, T, E] whose sum over the slices is x @ gate^T; cut up as `tile` says, by default `tiling`'s for E."""
    from jax.experimental.pallas import triton as plt

    (t, h), e = x.shape, gate.shape[0]
    tile = tile or tiling(e)
    slices = min(tile.slices, h // tile.step)
    whole = lambda *shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
    return pl.pallas_call(
        functools.partial(_product_body, tile=tile),
        out_shape=jax.ShapeDtypeStruct((slices, t, e), jnp.float32),
        grid=(slices, cdiv(t, tile.rows), cdiv(e, tile.experts)),
        in_specs=[whole(t, h), whole(e, h)],
        out_specs=whole(slices, t, e),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        name="router_product",
    )(x, gate)


def router(x, gate, bias, *, k: int, scale: float, precision: str, interpret: bool = False):
    """See `api.router`."""
    del precision
    return one_kernel.select(product(x, gate, interpret=interpret), bias, k=k, scale=scale, interpret=interpret)
