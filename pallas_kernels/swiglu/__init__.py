"""Clamped SwiGLU of the shared expert, on request through FP8 (spec/model.md sections 4 and 9)."""

from .api import explain, fuses, swiglu

__all__ = ["explain", "fuses", "swiglu"]
