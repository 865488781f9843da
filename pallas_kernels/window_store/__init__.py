"""Window store: the window KV of a step's rows, from the projection into the ring (spec/model.md section 5)."""

from .api import explain, window_store

__all__ = ["explain", "window_store"]
