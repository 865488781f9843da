"""Routed experts: grouped MXFP4 SwiGLU with an fp32 combine."""

from .api import experts, explain

__all__ = ["experts", "explain"]
