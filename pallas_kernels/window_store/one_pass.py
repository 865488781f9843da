"""The window store in one launch, Pallas on Triton: a program takes a row from the projection's output to its record.

As XLA fusions the same is a norm, a rotation, a quantisation and a scatter, with the row in memory between them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import FP8_FLOOR, FP8_MAX, GROUP
from ..triton_e4m3 import code_of
from ..triton_rows import e8m0_exponents, inverse_power, largest, normalised, refuses_rows, rotated, sign_bit, warps

ARCHES = ("sm_90", "sm_100", "sm_103")


def refuses(pool, front, norm, cos, sin, slots, positions, *, first, eps):
    """Why the kernel does not take these arguments, or None."""
    del norm, sin, slots, positions, eps
    if front.dtype != jnp.bfloat16:
        return f"rows are {front.dtype}, the kernel is for bfloat16"
    if pool.dtype != jnp.uint8:
        return f"the pool is {pool.dtype}, the kernel writes u8 records"
    return refuses_rows(front.shape[1] - first, cos.shape[1], pool)


def store_row(
    front,  # bf16[T, first + D]
    norm,  # [D]
    cos,  # f32[T, R/2]
    sin,  # f32[T, R/2]
    slots,  # i32[T]
    positions,  # i32[T]
    pool,  # u8[slots, ring, D + D/32], written in place
    row,  # i32[]
    *,
    first: int,
    eps: float,
):
    """Inside a kernel on whole arrays, as refs: the record of one row, at its place."""
    dim = norm.shape[0]
    slot, at = slots[row], positions[row] % pool.shape[1]
    # skipped rows are computed too: their loads need not wait for the slot
    x = front[row, pl.ds(first, dim)].astype(jnp.float32)
    even, odd = rotated(normalised(x, norm[:].astype(jnp.float32), eps), cos, sin, row)
    exponent = e8m0_exponents(largest(even, odd, GROUP // 2), FP8_FLOOR, FP8_MAX)
    scale = inverse_power(exponent)[:, None]

    def codes(x):
        x = x.reshape(dim // GROUP, GROUP // 2)
        return code_of(jnp.abs(x) * scale) | (sign_bit(x) << 7)

    payload = jnp.stack([codes(even), codes(odd)], -1).reshape(dim)

    @pl.when((slot >= 0) & (slot < pool.shape[0]))
    def _store():
        pool[slot, at, pl.ds(0, dim)] = payload.astype(jnp.uint8)
        pool[slot, at, pl.ds(dim, dim // GROUP)] = exponent.astype(jnp.uint8)


def _body(front, norm, cos, sin, slots, positions, _, pool, *, first: int, eps: float):
    """Whole arrays; pool is the output that aliases the input before it."""
    store_row(front, norm, cos, sin, slots, positions, pool, pl.program_id(0), first=first, eps=eps)


@functools.partial(jax.jit, static_argnames=("first", "eps", "interpret"))  # lowered once for all layers
def window_store(pool, front, norm, cos, sin, slots, positions, *, first: int, eps: float, interpret: bool = False):
    """See `api.window_store`."""
    from jax.experimental.pallas import triton as plt

    return pl.pallas_call(
        functools.partial(_body, first=first, eps=eps),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid=(front.shape[0],),
        input_output_aliases={6: 0},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=warps(front.shape[1] - first)),
        name="window_store",
    )(front, norm, cos, sin, slots, positions, pool)
