"""The SwiGLU as XLA fuses it, then the FP8 round trip by its own choice."""

from ..fp8_round_trip.api import fp8_round_trip
from . import reference


def swiglu(gate_up, *, limit: float, round_trip: bool):
    """See `api.swiglu`."""
    y = reference.swiglu(gate_up, limit=limit, round_trip=False)
    return fp8_round_trip(y) if round_trip else y
