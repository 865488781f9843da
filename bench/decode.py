"""The decode step's cost by the reference protocol (spec/decode.md section 5), beside its floor.

    python -m bench.decode --preset flash-rank --out bench/results/decode_flash_rank.json
    python -m bench.decode --preset tiny

Synthetic KV at the given context, no prefill, drafts accepted by force. A round is `steps` MTP steps (32 x 6 tokens = 192
per request), dispatched as a serving loop does: the state stays on the device, the tokens of step n are read after step
n+1 was dispatched. token_ms = (cost - cost of the first step) / tokens of the other steps; the median of the measured
rounds counts.

The run fails, with the reason, if anything compiles after warm-up, if a round transfers anything it was not asked for (on
a CPU JAX's guard sees what is sent, not what is read), if the compiled step holds a copy the size of a pool, if a
forced draft is rejected or if an output is not finite.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import statistics
import time

import numpy as np

from bench import checks
from bench.command_line import out_file, out_folder, run_program
from bench.compile_report import EXCHANGES
from dsv41_jax.arguments import at_least

TOGETHER = 4  # steps compiled side by side: XLA compiles the kernels of one in several threads


def workload_parser(prog: str, about: str) -> argparse.ArgumentParser:
    """The flags of one workload and its protocol, which every bench of the whole step takes."""
    p = argparse.ArgumentParser(prog=prog, description=about.split("\n\n")[0])
    p.add_argument("--preset", default="tiny", help="tiny (CPU), flash-rank (one full-size rank on one GPU) or flash (--ranks)")
    p.add_argument("--layers", type=at_least(3), help="cut to this many layers; 6 keep every layer class")
    p.add_argument("--batch", type=at_least(1), help="requests (flash-rank: 64)")
    p.add_argument("--context", type=at_least(1), help="tokens of every request before the round (flash-rank: 32768)")
    p.add_argument("--capacity", type=at_least(1), help="tokens of every page table (default: context + 1024; tiny: + 256)")
    p.add_argument("--gamma", type=at_least(0, 5), default=5, help="drafts per step, 0..5; 0 = plain decoding")
    p.add_argument("--impl", default="auto", help="auto, reference, or operator=name[,operator=name...] beside auto")
    p.add_argument("--fake-balance", action="store_true", help="balanced routing whatever the router says")
    p.add_argument("--steps", type=at_least(2), default=32, help="steps of a round; the first does not count")
    p.add_argument("--warmup", type=at_least(0), default=2, help="rounds before the measured ones")
    p.add_argument("--rounds", type=at_least(1), default=3, help="measured rounds")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the result as JSON")
    return p


def parse(argv=None) -> argparse.Namespace:
    p = workload_parser("bench.decode", __doc__)
    p.add_argument("--ranks", type=at_least(1), help="data- and expert-parallel ranks, a device each; --batch counts one rank's requests")
    p.add_argument("--exchange", choices=EXCHANGES,
                   help="how rows reach the experts of other ranks (default: gather)")  # fmt: skip
    p.add_argument("--exchange-parts", type=int, metavar="N", help="column parts in which contributions go home (default: 1)")
    p.add_argument("--exchange-spare-sms", type=int, metavar="N", help="multiprocessors that the experts' product of a later part "
                   "leaves to the transfer of the part before (default: 8)")  # fmt: skip
    p.add_argument("--profile", type=out_folder, metavar="DIR", help="trace 4 steps of one more round into DIR (Perfetto, XProf)")
    p.add_argument("--hlo", type=out_file, metavar="FILE", help="write the compiled step's HLO")
    return p.parse_args(argv)


def decode_options(args):
    """DecodeOptions of the command line. Raises ValueError for an unknown word or operator, and for an implementation that
    there is not, or not for this device."""
    from dsv41_jax.options import DecodeOptions, check_implementation

    pairs = [part.split("=", 1) for part in args.impl.split(",") if "=" in part]
    words = [part for part in args.impl.split(",") if "=" not in part] or ["auto"]
    if len(words) > 1 or words[0] not in ("auto", "reference"):
        raise ValueError(f"impl: expected auto or reference, once, and operator=name beside it, got {args.impl!r}")
    options = DecodeOptions(words[0], tuple((op, name) for op, name in pairs), getattr(args, "fake_balance", False))
    for op, name in options.implementations:
        check_implementation(op, name, f"impl: {op}")
    return options


def checked_workload(args):
    """The workload of the command line. Raises ValueError for one, for rounds and for options that cannot be; nothing is
    allocated."""
    from bench import presets

    w = presets.workload(args.preset, layers=args.layers, batch=args.batch, context=args.context, capacity=args.capacity)
    if args.steps * (args.gamma + 1) > w.headroom:
        raise ValueError(f"steps: expected at most {w.headroom // (args.gamma + 1)} a round, got {args.steps}")
    decode_options(args)
    return w


def takes_shuffled_experts(options) -> bool:
    """Whether the routed experts' implementation on this device wants their weights shuffled."""
    from pallas_kernels import registry

    return options.impl("experts") == "hopper" or (options.impl("experts"), registry.current_arch()) == ("auto", "sm_90")


class CompileWatch:
    """Counts XLA compilations of this process and the seconds spent in them."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        import jax

        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def _seen(self, event: str, seconds: float, **_):
        if event == self.EVENT:
            self.count += 1
            self.seconds += seconds


@dataclasses.dataclass
class Round:
    """Host clock of one round, in seconds from its first dispatch: `done[i]`: tokens of step i are on the host;
    `dispatch[i]`: seconds the host spent to enqueue step i."""

    done: list
    dispatch: list
    outputs: list

    def token_ms(self, tokens_per_step: int) -> float:
        """(cost - first step) per token of the steps after it."""
        return (self.done[-1] - self.done[0]) * 1e3 / (tokens_per_step * (len(self.done) - 1))


def run_round(steps, state, batch, count: int):
    """One round of `count` steps. Returns (state, Round). Raises what the transfer guard finds."""
    import jax

    done, dispatch, outputs, waiting = [], [], [], None

    def read(out):
        outputs.append(jax.device_get(out))
        done.append(time.perf_counter() - start)

    with jax.transfer_guard("disallow"):
        start = time.perf_counter()
        for _ in range(count):
            begin = time.perf_counter()
            state, out = steps.decode(state, batch)
            dispatch.append(time.perf_counter() - begin)
            if waiting is not None:
                read(waiting)
            waiting = out
        read(waiting)
    return state, Round(done, dispatch, outputs)


class Bench:
    """One workload on the default device: weights, batch and steps; `compile` and `load` make it ready for `round`.

    params: parameters of another Bench of the same network, instead of new ones. ranks, placement: how many devices
    share the work, and the sharding of batch and state; bench.ranks has a Bench of more than one."""

    ranks, placement, mesh = 1, None, None

    def __init__(self, args, watch: CompileWatch, params=None):
        import jax

        from bench import synthetic
        from dsv41_jax.cache import CacheGeometry
        from dsv41_jax.model import Network
        from dsv41_jax.precision import RELEASED

        self.args = args
        self.workload = w = checked_workload(args)
        pages = 1 + w.batch * -(-w.capacity // w.page_tokens)
        self.geometry = CacheGeometry(w.batch, pages, w.page_tokens, span=args.gamma + 1)
        start = time.perf_counter()
        options = decode_options(args)
        self.shuffled = takes_shuffled_experts(options)
        if params is None:
            params = synthetic.random_parameters(w.config, args.seed, self.shuffled, self.mesh)
        self.params = jax.block_until_ready(params)
        self.made_s = time.perf_counter() - start
        print(f"weights made in {self.made_s:.1f} s", flush=True)
        self.batch = jax.device_put(self.host_batch(), self.placement)
        self.net = Network(w.config, self.geometry, RELEASED, options)
        self.experts = params.layers[0].ffn.experts
        self.steps = self.make_steps()
        self.state = None

    def load(self) -> None:
        """Make the state, which `round` needs."""
        import jax

        self.state = jax.block_until_ready(self.make_state())
        self.start_registers = {k: np.asarray(getattr(self.state, k)) for k in ("length", "anchor", "history")}

    def make_state(self):
        from bench import synthetic

        return synthetic.random_state(self.workload.config, self.geometry, self.workload.context, self.args.seed)

    def make_steps(self):
        from dsv41_jax.step import Steps

        return Steps(self.net, self.params, self.args.gamma)

    def host_batch(self, rank: int = 0):
        """One rank's DecodeBatch of host arrays: every request in a slot of its own, pages in random order."""
        from bench import synthetic
        from dsv41_jax.cache import PageTables
        from dsv41_jax.sampling import SamplingParams, pack_sampling
        from dsv41_jax.step import DecodeBatch

        w, seed = self.workload, self.args.seed + rank
        table = synthetic.permuted_table(w.batch, (self.geometry.pages - 1) // w.batch, seed)
        sampling = pack_sampling([SamplingParams(forced=True, ignore_eos=True)] * w.batch, [0] * w.batch, w.config.eos_token_id)
        slots = np.random.default_rng(seed).permutation(w.batch).astype(np.int32)
        return DecodeBatch(slots, PageTables.shared(table, w.config), sampling)

    def floor(self, peaks) -> dict:
        """`floors.step_floor` of one rank."""
        from bench.floors import step_floor

        return step_floor(self.workload, self.args.gamma, peaks)

    def lower(self):
        """The traced decode step, for a state that need not exist yet. Raises ValueError where an operator refuses the shapes."""
        import jax

        start = time.perf_counter()
        placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.placement)
        lowered = self.steps.lower_decode(jax.tree.map(placed, jax.eval_shape(self.make_state)), self.batch)
        self.compile_s = {"trace": round(time.perf_counter() - start, 2)}
        return lowered

    def compile(self, lowered=None) -> None:
        """Compile `steps`, or what `lower` gave: sets compiled, hlo and compile_s. May run in a thread of its own. Raises
        ValueError as `lower`."""
        lowered = lowered or self.lower()
        start = time.perf_counter()
        self.compiled = lowered.compile()  # what `steps` calls from now on, too: jax keeps it with the trace
        self.compile_s["xla"] = round(time.perf_counter() - start, 2)
        self.hlo = self.compiled.as_text()

    def rewind(self) -> None:
        """Back to the context the protocol starts from; the pools keep what the last round wrote."""
        import jax

        self.state = dataclasses.replace(self.state, **jax.device_put(self.start_registers, self.placement))
        jax.block_until_ready(self.state)

    def round(self, count: int) -> Round:
        self.rewind()
        self.state, timing = run_round(self.steps, self.state, self.batch, count)
        return timing


def measure(bench: Bench, watch: CompileWatch) -> list[Round]:
    """Warm-up, then the measured rounds; raises SystemExit if anything compiles after warm-up."""
    args = bench.args
    for i in range(args.warmup):
        warm = bench.round(args.steps)
        print(f"warm-up {i}: first step {warm.done[0]:.2f} s, then {warm.token_ms(1):.3f} ms a step", flush=True)
        checks.outputs([warm], bench.workload.batch * bench.ranks, args.gamma)
    before, rounds = watch.count, []
    for i in range(args.rounds):
        rounds.append(bench.round(args.steps))
        print(f"round {i}: {rounds[-1].token_ms(1):.3f} ms a step", flush=True)
    if watch.count != before:
        raise SystemExit(f"bench.decode: {watch.count - before} compilations after warm-up, expected none")
    checks.outputs(rounds, bench.workload.batch * bench.ranks, args.gamma)
    return rounds


def result(bench: Bench, rounds: list[Round], peaks) -> dict:
    """The numbers of a run, as plain data."""
    import jax

    w, per_step = bench.workload, bench.args.gamma + 1
    token_ms = statistics.median(r.token_ms(per_step) for r in rounds)
    step_ms = per_step * token_ms
    gaps = [(b - a) * 1e3 for r in rounds for a, b in zip(r.done, r.done[1:])]
    floor = bench.floor(peaks)
    memory = bench.compiled.memory_analysis()
    stats = jax.devices()[0].memory_stats() or {}
    host = sorted(d * 1e3 for r in rounds for d in r.dispatch[1:])
    return {
        "step_ms": round(step_ms, 4),
        "floor_ms": floor["ms"],
        "ratio": round(step_ms / floor["ms"], 4),
        "token_ms": round(token_ms, 5),
        "tps_per_request": round(1e3 / token_ms, 3),
        "tps_aggregate": round(1e3 / token_ms * w.batch * bench.ranks, 2),
        "rounds_step_ms": [round(per_step * r.token_ms(per_step), 4) for r in rounds],
        "step_gap_ms": {"min": round(min(gaps), 4), "median": round(statistics.median(gaps), 4), "max": round(max(gaps), 4)},
        "host_ms_per_step": {"median": round(statistics.median(host), 4), "max": round(host[-1], 4)},
        "compile_s": bench.compile_s,
        "control_flow": checks.control_flow(bench.hlo),
        "weights_made_s": round(bench.made_s, 2),
        "memory_gb": {
            "arguments": round(memory.argument_size_in_bytes / 1e9, 3),
            "temporaries": round(memory.temp_size_in_bytes / 1e9, 3),
            "aliased": round(memory.alias_size_in_bytes / 1e9, 3),
            "peak_in_use": round(stats["peak_bytes_in_use"] / 1e9, 3) if "peak_bytes_in_use" in stats else None,
        },
        "floor": floor,
    }


def protocol(bench: Bench) -> dict:
    """What was run: workload, protocol, options and the implementations they resolve to."""
    from dsv41_jax.explain import explain_operators

    args, w = bench.args, bench.workload
    options = decode_options(args)
    explained = explain_operators(w.config, options, batch=w.batch, context=w.capacity, ranks=bench.ranks)
    if options.impl("experts") == "auto":  # asked about the weights as they are held
        explained["experts"] = explain_experts(bench.experts, w.config, w.batch * (args.gamma + 1), bench.ranks)
    return {
        "preset": w.name,
        "ranks": bench.ranks,
        "exchange": bench.ranks > 1 and (args.exchange or "gather") or None,
        "exchange_parts": getattr(args, "exchange_parts", None) or 1,
        "layers": [s.kind for s in w.config.layers],
        "draft_stages": w.config.num_nextn_predict_layers,
        "experts": w.config.n_routed_experts,
        "draft_experts": w.config.dspark_n_routed_experts,
        "engram_rows": list(w.config.engram_num_embeddings),
        "batch": w.batch,
        "context": w.context,
        "capacity": w.capacity,
        "gamma": args.gamma,
        "tokens_per_round": args.steps * (args.gamma + 1),
        "steps_per_round": args.steps,
        "warmup_rounds": args.warmup,
        "measured_rounds": args.rounds,
        "acceptance": "forced",
        "fake_balance_expert": int(args.fake_balance),
        "expert_weight_order": "shuffled at load" if bench.shuffled else "checkpoint",
        "implementations": {op: why["chosen"] for op, why in explained.items()},
        "passed_over": {op: {k: v for k, v in why.items() if k != "chosen"} for op, why in explained.items()},
        "notes": list(w.notes),
    }


def explain_experts(experts, c, rows: int, ranks: int = 1) -> dict[str, str]:
    """`explain` of the routed experts for their weights as they are held, in whichever order; rows: of one rank."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.experts import api

    k, rows, shape = c.num_experts_per_tok, rows * ranks, jax.ShapeDtypeStruct
    local = lambda a: shape((a.shape[0] // ranks, *a.shape[1:]), a.dtype)
    weights = (local(a[...]) for a in (experts.w13, experts.s13, experts.w2, experts.s2))
    return api.explain(shape((rows, c.hidden_size), jnp.bfloat16), shape((rows, k), jnp.int32),
                       shape((rows, k), jnp.float32), *weights, swiglu_limit=c.swiglu_limit)  # fmt: skip


def check(args) -> None:
    """Raises ValueError for what cannot be run: a workload, options, ranks, or an exchange without ranks."""
    w = checked_workload(args)
    if args.ranks:
        from bench.ranks import exchange_over

        exchange_over(args, w.config)
        return
    if args.exchange:
        raise ValueError(f"--exchange {args.exchange}: expected --ranks beside it")
    for name in ("exchange_parts", "exchange_spare_sms"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected --ranks beside it")


def make_bench(args, watch: CompileWatch) -> Bench:
    """Raises ValueError as `check`."""
    check(args)
    if args.ranks:
        from bench.ranks import RanksBench

        return RanksBench(args, watch)
    return Bench(args, watch)


def main(argv=None) -> dict:
    args = parse(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    watch = CompileWatch()
    from bench import common, tracing

    check(args)
    peaks = common.measure_peaks()
    print(f"copy {peaks.copy_gbps:.0f} GB/s, bf16 {peaks.bf16_tflops:.0f}, fp8 {peaks.fp8_tflops:.0f} TFLOP/s", flush=True)
    bench = make_bench(args, watch)
    lowered = bench.lower()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        traced = pool.submit(tracing.compile_traced, lowered) if args.profile else None
        bench.compile(lowered)
    bench.load()
    print(f"compiled: {bench.compile_s}", flush=True)
    if args.hlo:
        with open(args.hlo, "w") as f:
            f.write(bench.hlo)
    checks.in_place(bench)
    rounds = measure(bench, watch)
    out = {
        "benchmark": "decode",
        "environment": common.environment(args.seed),
        "peaks": dataclasses.asdict(peaks),
        "protocol": protocol(bench),
        "result": result(bench, rounds, peaks),
    }
    if args.profile:
        tracing.profile(bench, args.profile, traced.result())
    if args.out:
        common.write_json(args.out, out)
    _print(out)
    return out


def _print(out: dict) -> None:
    r, p = out["result"], out["protocol"]
    print(f"{p['preset']}: {len(p['layers'])} layers, B {p['batch']}, ctx {p['context']}, gamma {p['gamma']}")
    for note in p["notes"]:
        print(f"  note: {note}")
    print(f"  step {r['step_ms']:.3f} ms | floor {r['floor_ms']:.3f} ms | {r['ratio']:.2f}x")
    print(f"  {r['tps_per_request']:.1f} tokens/s per request, {r['tps_aggregate']:.0f} in all")
    print(f"  host {r['host_ms_per_step']['median']:.3f} ms a step, memory {r['memory_gb']}", flush=True)


if __name__ == "__main__":
    run_program("bench.decode", main)
