"""Sinkhorn normalisation of the hyper-connection mixing matrices (spec/model.md section 3)."""

from .api import explain, sinkhorn

__all__ = ["explain", "sinkhorn"]
