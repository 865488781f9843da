"""Both halves of the front product of a step's rows: queries for QB, window KV for the ring (spec/decode.md A8)."""

from .api import explain, merges, qkv_producer

__all__ = ["explain", "merges", "qkv_producer"]
