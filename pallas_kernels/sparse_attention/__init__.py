"""Attention over the window ring and the selected compressed entries, read from the pools in their byte formats."""

from pallas_kernels.sparse_attention.api import attend, explain, sparse_attention

__all__ = ["attend", "explain", "sparse_attention"]
