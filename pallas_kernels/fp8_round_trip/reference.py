"""What the round trip and its first half are, in plain jnp."""

import jax
import jax.numpy as jnp

from .. import codecs


def fp8_round_trip(x):
    """See `api.fp8_round_trip`."""
    return codecs.dequantize_fp8(*codecs.quantize_fp8(x)).astype(x.dtype)


def quantise(x, count=None):
    """See `api.quantise`."""
    del count
    codes, scales = codecs.quantize_fp8(x)
    return jax.lax.bitcast_convert_type(codes, jnp.uint8), scales
