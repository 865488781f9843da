"""What the entry of a site is, in plain jnp (spec/model.md sections 2 and 3)."""

import jax
import jax.numpy as jnp

from .. import codecs
from ..row_tiles import in_row_tiles


def hyper_enter(streams, pre, weight, *, eps: float):
    """See `api.hyper_enter`."""
    return in_row_tiles(lambda s, p: _enter(s, p, weight, eps), streams, pre)


def _enter(streams, pre, weight, eps: float):
    dtype = streams.dtype
    streams = streams.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(jnp.square(streams), (-2, -1)) + eps)
    x = codecs.round_values(jnp.sum(pre[..., None] * streams, -2), dtype)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return codecs.rounded(x * weight.astype(jnp.float32), dtype), r
