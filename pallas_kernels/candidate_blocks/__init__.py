"""Candidate block publication (spec/decode.md section 3)."""

from .api import candidate_blocks, explain

__all__ = ["candidate_blocks", "explain"]
