"""What the producer is, in plain jnp: the norm ahead of QB and the window store (spec/model.md section 5)."""

from ..fp8_round_trip.reference import fp8_round_trip
from ..row_ops import rms_norm
from ..window_store.reference import window_store


def qkv_producer(pool, front, query_norm, norm, cos, sin, slots, positions, *, eps: float, round_trip: bool):
    """See `api.qkv_producer`."""
    first = query_norm.shape[0]
    q = rms_norm(front[:, :first], query_norm, eps)
    pool = window_store(pool, front, norm, cos, sin, slots, positions, first=first, eps=eps)
    return pool, fp8_round_trip(q) if round_trip else q
