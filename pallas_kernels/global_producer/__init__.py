"""Global producer: compressed KV entries, their index keys and the pending rows (spec/model.md section 6)."""

from .api import explain, global_producer

__all__ = ["explain", "global_producer"]
