"""How an operator's device time is measured: calls over rotating inputs in one compiled function, repeated samples."""

import statistics
import time

import jax
import jax.numpy as jnp


def us_per_call(function, rotations, *, dispatches: int = 20, samples: int = 15, in_place: int = 0) -> dict[str, float]:
    """Time `function(*args, **kwargs)` over the (args, kwargs) pairs of `rotations`.

    All rotations run one after the other inside one jitted function, so host time and launch gaps show only as far as
    they would in a real step; `dispatches` of those are queued per sample, and the host waits once per sample.
    in_place: so many of the first arguments are what the function returns, updated; every call gets them from the call
    before, in donated buffers, as pools have it in a real step.
    Returns microseconds per call: {"median", "min", "max"}.
    """
    one = jax.jit(function)  # traced and lowered once for all rotations
    state = jax.tree.map(jnp.copy, tuple(rotations[0][0][:in_place]))
    rest = [(a[in_place:], k) for a, k in rotations]

    def every(state, rest):
        out = []
        for a, k in rest:
            result = one(*state, *a, **k)
            if in_place:
                state = result if isinstance(result, tuple) else (result,)
            else:
                out.append(result)
        return state, out

    compiled = jax.jit(every, donate_argnums=0)
    for _ in range(2):
        state, out = jax.block_until_ready(compiled(state, rest))
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(dispatches):
            state, out = compiled(state, rest)
        jax.block_until_ready((state, out))
        times.append((time.perf_counter() - start) * 1e6 / (dispatches * len(rotations)))
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}
