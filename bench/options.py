"""What every switch of the decode step is worth: each toggled alone against the default, in one interleaved run.

    python -m bench.options --preset flash-rank --layers 6 --out bench/results/options_flash_rank_6.json
    python -m bench.options --preset tiny --layers 4 --steps 4 --only fake_balance_experts

A variant differs from the default (`--impl`) in one field of `DecodeOptions`: a flag turned over, or one operator given
another implementation that takes the device and the shapes. All variants share one set of weights and one state. Every
round runs each of them once, in an order that turns from round to round, and a variant is compared with the default of
the same round, so a drifting clock hits all alike. "default again" is the default measured twice: the spread of nothing.
Protocol and checks are those of `bench.decode`.
"""

import concurrent.futures
import dataclasses
import importlib
import os
import statistics
import time

from bench import checks, decode
from bench.command_line import run_program

CONTROL = "default again"


@dataclasses.dataclass
class Variant:
    """One compiled step. field: what it toggles, "" for the default and its control; options: what it is built with."""

    name: str
    field: str
    options: object
    steps: object = None
    compiled: object = None
    compile_s: float = 0.0
    rounds_ms: list = dataclasses.field(default_factory=list)


def implementations_here() -> dict[str, tuple[list[str], dict[str, str]]]:
    """{operator of DecodeOptions: (implementations for this device, {another: why not})}."""
    from dsv41_jax.options import OPERATORS
    from pallas_kernels.registry import current_arch

    arch, out = current_arch(), {}
    for op in OPERATORS:
        folder, listing = ("index_score", "BLOCK_IMPLEMENTATIONS") if op == "index_score_blocks" else (op, "IMPLEMENTATIONS")
        every = getattr(importlib.import_module(f"pallas_kernels.{folder}.api"), listing)
        fits = [i.name for i in every if not i.arches or arch in i.arches]
        out[op] = fits, {i.name: f"is for {', '.join(i.arches)}, this is {arch}" for i in every if i.name not in fits}
    return out


def variants(default, chosen: dict[str, str], here) -> tuple[list[Variant], dict[str, str]]:
    """([default, its control, one variant per toggle], {toggle that is none here: why}).

    default: DecodeOptions; chosen: {operator: implementation it resolves to}; here: `implementations_here()`."""
    out, refused = [Variant("default", "", default), Variant(CONTROL, "", default)], {}
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        if isinstance(value, bool):
            toggled = dataclasses.replace(default, **{field.name: not value})
            out.append(Variant(f"{field.name}={int(not value)}", field.name, toggled))
    for op, (fits, others) in here.items():
        refused |= {f"{op}={name}": why for name, why in others.items()}
        pinned = tuple((o, n) for o, n in default.implementations if o != op)
        for name in fits:
            if name != chosen[op]:
                toggled = dataclasses.replace(default, implementations=(*pinned, (op, name)))
                out.append(Variant(f"{op}={name}", op, toggled))
    if set(chosen.values()) != {"reference"}:
        every = dataclasses.replace(default, default_implementation="reference", implementations=())
        out.append(Variant("reference for every operator", "default_implementation", every))
    return out, refused


def build(bench: decode.Bench, found: list[Variant]) -> dict[str, str]:
    """Compile the variants' steps over the bench's weights: traced one by one, compiled side by side. The default and its
    control share one. Returns {variant that cannot be: why}; the others have steps and executable."""
    import jax

    from dsv41_jax.step import Steps

    def compile_(variant: Variant, lowered) -> None:
        start = time.perf_counter()
        variant.compiled = lowered.compile()
        variant.compile_s += time.perf_counter() - start
        print(f"{variant.name}: compiled in {variant.compile_s:.1f} s", flush=True)

    default, control, *toggles = found
    refused, running = {}, {}
    with concurrent.futures.ThreadPoolExecutor(decode.TOGETHER) as pool:
        for variant in (default, *toggles):
            start = time.perf_counter()
            if variant is not default:
                net = dataclasses.replace(bench.net, options=variant.options)
                bench.steps = Steps(net, bench.params, bench.args.gamma)
            variant.steps = bench.steps
            try:
                lowered = bench.lower()
            except ValueError as e:
                refused[variant.name] = str(e).splitlines()[0]
                continue
            variant.compile_s = time.perf_counter() - start
            running[variant.name] = pool.submit(compile_, variant, lowered)
    for name, future in running.items():
        try:
            future.result()
        except (ValueError, jax.errors.JaxRuntimeError) as e:
            refused[name] = str(e).splitlines()[0]
    control.steps, control.compiled, control.compile_s = default.steps, default.compiled, default.compile_s
    for name, why in refused.items():
        print(f"{name}: not taken: {why}", flush=True)
    return refused


def warm_up(bench: decode.Bench, variant: Variant) -> None:
    """Check the step of a variant, then run the rounds that do not count."""
    bench.steps, bench.compiled, bench.hlo = variant.steps, variant.compiled, variant.compiled.as_text()
    checks.in_place(bench)
    for _ in range(bench.args.warmup):
        checks.outputs([bench.round(bench.args.steps)], bench.workload.batch, bench.args.gamma)


def warm_up_all(bench: decode.Bench, found: list[Variant]) -> dict[str, str]:
    """`warm_up` of every variant. Returns {variant that does not fit the device: why}; the default must."""
    import jax

    refused = {}
    for variant in found:
        try:
            warm_up(bench, variant)
        except jax.errors.JaxRuntimeError as e:
            if not str(e).startswith("RESOURCE_EXHAUSTED") or not variant.field:
                raise
            refused[variant.name] = "does not fit the device beside weights and state"
            print(f"{variant.name}: not taken: {refused[variant.name]}", flush=True)
            bench.state = None  # it was donated
            bench.load()
    return refused


def run_rounds(bench: decode.Bench, found: list[Variant], watch: decode.CompileWatch) -> None:
    """The measured rounds. Raises SystemExit if anything compiles in them."""
    args, before = bench.args, watch.count
    for i in range(args.rounds):
        turn = i % len(found)
        for variant in found[turn:] + found[:turn]:
            bench.steps = variant.steps
            timing = bench.round(args.steps)
            checks.outputs([timing], bench.workload.batch, args.gamma)
            variant.rounds_ms.append(timing.token_ms(1))
        print(f"round {i}: " + ", ".join(f"{v.name} {v.rounds_ms[-1]:.3f}" for v in found), flush=True)
    if watch.count != before:
        raise SystemExit(f"bench.options: {watch.count - before} compilations in the measured rounds, expected none")


def compare(default: list[float], variant: list[float]) -> dict:
    """Step times of a variant beside the default's of the same rounds, in ms; "faster" or "slower" only if every round
    says so."""
    apart = [v - d for v, d in zip(variant, default, strict=True)]
    spread = lambda x: {"median": round(statistics.median(x), 4), "min": round(min(x), 4), "max": round(max(x), 4)}
    verdict = "slower" if min(apart) > 0 else "faster" if max(apart) < 0 else "within the spread"
    return {"step_ms": spread(variant), "minus_default_ms": spread(apart), "verdict": verdict}


def wanted(variant: Variant, only, skip) -> bool:
    named = lambda names: any(n in (variant.name, variant.field) for n in names)
    return variant.field == "" or ((not only or named(only)) and not named(skip or ()))


def main(argv=None) -> dict:
    p = decode.workload_parser("bench.options", __doc__)
    p.set_defaults(rounds=5)
    p.add_argument("--only", action="append", metavar="NAME", help="only this operator, field or variant (repeatable)")
    p.add_argument("--skip", action="append", metavar="NAME", help="not this one (repeatable)")
    args = p.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    watch = decode.CompileWatch()
    from bench import common
    from bench.floors import step_floor

    decode.checked_workload(args)
    default, here, names = decode.decode_options(args), implementations_here(), [*(args.only or ()), *(args.skip or ())]
    _check_names(*variants(default, dict.fromkeys(here, ""), here), names)  # as if every implementation were a toggle
    peaks = common.measure_peaks()
    bench = decode.Bench(args, watch)
    protocol = decode.protocol(bench)
    every, refused = variants(default, protocol["implementations"], here)
    _check_names(every, refused, names)
    found = [v for v in every if wanted(v, args.only, args.skip)]
    not_taken = build(bench, found)
    found = [v for v in found if v.name not in not_taken]
    bench.load()
    not_taken |= warm_up_all(bench, found)
    found = [v for v in found if v.name not in not_taken]
    run_rounds(bench, found, watch)
    out = {
        "benchmark": "options",
        "environment": common.environment(args.seed),
        "peaks": dataclasses.asdict(peaks),
        "protocol": protocol,
        "floor_ms": step_floor(bench.workload, args.gamma, peaks)["ms"],
        "results": [
            {"variant": v.name, "field": v.field, **compare(found[0].rounds_ms, v.rounds_ms),
             "rounds_step_ms": [round(x, 4) for x in v.rounds_ms], "compile_s": round(v.compile_s, 2)}
            for v in found
        ],
        "not_taken": refused | not_taken,
    }  # fmt: skip
    if args.out:
        common.write_json(args.out, out)
    _print(out)
    return out


def _check_names(every: list[Variant], refused: dict[str, str], names: list[str]) -> None:
    known = {n for v in every for n in (v.name, v.field) if n} | set(refused)
    if unknown := sorted(set(names) - known):
        raise ValueError(f"unknown names {unknown}; there are {sorted(known)}")


def _print(out: dict) -> None:
    print(f"{'variant':44s} {'step ms':>9s} {'min':>9s} {'max':>9s} {'- default':>10s} {'min':>9s} {'max':>9s}")
    for r in out["results"]:
        s, d = r["step_ms"], r["minus_default_ms"]
        print(f"{r['variant']:44s} {s['median']:9.3f} {s['min']:9.3f} {s['max']:9.3f} {d['median']:+10.3f} {d['min']:+9.3f} "
              f"{d['max']:+9.3f}  {r['verdict'] if r['field'] else ''}")  # fmt: skip


if __name__ == "__main__":
    run_program("bench.options", main)
