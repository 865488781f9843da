"""Bit-exact codecs of the checkpoint and of the KV caches, in plain jnp (spec/model.md section 4).

Four formats:

=========== ============================== ================================== =====================
name        payload                        scale                              used for
=========== ============================== ================================== =====================
FP8         e4m3, 1 byte                   e8m0, per 32 channels, rounded up  activations, window KV
MXFP4       e2m1, 2 per byte               e8m0, per 32 channels, rounded up  index q and k, experts
NVFP4       e2m1, 2 per byte               e4m3, per 16 channels, nearest     compressed KV
FP8 weight  e4m3 [out, in]                 e8m0 per 32 x 32 tile              dense weights
=========== ============================== ================================== =====================

Scales travel as raw bytes (`uint8`): a numeric cast of an e8m0 array would destroy it. In a packed byte the low nibble
is the even channel. Rounding is done on exact fp32 arithmetic rather than by dtype casts, so CPU and GPU give the same
bytes. Inputs are finite; a NaN or an infinity gives an unspecified code, never an error.
"""

import jax
import jax.numpy as jnp

FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_FLOOR = 1e-4  # smallest amax a group is scaled for
MXFP4_FLOOR = 6.0 * 2.0**-126
NVFP4_FLOOR = 6.0 * 2.0**-9
GROUP = 32  # channels per e8m0 scale
NV_GROUP = 16  # channels per e4m3 scale of the compressed KV


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def round_values(
    x,  # f32[...]
    dtype,
):
    """f32[...]: x with its values really rounded to `dtype`. XLA may drop a cast to bf16 that is cast back later in the
    same program (its "excess precision"), but never a reduce_precision."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if jnp.dtype(dtype) == jnp.bfloat16 else x


def rounded(
    x,  # f32[...]
    dtype,
):
    """dtype[...]: x really rounded. Every rounding point of the reference goes through here."""
    return round_values(x, dtype).astype(dtype)


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _as_f32(bits):
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def _pow2(exponent):
    """2**exponent as f32 for integer exponents -126..127."""
    return _as_f32((exponent + 127).astype(jnp.uint32) << 23)


def e8m0_to_f32(scale):
    """e8m0 bytes u8[...] -> f32[...]: 2**(byte - 127); byte 0 is the subnormal 2**-127."""
    b = scale.astype(jnp.uint32)
    return _as_f32(jnp.where(b == 0, jnp.uint32(0x00400000), b << 23))


def ceil_e8m0(x):
    """f32[...] > 0 -> u8[...]: the e8m0 byte of the smallest power of two >= x, read off the IEEE bits."""
    bits = _bits(x.astype(jnp.float32))
    return jnp.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0), 254).astype(jnp.uint8)


def round_e4m3(x):
    """f32[...] with |x| <= 448 -> f32[...]: nearest e4m3 value, ties to even."""
    x = x.astype(jnp.float32)
    exponent = jnp.maximum((_bits(jnp.abs(x)) >> 23).astype(jnp.int32) - 127, -6)
    step, inverse = _pow2(exponent - 3), _pow2(3 - exponent)
    return jnp.round(x * inverse) * step


def to_e4m3(x):
    """f32[...] -> float8_e4m3fn[...], clamped to +-448, ties to even."""
    return round_e4m3(jnp.clip(x, -FP8_MAX, FP8_MAX)).astype(jnp.float8_e4m3fn)


def to_e2m1(
    x,  # f32[...]
    scale=1.0,  # f32[...] > 0 of at most 4 significant bits, a quarter of it normal
):
    """u8[...] e2m1 codes 0..15 of x / scale (bit 3 = sign, kept for zero too), clamped to +-6, ties to the even code. The
    thresholds are scaled, which is exact: XLA turns a division by a broadcast scale into a product with its rounded
    reciprocal, which moves ties."""
    x = x.astype(jnp.float32)
    a, over = jnp.abs(x), lambda step: jnp.float32(step) * scale
    code = ((a > over(0.25)).astype(jnp.int32) + (a >= over(0.75)) + (a > over(1.25)) + (a >= over(1.75))
            + (a > over(2.5)) + (a >= over(3.5)) + (a > over(5.0)))  # fmt: skip
    return (code | ((_bits(x) >> 31).astype(jnp.int32) << 3)).astype(jnp.uint8)


def from_e2m1(code):
    """u8[...] e2m1 codes 0..15 -> f32[...]. Integer arithmetic: a bf16 route would flush subnormals on CPU."""
    c = code.astype(jnp.int32)
    e, m = (c >> 1) & 3, c & 1
    twice = jnp.where(e == 0, m, (2 | m) << jnp.maximum(e - 1, 0))
    return jnp.where(c & 8, -0.5, 0.5) * twice.astype(jnp.float32)


def pack_nibbles(code):
    """u8[..., D] -> u8[..., D/2]; the even channel goes to the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed):
    """u8[..., D/2] -> u8[..., D]."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _groups(x, size):
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def quantize_fp8(x, floor=FP8_FLOOR):
    """[..., D] -> (float8_e4m3fn[..., D], u8[..., D/32] e8m0 scales)."""
    g = _groups(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), -1), jnp.float32(floor))
    scale = ceil_e8m0(amax * jnp.float32(1 / FP8_MAX))
    return to_e4m3(g / e8m0_to_f32(scale)[..., None]).reshape(x.shape), scale


def dequantize_fp8(payload, scale):
    """(float8_e4m3fn[..., D], u8[..., D/32]) -> f32[..., D]."""
    return (_groups(payload, GROUP) * e8m0_to_f32(scale)[..., None]).reshape(payload.shape)


def quantize_mxfp4(x):
    """[..., D] -> (packed u8[..., D/2], u8[..., D/32] e8m0 scales)."""
    g = _groups(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), -1), jnp.float32(MXFP4_FLOOR))
    scale = ceil_e8m0(amax * jnp.float32(1 / FP4_MAX))
    return pack_nibbles(to_e2m1(g / e8m0_to_f32(scale)[..., None]).reshape(x.shape)), scale


def dequantize_mxfp4(packed, scale):
    """(u8[..., D/2], u8[..., D/32]) -> f32[..., D]."""
    g = _groups(from_e2m1(unpack_nibbles(packed)), GROUP)
    return (g * e8m0_to_f32(scale)[..., None]).reshape(*packed.shape[:-1], -1)


def sixth(x):
    """f32[...] >= 2^-20 -> f32[...] on the same side of every short midpoint as x / 6 is. XLA turns a division by a
    constant into a product with its rounded reciprocal, which lands on e4m3 midpoints from below: divide as integers."""
    bits = _bits(x)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    sticky = (mantissa % 6 != 0).astype(jnp.uint32)
    return (2 * (mantissa // 6) + sticky).astype(jnp.float32) * _pow2((bits >> 23).astype(jnp.int32) - 151)


def quantize_nvfp4(x):
    """[..., D] -> (packed u8[..., D/2], float8_e4m3fn[..., D/16] scales). No second-level tensor scale."""
    g = _groups(x, NV_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), -1), jnp.float32(NVFP4_FLOOR))
    scale = to_e4m3(sixth(amax))
    return pack_nibbles(to_e2m1(g, scale.astype(jnp.float32)[..., None]).reshape(x.shape)), scale


def dequantize_nvfp4(packed, scale):
    """(u8[..., D/2], float8_e4m3fn[..., D/16]) -> f32[..., D]."""
    g = _groups(from_e2m1(unpack_nibbles(packed)), NV_GROUP)
    return (g * scale.astype(jnp.float32)[..., None]).reshape(*packed.shape[:-1], -1)


def dequantize_weight_fp8(weight, scale, dtype=jnp.bfloat16):
    """(float8_e4m3fn[..., O, I], u8[..., ceil(O/32), ceil(I/32)]) -> dtype[..., O, I]; exact in bf16."""
    o, i = weight.shape[-2:]
    s = jnp.repeat(jnp.repeat(e8m0_to_f32(scale), GROUP, -2)[..., :o, :], GROUP, -1)[..., :i]
    return (weight.astype(jnp.float32) * s).astype(dtype)


def dequantize_weight_mxfp4(packed, scale, dtype=jnp.bfloat16):
    """(u8[..., O, I/2], u8[..., O, I/32]) -> dtype[..., O, I]; exact in bf16."""
    return dequantize_mxfp4(packed, scale).astype(dtype)


# --- KV records (spec/decode.md section 1) ---------------------------------------------------------------------------


def window_record_bytes(dim: int) -> int:
    return dim + dim // GROUP  # 528 at 512


def global_record_bytes(dim: int) -> int:
    return dim // 2 + dim // NV_GROUP  # 288 at 512


def index_record_bytes(dim: int) -> int:
    return dim // 2 + dim // GROUP  # 68 at 128


def _as_u8(x):
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def encode_window(x):
    """[..., D] -> u8[..., D + D/32]: e4m3 payload, then one e8m0 byte per 32 channels."""
    payload, scale = quantize_fp8(x)
    return jnp.concatenate([_as_u8(payload), scale], -1)


def decode_window(record, dim: int):
    """u8[..., D + D/32] -> f32[..., D] (exact in bf16)."""
    payload = jax.lax.bitcast_convert_type(record[..., :dim], jnp.float8_e4m3fn)
    return dequantize_fp8(payload, record[..., dim:])


def encode_global(x):
    """[..., D] -> u8[..., D/2 + D/16]: packed e2m1, then one e4m3 scale byte per 16 channels."""
    packed, scale = quantize_nvfp4(x)
    return jnp.concatenate([packed, _as_u8(scale)], -1)


def decode_global(record, dim: int):
    """u8[..., D/2 + D/16] -> f32[..., D] (exact in bf16)."""
    scale = jax.lax.bitcast_convert_type(record[..., dim // 2 :], jnp.float8_e4m3fn)
    return dequantize_nvfp4(record[..., : dim // 2], scale)


def encode_index(x):
    """[..., J] -> (payload u8[..., J/2], scales u8[..., J/32]); the two planes of an index page."""
    return quantize_mxfp4(x)


def decode_index(payload, scale):
    """(u8[..., J/2], u8[..., J/32]) -> f32[..., J] (exact in bf16)."""
    return dequantize_mxfp4(payload, scale)
