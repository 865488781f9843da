"""Norm, rotation and record scales of one row, in operations that Pallas lowers to Triton: `row_ops` and `codecs`."""

import jax
import jax.numpy as jnp

from .triton_e4m3 import bits_of, ceil_exponent, float_of

MOST_POOL_BYTES = 2**31  # Triton's offsets are signed 32-bit numbers
WARP_CHANNELS = 128  # channels of one warp: 8 bytes of bf16 and 16 of f32 a lane


def refuses_rows(dim: int, pairs: int, *pools) -> str | None:
    """Why rows of `dim` channels, `pairs` rotary pairs or these pools cannot be taken, or None."""
    if dim & (dim - 1) or not 32 <= dim <= 4096:
        return f"rows of {dim} channels, the kernel is for powers of two from 32 to 4096"
    if 2 * pairs > dim:
        return f"{pairs} rotary pairs in {dim} channels"
    for pool in pools:
        if pool.size * pool.dtype.itemsize >= MOST_POOL_BYTES:
            return f"a pool of {pool.size * pool.dtype.itemsize} bytes, the kernel addresses less than {MOST_POOL_BYTES}"
    return None


def warps(dim: int) -> int:
    """Warps of a program that owns a row of `dim` channels."""
    return max(1, min(16, dim // WARP_CHANNELS))


def normalised(
    x,  # f32[D]
    weight,  # f32[D]
    eps: float,
):
    """bf16[D]: `row_ops.rms_norm` of a bf16 row."""
    return (x * jax.lax.rsqrt(jnp.sum(x * x) * (1 / x.shape[0]) + eps) * weight).astype(jnp.bfloat16)


def rotated(
    x,  # bf16[D]
    cos,  # ref f32[T, R/2]
    sin,  # ref f32[T, R/2]
    row,  # i32[]
):
    """(even, odd) f32[D/2]: channels 0, 2, ... and 1, 3, ... after `row_ops.rotate`, rounded to bf16."""
    from jax.experimental.pallas import triton as plt

    half, pairs = x.shape[0] // 2, cos.shape[1]
    even, odd = (part.astype(jnp.float32) for part in jnp.unstack(x.reshape(half, 2), axis=-1))
    pair = jax.lax.broadcasted_iota(jnp.int32, (half,), 0) - (half - pairs)
    turned = pair >= 0
    c = plt.load(cos.at[row, pair], mask=turned, other=1.0)
    s = plt.load(sin.at[row, pair], mask=turned, other=0.0)
    rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    # not a product with 1 and 0 where nothing turns: that would lose the signs of zeros
    return jnp.where(turned, rounded(even * c - odd * s), even), jnp.where(turned, rounded(even * s + odd * c), odd)


def largest(even, odd, pairs: int):
    """f32[D/2/pairs]: the largest magnitude of every group of `pairs` neighbouring pairs."""
    return jnp.max(jnp.maximum(jnp.abs(even), jnp.abs(odd)).reshape(-1, pairs), axis=1)


def e8m0_exponents(amax, floor: float, most: float):
    """f32[G] -> i32[G]: the e8m0 byte of the scale at which max(amax, floor) is at most about `most`."""
    return ceil_exponent(jnp.maximum(amax, jnp.float32(floor)) * jnp.float32(1 / most))


def inverse_power(exponent):
    """i32 e8m0 byte 1..253 -> f32: 1 / 2**(byte - 127)."""
    return float_of((254 - exponent) << 23)


def sign_bit(x):
    """f32 -> i32: 1 where the sign is set, zeros too."""
    return (bits_of(x) >> 31) & 1
