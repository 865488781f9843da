"""Whether the step over R ranks is the step of one device: tokens, accepted drafts, confidences and every byte of the state.

    python -m bench.ranks_check --preset flash --layers 6 --ranks 2 --out bench/results/ranks_check_h200x2.json
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m bench.ranks_check --preset tiny --layers 3 --ranks 2

Both sides have the same random weights, caches and requests, greedy and sampled in turn; the last rank's last request is
padding. One device adds the experts' contributions in the order of the ranks (`sharding.exchange.BlockedExchange`), so with
implementations that give a row the same bits in any batch everything is equal. Engram tables are cut as in `flash-rank`, so
that one GPU holds all experts of a cut network. Exit status 1 if a token differs.
"""

import argparse
import dataclasses
import functools
import sys

PRECISIONS = ("released", "float32_cache")
ENGRAM_ROWS = 1_000_000


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench.ranks_check", description=__doc__.split("\n\n")[0])
    p.add_argument("--preset", default="tiny", choices=("tiny", "flash"))
    p.add_argument("--layers", type=int, default=6, help="cut to this many layers; 6 keep every layer class")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--batch", type=int, help="requests of each rank (default: the preset's)")
    p.add_argument("--context", type=int, help="tokens of every request (default: 4096; tiny: 64)")
    p.add_argument("--steps", type=int, default=3, help="MTP steps, each from the state of the one before")
    p.add_argument("--precision", default="released", choices=PRECISIONS)
    p.add_argument("--impl", default="auto", help="auto, reference, or operator=name[,...] beside either")
    p.add_argument("--exchanges", default="gather,gather/2,all_to_all",
                   help="gather, reduce_scatter, all_to_all or ragged, each with /N for N column parts")  # fmt: skip
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", metavar="FILE", help="write the result as JSON")
    return p.parse_args(argv)


@functools.cache
def _digest():
    import jax
    import jax.numpy as jnp

    from bench.synthetic import _hash

    def digest(x):
        """u32[leading]: a hash of the bits of each row (slot or page) of an array."""
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32).astype(jnp.uint32)
        bits = bits.reshape(x.shape[0], -1)
        return jnp.sum((bits + 1) * (_hash(bits.shape, 1) | 1), 1, dtype=jnp.uint32)

    return jax.jit(lambda state: [digest(x) for x in jax.tree.leaves(state)])


@dataclasses.dataclass
class Record:
    """What a run of steps gave: the outputs of each as host arrays, and a hash of every slot and page at the end."""

    outputs: list
    digests: list


def run(steps, state, batch, count: int) -> Record:
    """`count` steps from `state`, which is donated."""
    import jax

    outputs = []
    for _ in range(count):
        state, out = steps.decode(state, batch)
        outputs.append(jax.device_get(out))
    return Record(outputs, jax.device_get(_digest()(state)))


def compare(want: Record, got: Record) -> dict:
    """Steps whose tokens, counts and accepted drafts are equal, the largest difference of a confidence, and the share of
    slots and pages with equal bits."""
    import numpy as np

    pairs = list(zip(want.outputs, got.outputs, strict=True))
    equal = [all(np.array_equal(getattr(w, f), getattr(g, f)) for f in ("tokens", "count", "accepted", "finite")) for w, g in pairs]
    same = np.concatenate([w == g for w, g in zip(want.digests, got.digests, strict=True)])
    return {
        "steps": len(equal),
        "steps_with_equal_tokens": sum(equal),
        "tokens": int(sum(w.count.sum() for w, _ in pairs)),
        "accepted_drafts": int(sum((w.count - 1).clip(0).sum() for w, _ in pairs)),
        "all_finite": all(bool(np.all(w.finite)) for w, _ in pairs),
        "largest_confidence_difference": max(float(np.abs(w.confidence - g.confidence).max()) for w, g in pairs),
        "equal_slots_and_pages": round(float(same.mean()), 6),
    }


class Check:
    """Weights, caches and requests of one check, made anew for each side. Raises ValueError for ranks that do not fit."""

    def __init__(self, args):
        from bench import presets
        from bench.decode import decode_options
        from dsv41_jax.cache import CacheGeometry
        from dsv41_jax.precision import precision
        from sharding.mesh import check_ranks, make_mesh

        tiny = args.preset == "tiny"
        w = presets.workload(args.preset, layers=args.layers, batch=args.batch, context=args.context or (64 if tiny else 4096))
        self.args, self.workload, self.mesh = args, w, make_mesh(args.ranks)
        self.config = c = w.config if tiny else presets.with_engram_vocab(w.config, ENGRAM_ROWS)
        check_ranks(c, args.ranks)
        self.columns = -(-w.capacity // w.page_tokens)
        pages = 1 + w.batch * self.columns
        self.one, self.all = (
            CacheGeometry(w.batch * n, pages * n, w.page_tokens, c.dspark_block_size + 1) for n in (1, args.ranks)
        )
        self.precision, self.options = precision(args.precision), decode_options(args)

    def params(self, mesh=None):
        from bench.decode import takes_shuffled_experts
        from bench.synthetic import random_parameters

        return random_parameters(self.config, self.args.seed, takes_shuffled_experts(self.options), mesh)

    def state(self, sharding=None):
        from bench.synthetic import random_state

        return random_state(self.config, self.all, self.workload.context, self.args.seed, sharding)

    def batch(self, through: bool):
        """The ranks' requests end to end; through: with slots and pages as one device that holds all caches counts them."""
        import numpy as np

        from bench.synthetic import permuted_table
        from dsv41_jax.cache import PageTables
        from dsv41_jax.sampling import SamplingParams, pack_sampling
        from dsv41_jax.step import DecodeBatch

        b, r, seed = self.workload.batch, self.args.ranks, self.args.seed
        table = np.concatenate([permuted_table(b, self.columns, seed + i) for i in range(r)])
        slots = np.concatenate([np.random.default_rng(seed + i).permutation(b) for i in range(r)]).astype(np.int32)
        rank = np.repeat(np.arange(r, dtype=np.int32), b)
        if through:
            table, slots = table + (rank * self.one.pages)[:, None], slots + rank * b
        slots[-1] = -1
        sampling = [SamplingParams(temperature=1.0 * (i % 2), seed=i, ignore_eos=True) for i in range(r * b)]
        packed = pack_sampling(sampling, [self.workload.context] * (r * b), self.config.eos_token_id)
        return DecodeBatch(slots, PageTables.shared(table.astype(np.int32), self.config), packed)

    def one_device(self) -> Record:
        from dsv41_jax.model import Network
        from dsv41_jax.step import Steps
        from sharding.exchange import BlockedExchange

        net = Network(self.config, self.all, self.precision, self.options, exchange=BlockedExchange(self.args.ranks))
        return run(Steps(net, self.params()), self.state(), self.batch(through=True), self.args.steps)

    def ranks(self, exchange: str, params) -> Record:
        from jax.sharding import NamedSharding

        from bench.compile_report import make_exchange
        from dsv41_jax.model import Network
        from sharding.rules import state_spec
        from sharding.step import ShardedSteps

        net = Network(self.config, self.one, self.precision, self.options)
        steps = ShardedSteps(net, params, self.mesh, exchange=make_exchange(exchange, self.args.ranks))
        state = self.state(NamedSharding(self.mesh, state_spec()))
        return run(steps, state, self.batch(through=False), self.args.steps)


def main(argv=None) -> dict:
    args = parse(argv)
    from bench.common import environment, write_json

    check = Check(args)
    c, w = check.config, check.workload
    protocol = {"preset": args.preset, "layers": [s.kind for s in c.layers], "ranks": args.ranks, "batch": w.batch,
                "context": w.context, "steps": args.steps, "precision": args.precision, "impl": args.impl,
                "notes": [*w.notes, f"engram tables of {sum(c.engram_num_embeddings)} rows"]}  # fmt: skip
    out = {"benchmark": "ranks_check", "environment": environment(args.seed), "protocol": protocol, "result": {}}
    want = check.one_device()
    print(f"one device: {sum(int(o.count.sum()) for o in want.outputs)} tokens in {args.steps} steps", flush=True)
    params = check.params(check.mesh)
    for name in args.exchanges.split(","):
        out["result"][name] = compare(want, check.ranks(name, params))
        print(f"{args.ranks} ranks, {name}: {out['result'][name]}", flush=True)
        if args.out:
            write_json(args.out, out)
    if unequal := [n for n, r in out["result"].items() if r["steps_with_equal_tokens"] != args.steps]:
        sys.exit(f"bench.ranks_check: tokens differ from one device: {', '.join(unequal)}")
    return out


if __name__ == "__main__":
    main()
