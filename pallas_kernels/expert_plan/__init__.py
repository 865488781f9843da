"""Which sorted rows each expert gets, and the row tiles of the grouped GEMM over them."""

from .api import Plan, expert_plan, explain

__all__ = ["Plan", "expert_plan", "explain"]
