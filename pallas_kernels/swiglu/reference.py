"""What the clamped SwiGLU is, in plain jnp (spec/model.md section 9)."""

import jax
import jax.numpy as jnp

from .. import codecs
from ..fp8_round_trip.reference import fp8_round_trip


def swiglu(gate_up, *, limit: float, round_trip: bool):
    """See `api.swiglu`."""
    g, v = jnp.split(gate_up.astype(jnp.float32), 2, -1)
    y = codecs.rounded(jax.nn.silu(jnp.minimum(g, limit)) * jnp.clip(v, -limit, limit), gate_up.dtype)
    return fp8_round_trip(y) if round_trip else y
