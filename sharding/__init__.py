"""Data-parallel attention and caches, expert-parallel experts: the step over one mesh axis of R ranks."""
