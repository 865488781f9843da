"""What the serving engine adds to the decode step: host time of a step, batches sent and reused.

    python -m bench.engine --preset flash-rank --layers 6 --steps 32 --out bench/results/engine_flash_rank_6.json
    python -m bench.engine --preset tiny --steps 4

`batch` requests with prompts of one page each decode through `dsv41_jax.engine.Engine`, drafts accepted by force, with
page tables of the workload's capacity. A step's host time is what the engine does between two waits for the device:
schedule, pages, batches, dispatch, stop conditions, metrics. While it is below the device's step it costs nothing.
(On a CPU a dispatch may run part of the step itself: there the split says little.)
The same rounds run again with every batch sent anew, which is what reusing batches on the device saves.

The run fails, with the reason, if anything compiles after warm-up or is transferred without being asked for, or if a
request does not get all its tokens.
"""

import os
import statistics
import time

from bench import decode
from bench.command_line import run_program


def build(args, workload, params, reuse: bool):
    """An engine of the workload's shapes with all its requests in decode."""
    from dsv41_jax.engine import Engine
    from dsv41_jax.sampling import SamplingParams

    w = workload
    engine = Engine(
        params, w.config, decode.decode_options(args), w.batch, w.capacity, gamma=args.gamma, page_tokens=w.page_tokens,
        chunk=w.page_tokens, batch_buckets=(w.batch,), prefill_buckets=(min(4, w.batch),), prefix_bytes=0, reuse_batches=reuse,
    )  # fmt: skip
    # no engine.warm_up(): it would compile the steps with sampling code too, and full-size compiles take minutes
    sampling = SamplingParams(forced=True, ignore_eos=True)
    for i in range(w.batch):
        engine.submit([3 + (i + j) % 400 for j in range(w.page_tokens)], sampling)
    while engine.metrics.decode_rows < w.batch * args.steps // 2 or engine.metrics.waiting:
        engine.step()
    return engine


def run_round(engine, count: int) -> dict:
    """One round of `count` engine steps: seconds of each, of the waits in all of them, and what was sent."""
    import jax

    before, seconds = engine.metrics, []
    with jax.transfer_guard("disallow"):
        for _ in range(count):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
    after = engine.metrics
    return {
        "seconds": seconds,
        "wait_s": after.wait_s - before.wait_s,
        "tokens": after.output_tokens - before.output_tokens,
        "built": after.batches_built - before.batches_built,
        "reused": after.batches_reused - before.batches_reused,
    }


def measure(args, workload, params, watch, reuse: bool) -> dict:
    """Rounds of one engine. Raises SystemExit if one compiles or loses tokens."""
    engine = build(args, workload, params, reuse)
    for _ in range(args.warmup):
        run_round(engine, args.steps)
    compiled = watch.count
    rounds = [run_round(engine, args.steps) for _ in range(args.rounds)]
    if watch.count != compiled:
        raise SystemExit(f"bench.engine: {watch.count - compiled} compilations after warm-up, expected none")
    want = workload.batch * args.steps * (args.gamma + 1)
    if any(r["tokens"] != want for r in rounds):
        raise SystemExit(f"bench.engine: expected {want} tokens a round, got {[r['tokens'] for r in rounds]}")
    engine.shutdown(drain=False)
    steps = [s * 1e3 for r in rounds for s in r["seconds"]]
    host = [(sum(r["seconds"]) - r["wait_s"]) * 1e3 / args.steps for r in rounds]
    return {
        "step_ms": round(statistics.median(steps), 4),
        "step_ms_max": round(max(steps), 4),
        "host_ms_per_step": round(statistics.median(host), 4),
        "wait_ms_per_step": round(statistics.median(r["wait_s"] * 1e3 / args.steps for r in rounds), 4),
        "tokens_per_s": round(want / statistics.median(sum(r["seconds"]) for r in rounds), 1),
        "batches_sent": sum(r["built"] for r in rounds),
        "batches_reused": sum(r["reused"] for r in rounds),
    }


def main(argv=None) -> dict:
    args = decode.workload_parser("bench.engine", __doc__).parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    watch = decode.CompileWatch()
    from bench import common, presets, synthetic

    w = presets.workload(args.preset, layers=args.layers, batch=args.batch, context=args.context, capacity=args.capacity)
    need = w.page_tokens + (args.steps // 2 + w.batch + (args.warmup + args.rounds) * args.steps) * (args.gamma + 1)
    if need > w.capacity:
        raise ValueError(f"steps: these rounds need {need} positions of a request, the capacity is {w.capacity}")
    params = synthetic.random_parameters(w.config, args.seed, decode.takes_shuffled_experts(decode.decode_options(args)))
    out = {
        "benchmark": "engine",
        "environment": common.environment(args.seed),
        "protocol": {"preset": w.name, "layers": len(w.config.layers), "batch": w.batch, "capacity": w.capacity,
                     "gamma": args.gamma, "steps_per_round": args.steps, "warmup_rounds": args.warmup,
                     "measured_rounds": args.rounds, "acceptance": "forced", "notes": list(w.notes)},
        "result": {name: measure(args, w, params, watch, reuse) for name, reuse in (("reused", True), ("sent_anew", False))},
    }  # fmt: skip
    if args.out:
        common.write_json(args.out, out)
    for name, r in out["result"].items():
        print(f"{w.name}, batches {name}: step {r['step_ms']:.3f} ms (max {r['step_ms_max']:.3f}), host {r['host_ms_per_step']:.3f}, "
              f"waiting {r['wait_ms_per_step']:.3f}; {r['tokens_per_s']:.0f} tokens/s; {r['batches_sent']} batches sent, "
              f"{r['batches_reused']} reused", flush=True)  # fmt: skip
    return out


if __name__ == "__main__":
    run_program("bench.engine", main)
