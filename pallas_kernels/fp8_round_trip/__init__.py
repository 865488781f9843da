"""The FP8 rounding of a linear's input (spec/model.md section 4)."""

from .api import explain, fp8_round_trip, quantise

__all__ = ["explain", "fp8_round_trip", "quantise"]
