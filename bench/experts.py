"""Routed experts on one GPU: equal to the definition?, then what the operator and its parts cost beside the floor.

    python -m bench.experts [--out FILE] [--variants n32_g4,...] [--parts n32_g4,...] [--profile] [--only-parts]

Unlike the operators of `bench.operators`, one set of weights (1.8 GB, far beyond the L2 cache) serves all inputs: drawn
on the device, shuffled there; activations and routing rotate over eight inputs. Writes device, versions, commit, seeds,
peaks of the same run, checks, medians and minima.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_plan import expert_plan
from pallas_kernels.experts import hopper, layout, reference, requantise, route
from pallas_kernels.experts.specs import FULL, ExpertsSpec

from . import common, timing
from .command_line import out_file, run_program

ROTATE = 8
SEED = 100
# Shapes whose definition is cheap: routing extremes, foreign experts, every tile width.
SMALL = (
    ExpertsSpec("small", 24, 512, 256, 6, 3),
    ExpertsSpec("small_one_row", 1, 512, 256, 6, 3),
    ExpertsSpec("small_all_on_one", 90, 512, 256, 6, 1, "one"),
    ExpertsSpec("small_foreign", 70, 768, 512, 5, 3, "skewed", total=12, first=4),
)


def tuning(n: int, groups: int, down: int | None = None) -> dict:
    return dict(n=n, swiglu=dict(groups=groups), down=dict(groups=down or groups))


VARIANTS = {
    "default": {},
    "n32_g4": tuning(32, 4),
    "n24_g4": tuning(24, 4),
    "n32_g3_4": tuning(32, 3, 4),
    "n24_g6_5": tuning(24, 6, 5),
}


def device_weights(spec: ExpertsSpec, seed: int):
    """The four weight tensors in checkpoint order, random, made on the device."""
    h, f, e = spec.hidden, spec.width, spec.local
    keys = jax.random.split(jax.random.key(seed), 4)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def packed(key, out, inner):
        words = jax.random.bits(key, (e, out, inner // 8), jnp.uint32)
        return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(e, out, inner // 2)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def scales(key, out, inner):
        top = 127 - round(np.log2(inner) / 2) + 1
        return jax.random.randint(key, (e, out, inner // 32), top - 4, top + 1).astype(jnp.uint8)

    return packed(keys[0], 2 * f, h), scales(keys[1], 2 * f, h), packed(keys[2], h, f), scales(keys[3], h, f)


def inputs(spec: ExpertsSpec, seed: int):
    """(x bf16[T, H], ids i32[T, K], weights f32[T, K])."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((spec.rows, spec.hidden), np.float32), jnp.bfloat16)
    ids, weights = spec.make_routing(rng)
    return x, jnp.asarray(ids), jnp.asarray(weights)


def check(spec: ExpertsSpec, config: dict, weights=None, shuffled=None) -> dict:
    """Difference from the definition, and whether bits repeat and survive another batch."""
    weights = weights or device_weights(spec, SEED)
    shuffled = shuffled or jax.jit(layout.shuffle_weights)(*weights)
    x, ids, w = inputs(spec, SEED)
    run = jax.jit(functools.partial(hopper.experts, first_expert=spec.first, tuning=config))
    definition = jax.jit(functools.partial(reference.experts, first_expert=spec.first))
    got, want = (np.asarray(a, np.float64) for a in (run(x, ids, w, *shuffled), definition(x, ids, w, *weights)))
    part = slice(spec.rows // 3, spec.rows // 3 + max(1, spec.rows // 2))
    alone = np.asarray(run(x[part], ids[part], w[part], *shuffled))
    return {
        "spec": spec.name, "tuning": config,
        "relative_error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "max_abs_error": float(np.abs(got - want).max()), "rms": float(np.sqrt((want**2).mean())),
        "repeatable": bool((np.asarray(run(x, ids, w, *shuffled)) == got).all()),
        "batch_independent": bool((alone == got[part]).all()),
    }  # fmt: skip


def parts(rotation, shuffled, config: dict) -> dict:
    """{part: (function, its rotating inputs)} of the operator."""
    e, n = shuffled[0].shape[0], config["n"]
    make_plan = lambda ids, weights, impl="auto": expert_plan(ids, weights, 0, local=e, tile_rows=n, impl=impl)
    plans = [jax.jit(make_plan)(ids, weights) for _, ids, weights in rotation]

    prepare = lambda x, plan: requantise.spread_rows(x, plan.position, plan.count, plan.token.shape[0])
    gemm = lambda x, scale, w, s, plan, **kw: hopper.grouped_gemm(
        x, scale, w, s, plan, n=n, limit=10.0, sms=hopper.H200_SMS, **kw
    )
    first = lambda q, plan, w, s: gemm(*q, w, s, plan, kind="swiglu", **config["swiglu"])
    second = lambda q, plan, w, s: gemm(*q, w, s, plan, kind="down", **config["down"])
    rows = [jax.jit(prepare)(r[0], p) for r, p in zip(rotation, plans, strict=True)]
    ts = [jax.jit(first)(q, p, *shuffled[:2]) for q, p in zip(rows, plans, strict=True)]
    again = [jax.jit(requantise.sorted_rows)(t, p.count) for t, p in zip(ts, plans, strict=True)]
    ys = [jax.jit(second)(q, p, *shuffled[2:]) for q, p in zip(again, plans, strict=True)]
    pairs = lambda a, b, *rest: [((x, y, *rest), {}) for x, y in zip(a, b, strict=True)]
    routing = [((i, w), {}) for _, i, w in rotation]
    return {
        "plan": (make_plan, routing),
        "plan_reference": (functools.partial(make_plan, impl="reference"), routing),
        "prepare": (prepare, pairs([r[0] for r in rotation], plans)),
        "gemm_swiglu": (first, pairs(rows, plans, *shuffled[:2])),
        "requantise": (requantise.sorted_rows, pairs(ts, [p.count for p in plans])),
        "gemm_down": (second, pairs(again, plans, *shuffled[2:])),
        "combine": (route.combine, pairs(ys, plans)),
    }


def guarded(name: str, function) -> dict:
    """A variant that the device refuses must not cost the others their turn."""
    try:
        result = function()
    except (ValueError, RuntimeError) as error:
        result = {"error": str(error).splitlines()[0][:200]}
    print(name, result, flush=True)
    return result


def clock(function, rotation, dispatches: int = 4, profile: bool = False) -> dict:
    times = timing.us_per_call(function, rotation, dispatches=dispatches, samples=9)
    device = timing.device_us(function, rotation) if profile else {}
    return {f"{k}_us": round(v, 2) for k, v in times.items()} | device


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="bench.experts", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=out_file, metavar="FILE", help="default bench/results/experts_<device>.json")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--parts", default="n32_g4")
    parser.add_argument(
        "--profile", action="store_true", help="the parts' kernels by themselves too, from the profiler"
    )
    parser.add_argument(
        "--only-parts", action="store_true", help="no checks, no whole operator, a file only with --out"
    )
    options = parser.parse_args(argv)
    whole, asked = not options.only_parts, [options.variants, options.parts]
    if unknown := {name for text in asked for name in text.split(",")} - set(VARIANTS):
        parser.error(f"expected variants and parts among {', '.join(VARIANTS)}, got {', '.join(map(repr, sorted(unknown)))}")
    if bad := [name for name in options.parts.split(",") if "n" not in VARIANTS[name]]:
        parser.error(f"--parts: expected variants with a tile width, got {', '.join(bad)}")
    if jax.default_backend() != "gpu":
        parser.error(f"expected a GPU, the default backend is {jax.default_backend()}")
    head, peaks = common.environment(), common.measure_peaks()
    print(f"{head['device']}, jax {jax.__version__}, {peaks}", flush=True)
    names = options.variants.split(",")
    checks, times, split = [], {}, {}
    for spec in SMALL if whole else ():
        for n in (8, 24, 32, 64) if spec is SMALL[0] else (32,):
            checks.append(guarded(spec.name, lambda: check(spec, {"n": n})))
    balanced = FULL[0]
    weights = device_weights(balanced, SEED)
    shuffled = jax.block_until_ready(jax.jit(layout.shuffle_weights)(*weights))
    for spec in FULL[1:3] if whole else ():
        checks.append(guarded(spec.name, lambda: check(spec, {}, weights, shuffled)))
    floor = peaks.floor_us(balanced.bytes, balanced.flops)
    for spec in FULL[: 3 if whole else 1]:
        rotation = [inputs(spec, 200 + i) for i in range(ROTATE)]
        for name in (names if spec is balanced else names[:1]) if whole else ():
            run = functools.partial(hopper.experts, tuning=VARIANTS[name])
            key = f"{spec.name}/{name}"
            times[key] = guarded(key, lambda: clock(run, [((*r, *shuffled), {}) for r in rotation]))
        if spec is balanced:
            for name in options.parts.split(","):
                for part, (f, turns) in parts(rotation, shuffled, VARIANTS[name]).items():
                    run = functools.partial(clock, f, turns, profile=options.profile)
                    split[f"{name}/{part}"] = guarded(f"{name}/{part}", run)
        if spec is balanced and whole:
            key = f"{spec.name}/reference"
            times[key] = guarded(key, lambda: clock(reference.experts, [((*rotation[0], *weights), {})], 1))
    for key, t in times.items():
        if "median_us" in t:
            t["floor_us"], t["ratio"] = round(floor, 2), round(t["median_us"] / floor, 3)
            print(f"{key:32s} {t['median_us']:9.1f} us  floor {floor:6.1f}  x{t['ratio']:.2f}")
    record = {
        **head, "peaks": dataclasses.asdict(peaks), "seeds": {"weights": SEED, "inputs": [200, 200 + ROTATE - 1]},
        "variants": {n: VARIANTS[n] for n in names}, "checks": checks, "results": times, "parts": split,
    }  # fmt: skip
    if whole or options.out:
        path = options.out or common.RESULTS / f"experts_{head['device'].lower().replace(' ', '_')}.json"
        common.write_json(path, record)
        print(f"wrote {path}")


if __name__ == "__main__":
    run_program("bench.experts", main)
