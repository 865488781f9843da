"""e4m3 and e8m0 arithmetic on fp32 bits that Pallas lowers to Triton: what `codecs` does, in the operations it has."""

import jax
import jax.numpy as jnp

_SUBNORMAL = 2.0**14  # the distance of fp32 numbers from here on is 2**-9, e4m3's smallest
_SUBNORMAL_BITS = (127 + 14) << 23


def bits_of(x):
    """f32 -> i32"""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits):
    """i32 -> f32"""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def ceil_exponent(x):
    """f32 > 0 -> i32: `codecs.ceil_e8m0`, the byte of the smallest power of two >= x, for x below 2**127."""
    bits = bits_of(x)
    return (bits >> 23) + jnp.where((bits & 0x7FFFFF) != 0, 1, 0)


def code_of(a):
    """f32 0 <= a <= 448 -> i32 e4m3 code, ties to even."""
    bits = bits_of(a)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    return jnp.where(a < 2.0**-6, bits_of(a + _SUBNORMAL) - _SUBNORMAL_BITS, normal)


def value_of(code):
    """i32 e4m3 code 0..126 -> f32"""
    return jnp.where(code < 8, code.astype(jnp.float32) * 2.0**-9, float_of((code + 960) << 20))
