"""How an operator's device time is measured: calls over rotating inputs in one compiled function, repeated samples."""

import statistics
import time

import jax


def us_per_call(function, rotations, *, dispatches: int = 20, samples: int = 15) -> dict[str, float]:
    """Time `function(*args, **kwargs)` over the (args, kwargs) pairs of `rotations`.

    All rotations run one after the other inside one jitted function, so host time and launch gaps show only as far as
    they would in a real step; `dispatches` of those are queued per sample, and the host waits once per sample.
    Returns microseconds per call: {"median", "min", "max"}.
    """
    one = jax.jit(function)  # traced and lowered once for all rotations
    compiled = jax.jit(lambda every: [one(*a, **k) for a, k in every])
    for _ in range(2):
        out = jax.block_until_ready(compiled(rotations))
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(dispatches):
            out = compiled(rotations)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) * 1e6 / (dispatches * len(rotations)))
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}
