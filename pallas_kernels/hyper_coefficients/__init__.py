"""Coefficients of a hyper-connection site from its products (spec/model.md section 3)."""

from .api import explain, hyper_coefficients

__all__ = ["explain", "hyper_coefficients"]
