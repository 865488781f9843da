"""A profiler trace of the real decode step, viewable in Perfetto and XProf, read by bench.layers."""

import dataclasses
import os

from bench.decode import Bench, run_round

# more kernels than any step has: no part of it becomes a CUDA graph
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Stands in for `Steps` in a profiled round: the same step from an executable of its own."""

    compiled: object
    leaves: list

    def decode(self, state, batch):
        return self.compiled(self.leaves, state, batch)


def compile_traced(lowered):
    """The executable of a lowered step that `profile` runs. On a GPU it has no CUDA graphs: the profiler names the HLO
    instruction of a kernel only if XLA launched it by itself. The kernels are the same; the gaps between them are not."""
    import jax

    return lowered.compile(_NO_GRAPHS if jax.default_backend() == "gpu" else None)


def profile(bench: Bench, folder: str, compiled, count: int = 4) -> None:
    """Trace a short round of its own, after the measured ones, into `folder`, with the traced step's HLO beside it.

    compiled: of `compile_traced`."""
    import jax

    steps = _Traced(compiled, bench.steps.leaves)
    bench.rewind()
    bench.state, _ = run_round(steps, bench.state, bench.batch, 2)
    bench.rewind()
    with jax.profiler.trace(folder):
        bench.state, _ = run_round(steps, bench.state, bench.batch, count)
    with open(os.path.join(folder, "step.hlo"), "w") as f:
        f.write(compiled.as_text())
