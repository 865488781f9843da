"""Ending well when the process is told to end."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable

from dsv41_jax.engine.core import Engine


@dataclasses.dataclass
class Stop:
    """received: the number of the signal that came, None = none."""

    received: int | None = None


@contextlib.contextmanager
def shutdown_on_signals(engine: Engine, drain: bool = False, told: Callable[[int], None] | None = None):
    """SIGINT and SIGTERM shut the engine down at its next step instead of raising in the middle of one; finished output is
    kept, running requests are cancelled (or finished, with `drain`). A second signal acts as it did before. Yields a
    `Stop`. told(number) is called as a signal comes. Does nothing outside the main thread, where signals cannot be handled."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {}

    def restore():
        while before:
            signal.signal(*before.popitem())

    def handler(number, frame):
        stop.received = number
        restore()
        engine.shutdown(drain=drain, wait=False)
        if told is not None:
            told(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handler)
    try:
        yield stop
    finally:
        restore()
