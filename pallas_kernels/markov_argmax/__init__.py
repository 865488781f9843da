"""Greedy choice of a drafted token under the Markov bias (spec/model.md section 11)."""

from .api import explain, markov_argmax

__all__ = ["explain", "markov_argmax"]
