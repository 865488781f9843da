"""The producer as the operators that it is made of, each by its own choice: an XLA norm, its FP8 round trip, the window store."""

from ..fp8_round_trip.api import fp8_round_trip
from ..row_ops import rms_norm
from ..window_store.api import window_store


def qkv_producer(pool, front, query_norm, norm, cos, sin, slots, positions, *, eps: float, round_trip: bool):
    """See `api.qkv_producer`."""
    first = query_norm.shape[0]
    q = rms_norm(front[:, :first], query_norm, eps)
    pool = window_store(pool, front, norm, cos, sin, slots, positions, first=first, eps=eps)
    return pool, fp8_round_trip(q) if round_trip else q
