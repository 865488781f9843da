"""Products with block-scaled FP8 weights."""

from .api import block_scaled_matmul, explain
from .hopper import LARGEST_SCALE

__all__ = ["LARGEST_SCALE", "block_scaled_matmul", "explain"]
