"""Quantised formats in numpy (spec/model.md section 4): quantise-and-dequantise, and decoders of stored weights.

e4m3, e8m0 and bf16 roundings go through ml_dtypes' casts, e2m1 through a table search. Everything is f32 outside.
"""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # index = the low three bits
_MIDPOINTS = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2


def bf16(x):
    """f32[...] -> f32[...] rounded to the nearest bf16, ties to even."""
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


def e4m3(x):
    """f32[...] with |x| <= 448 -> f32[...] rounded to the nearest e4m3 value, ties to even."""
    return x.astype(E4M3).astype(np.float32)


def e2m1(x):
    """f32[...] -> f32[...]: the nearest e2m1 value after clamping to +-6; a tie goes to the even code."""
    magnitude = np.minimum(np.abs(x), np.float32(6))
    below = np.searchsorted(_MIDPOINTS, magnitude, side="left")  # midpoints strictly below: a tie stays down
    above = np.searchsorted(_MIDPOINTS, magnitude, side="right")  # ... a tie goes up
    code = np.where(below % 2 == 0, below, above)
    return np.copysign(E2M1_VALUES[code], x)


def power_of_two_at_least(x):
    """f32[...] > 0 -> f32[...]: the smallest power of two >= x."""
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2**exponent, 0.5 <= mantissa < 1
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)


def _groups(x, size):
    if x.shape[-1] % size:
        raise ValueError(f"last axis: expected a multiple of {size}, got {x.shape[-1]}")
    return x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def qdq_fp8(x):
    """f32[..., 32n] -> f32[..., 32n]: block FP8, the format of linear inputs and of the window KV."""
    g = _groups(x, 32)
    amax = np.maximum(np.abs(g).max(-1, keepdims=True), np.float32(1e-4))
    s = power_of_two_at_least(amax * np.float32(1 / 448))
    return (e4m3(np.clip(g / s, -448, 448)) * s).reshape(x.shape)


def qdq_mxfp4(x):
    """f32[..., 32n] -> f32[..., 32n]: MXFP4 with e8m0 scales, the format of index queries and keys."""
    g = _groups(x, 32)
    amax = np.maximum(np.abs(g).max(-1, keepdims=True), np.float32(6 * 2.0**-126))
    s = power_of_two_at_least(amax * np.float32(1 / 6))
    return (e2m1(g / s) * s).reshape(x.shape)


def qdq_nvfp4(x):
    """f32[..., 16n] -> f32[..., 16n]: FP4 with e4m3 scales rounded to nearest, the format of the compressed KV."""
    g = _groups(x, 16)
    amax = np.maximum(np.abs(g).max(-1, keepdims=True), np.float32(6 * 2.0**-9))
    s = e4m3(np.minimum(amax / np.float32(6), np.float32(448)))
    return (e2m1(g / s) * s).reshape(x.shape)


def tiled_fp8_weight(weight, scale):
    """e4m3[out, in], e8m0[ceil(out/32), ceil(in/32)] -> f32[out, in], exact."""
    rows, cols = weight.shape
    spread = np.repeat(np.repeat(scale.astype(np.float32), 32, 0), 32, 1)[:rows, :cols]
    return weight.astype(np.float32) * spread


def packed_fp4_weight(weight, scale):
    """int8[out, in/2] of two e2m1 codes (low nibble = even input), e8m0[out, in/32] -> f32[out, in], exact."""
    byte = weight.view(np.uint8)
    code = np.stack([byte & 15, byte >> 4], -1).reshape(byte.shape[0], -1)
    value = np.where(code & 8, -E2M1_VALUES[code & 7], E2M1_VALUES[code & 7])
    return value * np.repeat(scale.astype(np.float32), 32, 1)


def fp8_rows(weight, scale):
    """e4m3[rows, c], e8m0[rows, c/32] -> f32[rows, c], exact: the engram table's format."""
    return weight.astype(np.float32) * np.repeat(scale.astype(np.float32), 32, 1)
