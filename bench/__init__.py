"""Benchmarks: protocol, layer classes, operators, each beside its roofline floor (spec/performance.md)."""
