"""How the decode step scales with context, batch and page-table capacity: one process, one set of weights.

    python -m bench.sweep --preset flash-rank --layers 6 --out bench/results/sweep_flash_rank_6.json
    python -m bench.sweep --preset tiny --layers 4 --steps 3 --contexts 64,128 --batches 1,2 --capacities ""

Every point is one run of `bench.decode`'s protocol with its checks. The context axis starts from the workload's batch
and halves it until weights, state and step fit the device; the batch axis stays at the workload's context; the capacity
axis keeps context and batch and only widens the page tables. A cut to a few layers keeps the compiles short: it is said
in the notes, and the floor beside each time is the cut's own. A run cut short keeps the points it has.
"""

import argparse
import concurrent.futures
import dataclasses
import math
import os
import time

from bench import checks, decode
from bench.command_line import run_program
from dsv41_jax.arguments import at_least

CONTEXTS = {"flash-rank": (4096, 16384, 32768, 131072, 524288, 1047552), "tiny": (64, 256, 1024)}
BATCHES = {"flash-rank": (1, 8, 32, 64, 128), "tiny": (1, 2, 4)}
CAPACITIES = {"flash-rank": (33792, 262144, 1048576), "tiny": (320, 1024)}
RESERVE = 8 << 30  # bytes left for the step's temporaries


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """context, batch and capacity of one run; capacity 0 = the preset's headroom beyond the context."""

    context: int
    batch: int
    capacity: int = 0


def points(context: int, batch: int, contexts, batches, capacities, headroom: int) -> dict[Point, list[str]]:
    """{point: the axes that it is on}. A point on several axes is run once; a capacity that is the default is none of
    its own."""
    out: dict[Point, list[str]] = {}
    default = lambda c: 0 if c == context + headroom else c
    for axis, found in (
        ("context", [Point(n, batch) for n in contexts]),
        ("batch", [Point(context, n) for n in batches]),
        ("capacity", [Point(context, batch, default(n)) for n in capacities]),
    ):
        for point in dict.fromkeys(found):
            out.setdefault(point, []).append(axis)
    return out


def state_bytes(w, span: int) -> int:
    """Bytes of the decode state of a workload."""
    import jax

    from dsv41_jax.cache import CacheGeometry, init_state
    from dsv41_jax.precision import RELEASED

    columns = -(-w.capacity // w.page_tokens)
    g = CacheGeometry(w.batch, 1 + w.batch * columns, w.page_tokens, span=span)
    shapes = jax.eval_shape(lambda: init_state(w.config, g, RELEASED))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def fitting_batch(batch: int, held: int, limit: int | None, size) -> int:
    """The first of batch, batch/2, ... whose state fits: held + size(batch) + RESERVE <= limit bytes; 1 at least.

    limit None: a device that does not say what it has."""
    while batch > 1 and limit is not None and held + size(batch) + RESERVE > limit:
        batch //= 2
    return batch


class Sweep:
    """The runs of one process: they share the parameters that the first one makes."""

    def __init__(self, args, watch: decode.CompileWatch, peaks):
        self.args, self.watch, self.peaks, self.params = args, watch, peaks, None
        self.benches: dict[Point, decode.Bench] = {}

    def prepare(self, todo: dict[Point, list[str]]) -> None:
        """Trace the points' steps one by one and compile them side by side; a point that is on the batch axis keeps its
        batch, another's is halved until its state fits. Raises ValueError where an operator refuses the shapes."""
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = []
            for point, axes in todo.items():
                batch = point.batch if "batch" in axes or self.params is None else self._fitting(point)
                bench = self.benches[point] = self._bench(point, batch)
                running.append(pool.submit(bench.compile, bench.lower()))
        for future in running:
            future.result()
        print(f"{len(running)} steps compiled in {time.perf_counter() - start:.1f} s", flush=True)

    def _bench(self, point: Point, batch: int) -> decode.Bench:
        bench = decode.Bench(self._at(point, batch), self.watch, self.params)
        self.params = bench.params
        return bench

    def run(self, point: Point, shrink: bool) -> dict:
        """Protocol and result of one point, batch halved while it does not fit if `shrink`. Raises RuntimeError
        (RESOURCE_EXHAUSTED) if it does not fit."""
        import jax

        bench = self.benches.pop(point)
        while True:
            try:
                return self._measure(bench)
            except jax.errors.JaxRuntimeError as e:
                batch = bench.workload.batch
                if not str(e).startswith("RESOURCE_EXHAUSTED") or not shrink or batch == 1:
                    raise
                print(f"{point}: batch {batch} does not fit, halved", flush=True)
            bench = self._bench(point, batch // 2)
            bench.compile()

    def _at(self, point: Point, batch: int) -> argparse.Namespace:
        values = {"context": point.context, "batch": batch, "capacity": point.capacity or None}
        return argparse.Namespace(**{**vars(self.args), **values})

    def _fitting(self, point: Point) -> int:
        import jax

        from bench import presets

        def size(batch: int) -> int:
            a = self._at(point, batch)
            w = presets.workload(a.preset, layers=a.layers, batch=a.batch, context=a.context, capacity=a.capacity)
            return state_bytes(w, a.gamma + 1)

        held = sum(a.nbytes for a in jax.tree.leaves(self.params))
        stats = jax.devices()[0].memory_stats() or {}
        return fitting_batch(point.batch, held, stats.get("bytes_limit"), size)

    def _measure(self, bench: decode.Bench) -> dict:
        bench.load()
        checks.in_place(bench)
        rounds = decode.measure(bench, self.watch)
        result = decode.result(bench, rounds, self.peaks)
        result["floor"].pop("rows")
        result["memory_gb"].pop("peak_in_use")  # of the process, so of the largest point before it
        return {"protocol": decode.protocol(bench), "result": result}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(part) for part in text.split(",") if part.strip())


def main(argv=None) -> dict:
    p = decode.workload_parser("bench.sweep", __doc__)
    p.set_defaults(warmup=1)
    for name, presets_ in (("contexts", CONTEXTS), ("batches", BATCHES), ("capacities", CAPACITIES)):
        p.add_argument(f"--{name}", type=numbers, help=f'comma-separated, "" = none; flash-rank: {presets_["flash-rank"]}')
    args = p.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    watch = decode.CompileWatch()
    from bench import common, presets

    w = presets.workload(args.preset, layers=args.layers, batch=args.batch, context=args.context)
    asked = [
        given if given is not None else table.get(args.preset, ())
        for given, table in ((args.contexts, CONTEXTS), (args.batches, BATCHES), (args.capacities, CAPACITIES))
    ]
    todo = points(w.context, w.batch, *asked, w.headroom)
    if not todo:
        raise ValueError("sweep: expected a point on one of --contexts, --batches and --capacities, got none")
    decode.decode_options(args)
    for point in todo:  # refuses what cannot be before anything runs
        presets.workload(args.preset, layers=args.layers, batch=point.batch, context=point.context,
                         capacity=point.capacity or None)  # fmt: skip
    peaks = common.measure_peaks()
    sweep = Sweep(args, watch, peaks)
    head = {"benchmark": "sweep", "environment": common.environment(args.seed), "peaks": dataclasses.asdict(peaks)}
    runs = []
    for i, (point, axes) in enumerate(todo.items()):
        if i % decode.TOGETHER == 0:  # so that a run cut short has measured what it compiled
            sweep.prepare(dict(list(todo.items())[i : i + decode.TOGETHER]))
        print(f"{point} ({', '.join(axes)})", flush=True)
        try:
            run = {"axes": axes, "asked": dataclasses.asdict(point), **sweep.run(point, shrink="batch" not in axes)}
        except RuntimeError as e:
            if not str(e).startswith("RESOURCE_EXHAUSTED"):
                raise
            run = {"axes": axes, "asked": dataclasses.asdict(point), "error": str(e).splitlines()[0]}
            print(run["error"], flush=True)
        runs.append(run)
        if args.out:
            common.write_json(args.out, {**head, "runs": runs})
    _print(runs)
    return {**head, "runs": runs}


def _print(runs: list[dict]) -> None:
    print(f"{'axes':24s} {'context':>8s} {'capacity':>8s} {'batch':>5s} {'step ms':>9s} {'floor':>8s} {'ratio':>6s}")
    for run in runs:
        if "error" in run:
            print(f"{','.join(run['axes']):24s} {run['asked']} {run['error']}")
            continue
        r, p = run["result"], run["protocol"]
        print(f"{','.join(run['axes']):24s} {p['context']:8d} {p['capacity']:8d} {p['batch']:5d} {r['step_ms']:9.3f} "
              f"{r['floor_ms']:8.3f} {r['ratio']:6.2f}")  # fmt: skip


if __name__ == "__main__":
    run_program("bench.sweep", main)
