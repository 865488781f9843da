"""Routed experts: grouped MXFP4 SwiGLU with an fp32 combine."""

from .api import experts, experts_parts, explain
from .layout import is_shuffled, scales_fit, shuffle_w2, shuffle_w13, shuffle_weights, unshuffle_weights

__all__ = [
    "experts", "experts_parts", "explain", "is_shuffled", "scales_fit", "shuffle_w13", "shuffle_w2", "shuffle_weights",
    "unshuffle_weights",
]  # fmt: skip
