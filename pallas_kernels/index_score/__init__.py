"""Indexer scores of queries against the paged FP4 index keys: all visible columns, or candidate blocks only."""

from pallas_kernels.index_score.api import explain, explain_blocks, index_score, index_score_blocks

__all__ = ["explain", "explain_blocks", "index_score", "index_score_blocks"]
