"""Where a decode step's time goes: attention by layer class, and everything else, from a profiler trace of the real step.

    python -m bench.decode --preset flash-rank --profile DIR --out decode.json
    python -m bench.layers --trace DIR --decode decode.json --out bench/results/layers.json

Every kernel of the trace is looked up in the traced step's HLO, whose instructions carry the model's named scopes. The
attention interval of a layer is the reference's: after the input mHC and norm, to the end of the output projection
(spec/decode.md section 5). The parts add up to the time in which a kernel runs; what the step measured without a
profiler takes beyond that is its gaps. The traced step is launched kernel by kernel, so its own gaps are larger.
"""

import argparse
import dataclasses
import gzip
import itertools
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable

from bench.command_line import out_file, run_program
from dsv41_jax.arguments import at_least
from dsv41_jax.json_files import read_json_object

# the reference system's attention interval on B300, us (spec/decode.md section 5, "optimised")
REFERENCE_B300_US = {"SWA": 99.29, "FULL2": 292.24, "FULL1": 360.80, "REINDEX": 187.66, "REUSE": 128.06}

_ATTENTION = ("front_projection", "qkv_producer", "window_store", "global_producer", "qb", "indexer", "sparse_attention",
              "output_projection")  # fmt: skip
# (part, pattern of the scope), first match wins
_PARTS = (
    ("draft commit", r"/draft_commit(/|$)"),
    ("draft lm_head", r"/draft_propose/lm_head(/|$)"),
    ("Markov head", r"/markov(/|$)"),
    ("draft experts", r"/draft_stage\d+/experts(?!/shared_expert)(/|$)"),
    ("draft, the rest", r"/draft_propose(/|$)"),
    *((f"attention: {scope}", rf"/layer\d+_\w+/{scope}(/|$)") for scope in _ATTENTION),
    ("mHC mixes", r"/layer\d+_\w+/hyper_mixes(/|$)"),
    ("mHC expand", r"/layer\d+_\w+/hyper_expand(/|$)"),
    ("router", r"/layer\d+_\w+/router(/|$)"),
    ("experts", r"/layer\d+_\w+/experts(?!/shared_expert)(/|$)"),
    ("shared expert", r"/layer\d+_\w+/experts/shared_expert(/|$)"),
    ("engram", r"/layer\d+_\w+/engram(/|$)"),
    ("layers, the rest", r"/layer\d+_\w+(/|$)"),
    ("lm_head", r"/lm_head(/|$)"),
    ("verify", r"/verify(/|$)"),
    ("embed", r"/embed(/|$)"),
    ("final norm", r"/final_norm(/|$)"),
)  # fmt: skip
TRANSFERS = ("nccl", "MemcpyP2P")  # how their kernels are called
_LAYER = re.compile(r"/layer(\d+)_(\w+?)/(\w+)")


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel of a trace: the HLO instruction it came from ("" if the profiler does not say), start and duration in ns."""

    op: str
    name: str
    start: float
    duration: float


def part_of(scope: str) -> str:
    """The part of the step that a scope belongs to; "unattributed" where XLA kept no scope."""
    return next((part for part, pattern in _PARTS if re.search(pattern, "/" + scope)), "unattributed")


def scopes_of(hlo: str) -> dict[str, str]:
    """{instruction name: jax's name stack} of a compiled module."""
    from bench.hlo_report import computations

    _, comps = computations(hlo)
    return {op.name: op.scope for ops in comps.values() for op in ops}


def read_trace(folder, module: str = "jit_bound", gpu: int = 0) -> list[Event]:
    """Kernels of the newest trace below `folder` on one GPU, by start, those of other modules left out. A trace may
    be the profiler's own file or the Perfetto file beside it.

    Raises FileNotFoundError without a trace, ValueError for one that cannot be read."""
    import jax

    found = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
    if not found:
        found = sorted(pathlib.Path(folder).rglob("*.trace.json.gz"))
        if not found:
            raise FileNotFoundError(f"{folder}: no *.xplane.pb and no *.trace.json.gz below it")
        return _read_perfetto(found[-1], module, gpu)
    events = []
    try:
        data = jax.profiler.ProfileData.from_file(str(found[-1]))
    except RuntimeError as e:
        raise ValueError(f"{found[-1]}: expected a profiler trace ({e})") from None
    for plane in data.planes:
        if not plane.name.endswith(f"GPU:{gpu}"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for e in line.events:
                stats = dict(e.stats)
                if str(stats.get("hlo_module", module)).startswith(module):
                    events.append(Event(str(stats.get("hlo_op", "")), e.name, e.start_ns, e.duration_ns))
    return sorted(events, key=lambda e: e.start)


def _read_perfetto(path: pathlib.Path, module: str, gpu: int) -> list[Event]:
    try:
        rows = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: expected a Perfetto trace of the profiler ({type(e).__name__}: {e})") from None
    named = {e["pid"]: e["args"]["name"] for e in rows if e.get("name") == "process_name"}
    events = []
    for e in rows:
        stats = e.get("args", {})
        if e.get("ph") == "X" and named.get(e["pid"], "").endswith(f"GPU:{gpu}") and stats.get("hlo_module", module).startswith(module):
            events.append(Event(stats.get("hlo_op", ""), e["name"], e["ts"] * 1e3, e["dur"] * 1e3))
    return sorted(events, key=lambda e: e.start)


def exchange(events: list[Event], steps: int) -> dict | None:
    """Transfers of one step (NCCL's kernels, copies between GPUs) in us: their sum, what other kernels of this GPU hide of
    it, what is exposed, each also by kernel; None without any. waited_us: of `waits`."""
    moves = [e for e in events if e.name.startswith(TRANSFERS)]
    if not moves:
        return None
    others = _covered([e for e in events if not e.name.startswith(TRANSFERS)])
    rows = defaultdict(lambda: {"count": 0.0, "us": 0.0, "hidden_us": 0.0})
    for e in moves:
        row = rows[re.match(r"\w+", e.name).group(0)]
        hidden = sum(max(0.0, min(stop, e.start + e.duration) - max(start, e.start)) for start, stop in others)
        for key, value in (("count", 1), ("us", e.duration / 1e3), ("hidden_us", hidden / 1e3)):
            row[key] += value / steps
    for row in rows.values():
        row["exposed_us"] = row["us"] - row["hidden_us"]
    total = {key: sum(row[key] for row in rows.values()) for key in ("count", "us", "hidden_us", "exposed_us")}
    total["waited_us"] = sum(waits(events)) / steps / 1e3
    rounded = lambda row: {key: round(value, 2) for key, value in row.items()}
    return {**rounded(total), "kernels": {name: rounded(row) for name, row in rows.items()}}


def waits(events: list[Event]) -> list[float]:
    """For every transfer by its start, ns that no other kernel ran before the next one could begin: the gap in which it
    ended, if it was the last to end there, else 0. That holds what a transfer's own time does not show: NCCL's kernels wait
    for the slowest rank inside, a copy before it starts."""
    moves = [e for e in events if e.name.startswith(TRANSFERS)]
    others = _covered([e for e in events if not e.name.startswith(TRANSFERS)])
    out = [0.0] * len(moves)
    for (_, idle), (busy, _) in itertools.pairwise(others):
        ended = [(e.start + e.duration, i) for i, e in enumerate(moves) if idle < e.start + e.duration <= busy]
        if ended:
            out[max(ended)[1]] = busy - idle
    return out


def waits_of_gpus(traces: list[list[Event]], steps: int) -> dict:
    """Of the traces of all GPUs, us a step: waited_us_by_gpu, and waited_by_all_us: of every transfer, the wait of the GPU
    that waited least. What is beyond that is waiting for a rank that was not ready: experts chosen unevenly, not the link.
    """
    each = [waits(events) for events in traces]
    us = lambda values: round(sum(values) / steps / 1e3, 2)
    return {"waited_us_by_gpu": [us(w) for w in each], "waited_by_all_us": us(map(min, zip(*each, strict=True)))}


def _covered(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Intervals in which at least one of the events (by start) runs."""
    out: list[list[float]] = []
    for e in events:
        if out and e.start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], e.start + e.duration)
        else:
            out.append([e.start, e.start + e.duration])
    return [tuple(x) for x in out]


def busy_ns(events: Iterable[Event]) -> float:
    """Time that at least one kernel covers."""
    return sum(stop - start for start, stop in _covered(events))


def by_kernel(events: Iterable[Event], steps: int) -> dict[str, dict[str, float]]:
    """{kernel: {"count", "us"}} per step, the longest first; the numbers that XLA appends to names are left out."""
    rows = defaultdict(lambda: {"count": 0.0, "us": 0.0})
    for e in events:
        row = rows[re.sub(r"(_\d+)+$", "", e.name)]
        row["count"] += 1 / steps
        row["us"] += e.duration / steps / 1e3
    return {
        name: {"count": round(row["count"], 2), "us": round(row["us"], 3)}
        for name, row in sorted(rows.items(), key=lambda kv: -kv[1]["us"])
    }


def attribute(events: list[Event], scopes: dict[str, str], steps: int) -> dict:
    """Parts of one step in us, kernels per step, attention by layer class; parts are scaled where kernels overlap."""
    span = (max(e.start + e.duration for e in events) - events[0].start) / steps / 1e3
    busy, summed = busy_ns(events) / steps / 1e3, sum(e.duration for e in events) / steps / 1e3
    share = busy / summed  # kernels of two streams side by side count once
    parts, kernels, layers = defaultdict(float), defaultdict(list), defaultdict(float)
    for e in events:
        scope = scopes.get(e.op, "")
        part = part_of(scope)
        parts[part] += e.duration * share / steps / 1e3
        kernels[part].append(e)
        layer = _LAYER.search("/" + scope)
        if layer and layer.group(3) in _ATTENTION:
            layers[int(layer.group(1)), layer.group(2)] += e.duration * share / steps / 1e3
    return {
        "traced_step_us": round(span, 2),
        "busy_us": round(busy, 2),
        "parts_us": {k: round(v, 2) for k, v in sorted(parts.items(), key=lambda kv: -kv[1])},
        "kernels": {k: round(len(es) / steps, 1) for k, es in sorted(kernels.items(), key=lambda kv: -len(kv[1]))},
        "by_kernel": {part: by_kernel(kernels[part], steps) for part in sorted(kernels)},
        "attention": attention_classes(layers),
        "exchange": exchange(events, steps),
    }


def attention_classes(layers: dict[tuple[int, str], float]) -> dict:
    """Mean attention interval by class beside the reference's B300 figure, and the mean over all layers.

    layers: {(layer, class): us of one step}."""
    by_class = defaultdict(list)
    for (_, kind), us in layers.items():
        by_class[kind].append(us)
    rows = {
        kind: {"layers": len(us), "us": round(sum(us) / len(us), 2), "reference_b300_us": REFERENCE_B300_US.get(kind)}
        for kind, us in by_class.items()
    }
    every = [u for us in by_class.values() for u in us]
    return {"classes": rows, "mean_us": round(sum(every) / len(every), 2) if every else None}


def read_decode(path) -> dict:
    """The result file of the traced run. Raises ValueError (file, expected, got), OSError if it cannot be read."""
    data = read_json_object(path)
    result = data.get("result")
    step = result.get("step_ms") if isinstance(result, dict) else None
    if data.get("benchmark") != "decode" or not isinstance(step, int | float):
        raise ValueError(f"{path}: expected a result of bench.decode with its step_ms, got {sorted(data)[:8]}")
    return data


def main(argv=None) -> dict:
    p = argparse.ArgumentParser(prog="bench.layers", description=__doc__.split("\n\n")[0])
    p.add_argument("--trace", required=True, type=pathlib.Path, help="folder that bench.decode --profile wrote")
    p.add_argument("--decode", required=True, help="JSON of the same run")
    p.add_argument("--steps", type=at_least(1), default=4, help="steps in the trace")
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the result as JSON")
    args = p.parse_args(argv)
    traced = read_decode(args.decode)
    events = read_trace(args.trace)
    if not events:
        raise SystemExit(f"bench.layers: {args.trace} holds no GPU kernels of the step")
    out = attribute(events, scopes_of((args.trace / "step.hlo").read_text()), args.steps)
    measured = traced["result"]["step_ms"] * 1e3
    if out["exchange"]:
        others = [read_trace(args.trace, gpu=gpu) for gpu in range(1, traced["protocol"].get("ranks", 1))]
        out["exchange"] |= waits_of_gpus([events, *others], args.steps)
    out["parts_us"]["gaps"] = round(measured - out["busy_us"], 2)
    out = {
        "benchmark": "layers",
        "environment": traced["environment"],
        "protocol": traced["protocol"],
        "measured_step_us": measured,
        **out,
    }
    if args.out:
        from bench.common import write_json

        write_json(args.out, out)
    _print(out)
    return out


def _print(out: dict) -> None:
    step = out["measured_step_us"]
    print(f"step {step:.0f} us measured, busy {out['busy_us']:.0f} us; {out['traced_step_us']:.0f} us traced kernel by kernel")
    for part, us in out["parts_us"].items():
        print(f"  {part:32s} {us:10.1f} us  {100 * us / step:5.1f} %  {out['kernels'].get(part, 0):8.1f} kernels")
    if x := out["exchange"]:
        print(f"  exchange {x['us']:.0f} us in {x['count']:.0f} collectives, {x['hidden_us']:.0f} hidden, {x['exposed_us']:.0f} exposed; "
              f"us waited by GPU: {', '.join(f'{us:.0f}' for us in x['waited_us_by_gpu'])}; by all {x['waited_by_all_us']:.0f}")
    for kind, row in out["attention"]["classes"].items():
        print(f"  attention {kind:8s} x{row['layers']:<3d} {row['us']:9.1f} us (reference on B300: {row['reference_b300_us']})")


if __name__ == "__main__":
    run_program("bench.layers", main)
