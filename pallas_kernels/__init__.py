"""Decode operators: one folder each (`api`, `reference`, GPU implementations, `specs`). Nothing here imports the model."""
