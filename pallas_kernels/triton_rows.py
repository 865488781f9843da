"""Norm, rotation, scales, FP8 and MXFP4 codes of one row, in operations that Pallas lowers to Triton: `row_ops` and `codecs`."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .codecs import FP4_MAX, FP8_FLOOR, FP8_MAX, GROUP, MXFP4_FLOOR
from .triton_e4m3 import bits_of, ceil_exponent, float_of

# Pallas gives Triton offsets in elements: of 64 bits into arrays of more than so many bytes, into others signed ones of 32,
MOST_NARROW_BYTES = 2**32
MOST_NARROW_ELEMENTS = 2**31  # which reach so many. Between the two lie arrays of single bytes, but none of pairs of bytes.
WARP_CHANNELS = 128  # channels of one warp: 8 bytes of bf16 and 16 of f32 a lane


def refuses_rows(dim: int, pairs: int, *pools) -> str | None:
    """Why rows of `dim` channels, `pairs` rotary pairs or these pools cannot be taken, or None."""
    if dim & (dim - 1) or not 32 <= dim <= 4096:
        return f"rows of {dim} channels, the kernel is for powers of two from 32 to 4096"
    if 2 * pairs > dim:
        return f"{pairs} rotary pairs in {dim} channels"
    return next(filter(None, map(refuses_size, pools)), None)


def refuses_size(array) -> str | None:
    """Why a kernel that indexes `array` as a whole would not reach all of it, or None."""
    if _too_narrow(array):
        return (
            f"an array of {array.size * array.dtype.itemsize} bytes: offsets of more than {MOST_NARROW_ELEMENTS} elements have "
            f"64 bits only in arrays of more than {MOST_NARROW_BYTES} bytes"
        )
    return None


def _too_narrow(array) -> bool:
    return array.size > MOST_NARROW_ELEMENTS and array.size * array.dtype.itemsize <= MOST_NARROW_BYTES


def within_reach(
    pool,  # u8[..., N], N even
):
    """The pool, or where offsets would not reach all of its bytes u16[..., N/2]: a view, for XLA too, which copies nothing."""
    if not _too_narrow(pool):
        return pool
    return jax.lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), jnp.uint16)


def as_bytes(
    pool,  # u8[..., N] or u16[..., N/2] of `within_reach`
):
    """The pool as it was before `within_reach`, u8[..., N]."""
    if pool.dtype == jnp.uint8:
        return pool
    return jax.lax.bitcast_convert_type(pool, jnp.uint8).reshape(*pool.shape[:-1], -1)


def store_bytes(
    pool,  # ref u8[..., N], or u16[..., N/2] of `within_reach`: then `first` and n are even
    *at,  # i32[], all but the last of which index the leading axes and the last is the first byte
    values,  # u8[n]
):
    """Store values to bytes first..first+n-1 of a row of the pool."""
    *row, first = at
    if pool.dtype == jnp.uint16:
        low, high = jnp.unstack(values.reshape(-1, 2).astype(jnp.uint16), axis=1)
        values, first = low | (high << 8), first >> 1
    pool[*row, pl.ds(first, values.size)] = values


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
    x,  # bf16[..., D]
    cos,  # ref f32[T, R/2]
    sin,  # ref f32[T, R/2]
    row,  # i32[]
):
    """(even, odd) f32[..., D/2]: channels 0, 2, ... and 1, 3, ... after `row_ops.rotate`, rounded to bf16."""
    from jax.experimental.pallas import triton as plt

    *heads, dim = x.shape
    half, pairs = dim // 2, cos.shape[1]
    even, odd = (part.astype(jnp.float32) for part in jnp.unstack(x.reshape(*heads, half, 2), axis=-1))
    pair = jax.lax.broadcasted_iota(jnp.int32, (half,), 0) - (half - pairs)
    turned = pair >= 0
    c = plt.load(cos.at[row, pair], mask=turned, other=1.0)
    s = plt.load(sin.at[row, pair], mask=turned, other=0.0)
    turned, c, s = (jnp.broadcast_to(x, even.shape) for x in (turned, c, s))
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


def fp8_quantised(x):
    """f32[groups, 32] -> (f8[groups, 32], e8m0 bytes i32[groups]). The conversion is one instruction for two values; it
    rounds to nearest, ties to even, and keeps the sign of zeros."""
    exponent = e8m0_exponents(jnp.max(jnp.abs(x), 1), FP8_FLOOR, FP8_MAX)
    return (x * inverse_power(exponent)[:, None]).astype(jnp.float8_e4m3fn), exponent


def fp8_rounded(x):
    """f32[groups, 32] -> bf16[groups, 32]: what `fp8_quantised` decodes to."""
    q, exponent = fp8_quantised(x)
    return (q.astype(jnp.float32) * float_of(exponent << 23)[:, None]).astype(jnp.bfloat16)


def _mxfp4(even, odd):
    """f32[..., D/2] each -> (exponents i32[G], magnitudes of either over their scale f32[G, 16], at most 6)."""
    exponent = e8m0_exponents(largest(even, odd, GROUP // 2), MXFP4_FLOOR, FP4_MAX)
    # scaled here, a power of two: 2**-126, the scale of an all but zero group, has no normal quarter
    scale = inverse_power(exponent)[:, None]
    return exponent, *(jnp.abs(x).reshape(-1, GROUP // 2) * scale for x in (even, odd))


def _rounded_bits(a):
    """f32 1 <= a <= 6 -> i32: bits of which those from 22 on are the nearest e2m1 value's, ties to even."""
    bits = bits_of(a)
    return bits + ((1 << 21) - 1) + ((bits >> 22) & 1)


def mxfp4_codes(
    even,  # f32[..., D/2] bf16 numbers
    odd,  # f32[..., D/2]
):
    """`codecs.quantize_mxfp4` of the channels in pairs: (codes i32[G, 16] of the even ones, of the odd ones, e8m0 bytes
    i32[G])."""
    exponent, *magnitudes = _mxfp4(even, odd)

    def codes(x, a):
        small = (a > 0.25).astype(jnp.int32) + (a >= 0.75).astype(jnp.int32)
        code = jnp.where(a < 1.0, small, (_rounded_bits(a) >> 22) - 252)
        return code | (sign_bit(x).reshape(code.shape) << 3)

    return codes(even, magnitudes[0]), codes(odd, magnitudes[1]), exponent


def mxfp4_values(
    even,  # f32[..., D/2] bf16 numbers
    odd,  # f32[..., D/2]
):
    """What `mxfp4_codes` decode to: f32[G, 16] of the even channels and of the odd ones."""
    exponent, *magnitudes = _mxfp4(even, odd)
    scale = float_of(exponent << 23)[:, None]

    def values(x, a):
        small = jnp.where(a > 0.25, jnp.where(a >= 0.75, 1.0, 0.5), 0.0)
        rounded = jnp.where(a < 1.0, small, float_of(_rounded_bits(a) & -(1 << 22)))
        return float_of(bits_of(rounded * scale) | (bits_of(x).reshape(a.shape) & -(2**31)))

    return values(even, magnitudes[0]), values(odd, magnitudes[1])
