"""The sparse plan shared by the REINDEX layers (spec/decode.md section 3)."""

from .api import SparsePlan, explain, sparse_plan

__all__ = ["SparsePlan", "explain", "sparse_plan"]
