"""The expert exchanges on the GPUs of one host: bytes, time and share of the link.

    python -m bench.exchange --ranks 2 --rows 384 --out bench/results/exchange_h200x2.json

Each exchange runs with a stand-in for the experts that costs one elementwise pass, timed alone beside it, so `exposed_us` is
what the exchange adds to a layer when nothing hides it. Before anything is timed the exchanges are compared with
`BlockedExchange`, bit for bit, on random rows and on rows that all go to one rank. `bench.ranks_check` compares whole steps.
"""

import argparse
import functools
import statistics
import sys
import time

from bench.command_line import out_file, run_program
from dsv41_jax.arguments import at_least

LINK_GBPS = {"NVIDIA H200": 450.0, "NVIDIA H100": 450.0, "NVIDIA B200": 900.0, "NVIDIA B300": 900.0}  # one way, per GPU
ROTATE = 8  # different inputs per launch
EQUAL = ("equal", "equal but for the sign of zeros")


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench.exchange", description=__doc__.split("\n\n")[0])
    p.add_argument("--ranks", type=at_least(2), default=2)
    p.add_argument("--rows", type=at_least(1), default=384, help="rows per rank: 64 requests x 6")
    p.add_argument("--hidden", type=at_least(1), default=5120)
    p.add_argument("--experts", type=at_least(1), default=384, help="routed experts over all ranks")
    p.add_argument("--top", type=at_least(1), default=6, help="experts of a row")
    p.add_argument("--repeats", type=at_least(1), default=10, help="samples; each runs 24 x 8 exchanges")
    p.add_argument("--exchanges", default="gather,reduce_scatter,ring,all_to_all",
                   help="gather, reduce_scatter, ring, all_to_all or ragged, each with /N for N column parts")  # fmt: skip
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the result as JSON")
    return p.parse_args(argv)


def check(args, names) -> None:
    """Raises ValueError for exchanges, and for rows, experts and widths, that cannot be measured; nothing is allocated."""
    from bench.ranks import exchange_here
    from pallas_kernels.codecs import GROUP

    if args.experts % args.ranks:
        raise ValueError(f"ranks: expected a divisor of --experts {args.experts}, got {args.ranks}")
    if args.top > args.experts // args.ranks:  # all experts of a row may be on one rank
        raise ValueError(f"top: expected at most the {args.experts // args.ranks} experts of one rank, got {args.top}")
    if args.hidden % GROUP:
        raise ValueError(f"hidden: expected a multiple of {GROUP}, got {args.hidden}")
    for name in names:
        exchange_here(name, args.ranks, args.hidden)


def make_rows(args, kind: str = "random"):
    """(x bf16[N, R*T, H], ids i32[N, R*T, K], weights f32[N, R*T, K]) on the host, N = ROTATE; "one rank": every row
    wants experts of the last rank alone."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(args.seed)
    n, rows = ROTATE, args.ranks * args.rows
    x = rng.standard_normal((n, rows, args.hidden), np.float32).astype(jnp.bfloat16)
    first = 0 if kind == "random" else args.experts - args.experts // args.ranks
    score = rng.random((n, rows, args.experts - first), np.float32)
    ids = first + np.argpartition(score, args.top, -1)[..., : args.top].astype(np.int32)
    return x, ids, rng.random((n, rows, args.top), np.float32)


def stand_in(x, ids, weights, params, first, parts=1, spare_sms=0):
    """`parts` arrays f32[T, H/parts]: takes the place of the experts: the row through FP8, as experts read it, times its
    local weights."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.codecs import dequantize_fp8, quantize_fp8

    local = (ids >= first) & (ids < first + params.w13[...].shape[0])
    y = dequantize_fp8(*quantize_fp8(x)) * jnp.sum(jnp.where(local, weights, 0), -1, keepdims=True)
    y = jax.lax.optimization_barrier(y)  # a product fused with the sum at home would round once, not twice
    return tuple(jnp.split(y, parts, 1))


def _owned_experts(args):
    """Parameters of which only the number of experts is looked at."""
    import jax
    import jax.numpy as jnp

    from dsv41_jax.params import Experts
    from dsv41_jax.presets import TINY

    return jax.tree.map(lambda a: jnp.zeros((args.experts, 1), a.dtype), Experts(TINY, 1))


def _mapped(call, mesh, data, compiler_options=()):
    """jit of `call(params, *data)` over the mesh; data have a leading axis of launches, rows behind it."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from sharding.mesh import RANKS

    specs = (P(RANKS), *[P(None, RANKS)] * len(data))
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, RANKS), check_vma=False)
    placed = [jax.device_put(a, NamedSharding(mesh, P(None, RANKS))) for a in data]
    return jax.jit(mapped, compiler_options=dict(compiler_options)), placed


def exchange_outputs(exchange, args, mesh, data):
    """f32[N, R*T, H] of an exchange with the stand-in, over the mesh, or on one device for one of one rank."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def call(params, x, ids, weights):
        return jnp.stack([exchange.run_experts(*row, params, stand_in)[0] for row in zip(x, ids, weights, strict=True)])

    if exchange.ranks == 1:
        return np.asarray(jax.jit(call)(_owned_experts(args), *data))
    run, placed = _mapped(call, mesh, data, exchange.compiler_options)
    return np.asarray(run(_owned_experts(args), *placed))


def compare(args, mesh, names) -> dict:
    """{exchange: {routing: one of EQUAL or the largest difference}} against BlockedExchange."""
    import numpy as np

    from bench.compile_report import make_exchange
    from sharding.exchange import BlockedExchange

    out: dict[str, dict] = {name: {} for name in names}
    for kind in ("random", "one rank"):
        data = [a[:2] for a in make_rows(args, kind)]
        want = exchange_outputs(BlockedExchange(args.ranks), args, mesh, data)
        for name in names:
            got = exchange_outputs(make_exchange(name, args.ranks), args, mesh, data)
            same_bits = np.array_equal(want.view(np.int32), got.view(np.int32))
            same = EQUAL[0] if same_bits else EQUAL[1] if np.array_equal(want, got) else None
            out[name][kind] = same or float(np.abs(want - got).max())
    return out


def _timed(body, args, mesh, data, compiler_options=(), passes: int = 24) -> dict:
    """Microseconds per call of `body(params, *one launch of data)`: ROTATE inputs in turn, `passes` times per sample."""
    import jax
    import jax.numpy as jnp

    def call(params, *data):
        def once(carry, i):
            row = [jax.lax.dynamic_index_in_dim(a, i % ROTATE, keepdims=False) for a in data]
            # one number per result keeps it alive at no cost
            return carry + body(params, *row).reshape(-1)[0].astype(jnp.float32), None

        total, _ = jax.lax.scan(once, jnp.float32(0), jnp.arange(passes * ROTATE))
        return total.reshape(1, 1)

    run, placed = _mapped(call, mesh, data, compiler_options)
    params = _owned_experts(args)
    jax.block_until_ready(run(params, *placed))
    samples = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(params, *placed))
        samples.append((time.perf_counter() - began) * 1e6 / (passes * ROTATE))
    return {"median_us": round(statistics.median(samples), 2), "min_us": round(min(samples), 2)}


def _all_kept(y):
    """A scalar that needs all of y, so that no part of the pass that made it can be dropped."""
    import jax.numpy as jnp

    return jnp.max(y, keepdims=True)


def wire_bytes(name: str, args) -> int:
    """Bytes one GPU receives per exchange. Both ways move R*T rows (all_to_all: buffers of worst-case size)."""
    import jax.numpy as jnp

    from sharding.exchange import row_bytes

    there = row_bytes(args.hidden, args.top, jnp.bfloat16)
    return (args.ranks - 1) * args.rows * (there + 4 * args.hidden)


def parts(args, mesh, data) -> dict:
    """Times of the collectives alone, at the sizes of the gather exchange; permutes as RingExchange has them compiled."""
    import jax
    import jax.numpy as jnp

    from sharding.exchange import RingExchange, pack_rows
    from sharding.mesh import RANKS

    r, t, h = args.ranks, args.rows, args.hidden
    ring = RingExchange(r)
    shifts = lambda *blocks: jnp.stack([_all_kept(ring.shift(b, d)) for d, b in enumerate(blocks, 1)])
    wide = lambda x: jnp.broadcast_to(x.astype(jnp.float32), (r, t, h))
    bodies = {
        "pack": lambda p, x, i, w: _all_kept(pack_rows(x, i, w)),
        "pack + all_gather u8": lambda p, x, i, w: _all_kept(jax.lax.all_gather(pack_rows(x, i, w), RANKS, tiled=True)),
        "broadcast to f32 (of those below)": lambda p, x, i, w: _all_kept(jax.lax.optimization_barrier(wide(x))),
        "pack + permutes u8": lambda p, x, i, w: shifts(*[pack_rows(x, i, w)] * (r - 1)),
        "all_to_all f32": lambda p, x, i, w: _all_kept(jax.lax.all_to_all(wide(x), RANKS, 0, 0)),
        "psum_scatter f32": lambda p, x, i, w: _all_kept(jax.lax.psum_scatter(wide(x).reshape(r * t, h), RANKS, tiled=True)),
        "permutes f32": lambda p, x, i, w: shifts(*jax.lax.optimization_barrier(wide(x))[1:]),
    }
    return {name: _timed(body, args, mesh, data, ring.compiler_options) for name, body in bodies.items()}


def link_gbps(mesh, nbytes: int) -> float:
    """GB/s one way of a ring shift of `nbytes` per device, the fastest of several: the ceiling that shares are of."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from bench.common import best_us
    from sharding.mesh import RANKS

    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    body = lambda x: jax.lax.fori_loop(0, 8, lambda i, x: jax.lax.ppermute(x, RANKS, ring), x)
    shift = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(RANKS), out_specs=P(RANKS), check_vma=False))
    make = jax.jit(lambda: jnp.ones((mesh.size * nbytes // 4,), jnp.float32), out_shardings=NamedSharding(mesh, P(RANKS)))
    x = make()
    return 8 * nbytes / best_us(lambda: shift(x)) * 1e-3


def measure(args, mesh, names) -> dict:
    """{exchange: times, bytes, shares}, and the collectives alone."""
    import jax

    from bench.compile_report import make_exchange

    data = make_rows(args)
    gathered = lambda a: jax.numpy.tile(a, (args.ranks, *[1] * (a.ndim - 1)))
    # what the stand-in costs on R*T rows without any exchange
    alone = _timed(lambda p, x, i, w: _all_kept(*stand_in(gathered(x), gathered(i), gathered(w), p, 0)), args, mesh, data)
    ceiling = link_gbps(mesh, 1 << 28 if jax.default_backend() == "gpu" else 1 << 20)
    kind = jax.devices()[0].device_kind
    sheet = next((v for k, v in LINK_GBPS.items() if kind.startswith(k)), None)
    rows = {}
    for name in names:
        exchange = make_exchange(name, args.ranks)
        body = functools.partial(lambda e, p, x, i, w: _all_kept(e.run_experts(x, i, w, p, stand_in)[0]), exchange)
        t = _timed(body, args, mesh, data, exchange.compiler_options)
        received, exposed = wire_bytes(name, args), t["median_us"] - alone["median_us"]
        rate = received / t["median_us"] * 1e-3  # of the whole exchange, stand-in included: never flattering
        rows[name] = {
            **t,
            "exposed_us": round(exposed, 2),
            "bytes_received": received,
            "gbps": round(rate, 1),
            "share_of_measured_link": round(rate / ceiling, 3),
            "share_of_data_sheet": round(rate / sheet, 3) if sheet else None,
        }
        print(f"{name:16} {t['median_us']:8.1f} us, exposed {exposed:8.1f} us, {rate:6.1f} GB/s of {ceiling:.0f}", flush=True)
    return {"stand_in_alone": alone, "link_gbps": round(ceiling, 1), "exchanges": rows, "parts": parts(args, mesh, data)}


def main(argv=None) -> None:
    args = parse(argv)
    import jax

    from bench.common import environment, write_json
    from sharding.mesh import make_mesh

    names = args.exchanges.split(",")
    check(args, names)
    mesh = make_mesh(args.ranks)
    result = {"what": {k: v for k, v in vars(args).items() if k != "out"}, "devices": [d.device_kind for d in jax.devices()],
              "environment": environment(args.seed)}  # fmt: skip
    save = lambda: args.out and write_json(args.out, result)
    result["against_one_device"] = compare(args, mesh, names)
    print(result["against_one_device"], flush=True)
    save()
    result |= measure(args, mesh, names)
    save()
    unequal = [n for n, by in result["against_one_device"].items() if not n.startswith("reduce_scatter") and not set(by.values()) <= set(EQUAL)]
    if unequal:
        sys.exit(f"bench.exchange: not equal to one device: {unequal}")


if __name__ == "__main__":
    run_program("bench.exchange", main)
