"""How an operator's device time is measured: calls over rotating inputs in one compiled function, repeated samples."""

import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from .layers import by_kernel, read_trace


def us_per_call(function, rotations, *, dispatches: int = 20, samples: int = 15, in_place: int = 0) -> dict[str, float]:
    """Time `function(*args, **kwargs)` over the (args, kwargs) pairs of `rotations`.

    All rotations run one after the other inside one jitted function, so host time and launch gaps show only as far as
    they would in a real step; `dispatches` of those are queued per sample, and the host waits once per sample.
    in_place: so many of the first arguments are what the function returns first, updated; every call gets them from the
    call before, in donated buffers, as pools have it in a real step.
    Returns microseconds per call: {"median", "min", "max"}.
    """
    compiled, state, rest, out = _all_rotations(function, rotations, in_place)
    for _ in range(2):
        state, out = jax.block_until_ready(compiled(state, out, rest))
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(dispatches):
            state, out = compiled(state, out, rest)
        jax.block_until_ready((state, out))
        times.append((time.perf_counter() - start) * 1e6 / (dispatches * len(rotations)))
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def device_us(function, rotations, *, dispatches: int = 4, in_place: int = 0) -> dict:
    """What the GPU itself was busy for, per call of `function`: profiler time of its kernels, launches and gaps left out.

    Arguments as `us_per_call`. Returns {"device_us": sum over the kernels, "kernels": {name: {"count", "us"}} per call}.
    Compiled without CUDA graphs, in which the profiler does not tell kernels of one module from another's. Raises
    RuntimeError for a trace without any."""
    compiled, state, rest, out = _all_rotations(function, rotations, in_place, {"xla_gpu_graph_min_graph_size": 1 << 30})
    for _ in range(2):
        state, out = jax.block_until_ready(compiled(state, out, rest))
    with tempfile.TemporaryDirectory(prefix="dsv41-trace-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(dispatches):
                state, out = compiled(state, out, rest)
            jax.block_until_ready((state, out))
        kernels = by_kernel(read_trace(folder, "jit_every"), dispatches * len(rotations))
    if not kernels:
        raise RuntimeError("profiler: the trace holds no kernel of the timed calls")
    return {"device_us": round(sum(row["us"] for row in kernels.values()), 3), "kernels": kernels}


def _all_rotations(function, rotations, in_place: int, compiler_options=None):
    """(compiled, state, rest, out): state, out = compiled(state, out, rest) calls `function` once for each rotation.

    The last outputs are donated, so that they are where the next go: a CUDA graph whose addresses change is updated, node
    by node, before it is launched."""
    one = jax.jit(function)  # traced and lowered once for all rotations
    state = jax.tree.map(jnp.copy, tuple(rotations[0][0][:in_place]))
    rest = [(a[in_place:], k) for a, k in rotations]

    def every(state, last, rest):
        del last
        out = []
        for a, k in rest:
            result = one(*state, *a, **k)
            if in_place:
                result = result if isinstance(result, tuple) else (result,)
                state, result = result[:in_place], result[in_place:]
            out.append(result)
        return state, out

    shapes = jax.eval_shape(every, state, None, rest)[1]
    out = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    donated = jax.jit(every, donate_argnums=(0, 1), keep_unused=True)
    return donated.lower(state, out, rest).compile(compiler_options), state, rest, out
