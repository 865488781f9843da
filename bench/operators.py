"""What each operator costs at its specs, beside its floor and beside plain XLA:  python -m bench.operators [op ...]

One JSON file per run in bench/results/: device, versions, commit, the ceilings measured in the same run, and per spec
and implementation the median, minimum and maximum time over at least eight rotating inputs, the floor, their ratio, and
whether the result equals the definition's. "reference" is the definition compiled by XLA, which is the baseline.
"""

import argparse
import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np

from . import common, timing
from .command_line import out_file, run_program

SEEDS = 8
MOST_BYTES = 4 << 30  # of rotating inputs


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator: its folder in pallas_kernels, and its static arguments as fields of a spec.

    extra: further baselines by name, each called like the operator. tolerance: largest difference from the definition
    relative to the largest finite value; 0 means equal bits. in_place: so many of the first arguments are pools that the
    operator returns updated, before anything else; of the values it changes in them or returns, the share `differing` may
    differ from the definition's. specs, implementations: where those two folders' modules list them. unit: whose matrix peak is
    behind the floor, "bf16" or "fp8".
    """

    name: str
    static: tuple[str, ...] = ()
    extra: dict = dataclasses.field(default_factory=dict)
    tolerance: float = 0.0
    function: str | None = None
    specs: str = "SPECS"
    implementations: str = "IMPLEMENTATIONS"
    unit: str = "bf16"
    in_place: int = 0
    differing: float = 0.0

    def module(self, part: str):
        return importlib.import_module(f"pallas_kernels.{self.name}.{part}")

    def names(self) -> list[str]:
        """Implementations and further baselines, fastest first."""
        return [i.name for i in getattr(self.module("api"), self.implementations)] + list(self.extra)

    def call(self, spec, impl: str):
        static = {field: getattr(spec, field) for field in self.static}
        if impl in self.extra:
            return functools.partial(self.extra[impl], **static)
        return functools.partial(getattr(self.module("api"), self.function or self.name), impl=impl, **static)


def _xla_top_k(logits, end, *, k, **_):
    """lax.top_k alone: no filler, no NaN rule, no order. What a straightforward port would call."""
    del end
    return jax.lax.top_k(logits, k)[1]


OPERATORS = (
    # XLA sums in another order: a bf16 result may round the other way, one part in 2**8 of itself
    Operator("block_scaled_matmul", ("groups", "quantised"), tolerance=4e-3, unit="fp8"),
    Operator("select_tokens", ("k",), {"lax.top_k": _xla_top_k}),
    Operator("candidate_blocks", ("k_blocks", "flags")),
    Operator("sparse_plan", ("key_count", "k", "kind")),
    Operator("router", ("k", "scale"), tolerance=1e-5),
    Operator("markov_argmax", ("first",)),
    Operator("expert_plan", ("local", "tile_rows")),
    Operator("fp8_round_trip", ()),
    Operator("fp8_round_trip", (), function="quantise", specs="QUANTISE_SPECS", implementations="QUANTISERS"),
    # an exponential of another library: a bf16 rounding, and with it a code, may go the other way
    Operator("swiglu", ("limit", "round_trip"), differing=2e-3),
    # sums and exponentials round in another order there: a bf16 rounding, and with it a code, may go the other way
    Operator("window_store", ("first", "eps"), in_place=1, differing=2e-3),
    Operator("qkv_producer", ("eps", "round_trip"), in_place=1, differing=2e-3),
    Operator("global_producer", ("eps",), in_place=3, differing=5e-3),
    Operator("hyper_enter", ("eps",), tolerance=1e-2),
    Operator("hyper_leave", ("eps", "iterations", "mix_eps", "round_trip"), tolerance=1e-2, function="site_to_site"),
    Operator("hyper_coefficients", ("streams", "iterations", "eps"), tolerance=1e-4),
    Operator("sparse_attention", ("window", "scale"), tolerance=2e-2),
    # a product and sum of the rotation rounds once or twice: a bf16 rounding, and with it a code, may go the other way
    Operator("index_query", ("heads", "dim", "form"), differing=2e-3),
    Operator("index_score", ("fill",), tolerance=2e-2, unit="fp8"),
    Operator("index_score", ("block_size",), tolerance=2e-2, unit="fp8", function="index_score_blocks",
             specs="BLOCK_SPECS", implementations="BLOCK_IMPLEMENTATIONS"),
)


def call_inputs(spec, seed: int) -> tuple[tuple, dict]:
    """(args, kwargs) of an operator from a spec's inputs: it makes arguments, keyword arguments, or a pair of both."""
    made = spec.make_inputs(seed)
    if isinstance(made, dict):
        return (), made
    return made if len(made) == 2 and isinstance(made[1], dict) else (made, {})


def rotations(spec):
    """At least eight inputs from different seeds, and more by rolling the rows while they fit comfortably."""
    made = [call_inputs(spec, seed) for seed in range(SEEDS)]
    size = sum(x.nbytes for m in made for x in jax.tree.leaves(m))
    turns = max(1, min(2, MOST_BYTES // max(size, 1))) if spec.bytes < 100e6 else 1

    def turned(inputs, turn):
        by_row = lambda x: jnp.roll(x, turn * 37, axis=0) if x.ndim and x.shape[0] == spec.rows else x
        return jax.tree.map(by_row, inputs)

    return [jax.device_put(turned(m, turn)) for turn in range(turns) for m in made]


def smallest_us() -> float:
    """What the shortest kernel costs when measured the same way: below this, launches are what is timed."""
    inputs = [((jnp.full((384, 128), i, jnp.int32),), {}) for i in range(2 * SEEDS)]
    return timing.us_per_call(lambda x: x + 1, inputs)["median"]


def agrees(got, want, tolerance: float) -> bool:
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    if tolerance == 0:
        return all(np.array_equal(np.asarray(g), np.asarray(w)) for g, w in pairs)
    return all(_near(np.asarray(g, np.float32), np.asarray(w, np.float32), tolerance) for g, w in pairs)


def agrees_in_place(got, want, before, differing: float) -> bool:
    """Whether pools differ from the definition's in at most a share of what the definition changed in them."""
    pools = zip(*(jax.tree.leaves(x) for x in (got, want, before)), strict=True)
    pools = [tuple(np.asarray(x) for x in pool) for pool in pools]
    return all((g != w).sum() <= differing * (w != b).sum() for g, w, b in pools)


def agrees_but_for(got, want, differing: float) -> bool:
    """Whether arrays differ from the definition's in at most a share of their values."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all((np.asarray(g) != np.asarray(w)).mean() <= differing for g, w in pairs)


def _near(got, want, tolerance: float) -> bool:
    seen = np.isfinite(want)
    if not np.array_equal(got[~seen], want[~seen]):
        return False
    return bool(np.abs(got[seen] - want[seen]).max() <= tolerance * max(np.abs(want[seen]).max(), 1e-30))


def measure(operator: Operator, spec, peaks: common.Peaks, only: list[str] | None = None, profiled: bool = False) -> list[dict]:
    """Every implementation (of those in `only`) that takes the spec, one record each; profiled: kernels with their own
    time beside it, from the profiler of a GPU."""
    inputs = rotations(spec)
    args, kwargs = inputs[0]
    want = jax.jit(operator.call(spec, "reference"))(*args, **kwargs)
    floor = peaks.floor_us(spec.bytes, spec.flops, operator.unit)
    records = []
    for impl in operator.names():
        if only and impl not in only:
            continue
        function = operator.call(spec, impl)
        try:
            got = jax.jit(function)(*args, **kwargs)
        except ValueError as refusal:
            print(f"{operator.name:18s} {spec.name:28s} {impl:18s} not taken: {refusal}", flush=True)
            continue
        slow = impl == "reference" or impl in operator.extra
        rotating = inputs[:SEEDS] if slow else inputs
        times = timing.us_per_call(function, rotating, dispatches=3 if slow else 40, samples=5 if slow else 15,
                                   in_place=operator.in_place)  # fmt: skip
        if operator.in_place:
            pools = operator.in_place
            made = [jax.tree.leaves(x) for x in (got, want)]
            equal = agrees_in_place(*(x[:pools] for x in made), args[:pools], operator.differing)
            equal = equal and agrees_but_for(*(x[pools:] for x in made), operator.differing)
        elif operator.differing:
            equal = agrees_but_for(got, want, operator.differing)
        else:
            equal = None if impl in operator.extra else agrees(got, want, operator.tolerance)
        record = {
            "operator": operator.function or operator.name,
            "spec": {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)},
            "implementation": impl,
            "equals_definition": equal,
            "rotating_inputs": len(rotating),
            "seeds": list(range(SEEDS)),
            **{f"{name}_us": round(t, 3) for name, t in times.items()},
            "bytes": spec.bytes,
            "flops": spec.flops,
            "floor_us": round(floor, 3),
            "ratio": round(times["median"] / floor, 3),
        }
        if profiled and not slow:
            record |= timing.device_us(function, rotating, in_place=operator.in_place)
            record["device_ratio"] = round(record["device_us"] / floor, 3)
        records.append(record)
        goal = getattr(spec, "goal_us", None)
        print(
            f"{operator.name:18s} {spec.name:28s} {impl:18s} {record['median_us']:9.2f} us  floor {record['floor_us']:7.2f}"
            f"  x{record['ratio']:7.2f}  device {record.get('device_us', '-')}  {spec.bytes / times['median'] / 1e3:7.0f} GB/s"
            f"  goal {goal or '-'}  equal {record['equals_definition']}",
            flush=True,
        )
    return records


def main(argv=None) -> None:
    called = lambda o: (o.name, o.function or o.name)  # its folder, and its own name in results
    names = list(dict.fromkeys(name for o in OPERATORS for name in called(o)))
    parser = argparse.ArgumentParser(prog="bench.operators", description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="op", help=f"any of {', '.join(names)}; all if none is named")
    parser.add_argument("--spec", action="append", help="only specs whose name contains this (repeatable)")
    parser.add_argument("--impl", action="append", help="only these implementations, by name (repeatable; default all): "
                        "one that is for another architecture may not load")  # fmt: skip
    parser.add_argument("--min-rows", type=int, default=64, help="skip specs with fewer rows (default 64)")
    parser.add_argument("--profile", action="store_true", help="each kernel's own time beside it, from the profiler of a GPU: "
                        "what launches hide in an operator timed alone")  # fmt: skip
    parser.add_argument("--out", type=out_file, help="result file (default bench/results/operators_<device>.json)")
    options = parser.parse_args(argv)
    if unknown := set(options.operators) - set(names):
        parser.error(f"unknown operators {sorted(unknown)}; there are {names}")
    chosen = [o for o in OPERATORS if not options.operators or set(called(o)) & set(options.operators)]
    known = {name for o in chosen for name in o.names()}
    if unknown := set(options.impl or ()) - known:
        parser.error(f"unknown implementations {sorted(unknown)}; there are {sorted(known)}")
    wanted = lambda spec: (not options.spec or any(s in spec.name for s in options.spec)) and spec.rows >= options.min_rows
    work = [(o, spec) for o in chosen for spec in getattr(o.module("specs"), o.specs) if wanted(spec)]
    if not work:
        parser.error(f"no spec of {', '.join(o.function or o.name for o in chosen)} has at least {options.min_rows} rows and "
                     f"in its name one of {options.spec or 'all'}")  # fmt: skip
    if options.profile and jax.default_backend() != "gpu":
        parser.error(f"--profile: expected a GPU, the default backend is {jax.default_backend()}")
    head, peaks = common.environment(), common.measure_peaks()
    print(f"{head['device']}, jax {jax.__version__}, {peaks}", flush=True)
    smallest = smallest_us()
    print(f"shortest kernel {smallest:.2f} us", flush=True)
    path = options.out or common.RESULTS / f"operators_{head['device'].lower().replace(' ', '_')}.json"
    head |= {"peaks": dataclasses.asdict(peaks), "shortest_kernel_us": round(smallest, 3)}
    records = []
    for operator, spec in work:
        records += measure(operator, spec, peaks, options.impl, options.profile)
        common.write_json(path, {**head, "results": records})  # a run cut short keeps what it has
    print(f"wrote {path}")


if __name__ == "__main__":
    run_program("bench.operators", main)
