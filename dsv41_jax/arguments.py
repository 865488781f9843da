"""Types of command-line arguments, of `dsv41` and the benches."""

import argparse
from collections.abc import Callable


def at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer >= low, and <= high if that is given."""
    expected = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse
