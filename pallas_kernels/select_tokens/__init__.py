"""Exact top-k token selection (spec/decode.md A5, A8)."""

from .api import SlotMap, explain, select_tokens

__all__ = ["SlotMap", "explain", "select_tokens"]
