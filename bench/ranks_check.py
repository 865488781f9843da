"""Whether the step over R ranks gives each rank what it gets alone on one device: tokens, confidences, every byte of its caches.

    python -m bench.ranks_check --preset flash --layers 6 --ranks 2 --out bench/results/ranks_check_h200x2.json
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m bench.ranks_check --preset tiny --layers 3 --ranks 2

One device holds all experts and runs the ranks' requests rank after rank: the same rows a step, the rank's own caches and
page tables, the same random weights; greedy and sampled requests in turn; the last request of the last rank is padding. It
adds the experts' contributions in the order of the ranks (`sharding.exchange.BlockedExchange`). After each of the steps every
output and a hash of every slot and page must have equal bits, so a rank's result depends on no other rank's requests. What
differs is named: step, rank, request, leaf of the state (with its layer). Exit status 1 if anything does.

--one-batch also reports, without a verdict, one device that runs all ranks' requests as one batch against the same requests
alone. That tells nothing of the sharding: a GPU's library products choose their algorithm, and so the order of their sums,
by the number of rows, so tokens may differ there; a CPU's are tiled (`pallas_kernels.row_tiles`) and everything is equal.

Two compiles of the same product would choose by timing, so the command turns XLA's autotuning off unless XLA_FLAGS sets it.
Exchange reduce_scatter promises equal bits for two ranks only. Engram tables are cut as in `flash-rank`, so that one GPU
holds all experts of a cut network.
"""

import argparse
import dataclasses
import functools
import os
import re
import sys

from bench.command_line import out_file, run_program
from dsv41_jax.arguments import at_least

PRECISIONS = ("released", "float32_cache")
ENGRAM_ROWS = 1_000_000
OUTPUTS = ("tokens", "count", "accepted", "finite")  # of a step, beside the confidences
PAGED = ("global_kv", "index")  # leaves of the state whose rows are pages; those of all others are slots
XLA_FLAGS = ("--xla_gpu_enable_triton_gemm=false", "--xla_gpu_autotune_level=0")


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench.ranks_check", description=__doc__.split("\n\n")[0])
    p.add_argument("--preset", default="tiny", choices=("tiny", "flash"))
    p.add_argument("--layers", type=at_least(3), default=6, help="cut to this many layers; 6 keep every layer class")
    p.add_argument("--ranks", type=at_least(1), default=2)
    p.add_argument("--batch", type=at_least(1), help="requests of each rank (default: the preset's)")
    p.add_argument("--context", type=at_least(1), help="tokens of every request (default: 4096; tiny: 64)")
    p.add_argument("--steps", type=at_least(1), default=3, help="MTP steps, each from the state of the one before")
    p.add_argument("--precision", default="released", choices=PRECISIONS)
    p.add_argument("--impl", default="auto", help="auto, reference, or operator=name[,...] beside either")
    p.add_argument("--exchanges", default="gather,gather/2,all_to_all",
                   help="gather, reduce_scatter, ring, all_to_all or ragged, each with /N for N column parts")  # fmt: skip
    p.add_argument("--one-batch", action="store_true", help="also report one device with all requests in one batch")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the result as JSON")
    return p.parse_args(argv)


@functools.cache
def _digest():
    import jax
    import jax.numpy as jnp

    from bench.synthetic import _hash

    def digest(x):
        """u32[leading]: a hash of the bits of each row (slot or page) of an array, wherever the row is."""
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32).astype(jnp.uint32)
        bits = bits.reshape(x.shape[0], -1)
        return jnp.sum((bits + 1) * (_hash((1, bits.shape[1]), 1) | 1), 1, dtype=jnp.uint32)

    return jax.jit(lambda state: jax.tree.map(digest, state))


@functools.cache
def _copy():
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda state: jax.tree.map(jnp.copy, state))


@dataclasses.dataclass
class Record:
    """What a run of steps gave: the outputs of each, and after each a hash of every slot and page, as host arrays."""

    outputs: list  # StepOutput
    digests: list  # State of u32[slots or pages]

    def of_rank(self, rank: int, ranks: int) -> "Record":
        """One rank's part of arrays that hold the ranks' end to end."""
        from sharding.step import of_rank

        return Record(*(of_rank(part, rank, ranks) for part in (self.outputs, self.digests)))


def run(steps, state, batch, count: int) -> Record:
    """`count` steps from `state`, which is donated."""
    import jax

    outputs, digests = [], []
    for _ in range(count):
        state, out = steps.decode(state, batch)
        digests.append(jax.device_get(_digest()(state)))
        outputs.append(jax.device_get(out))
    return Record(outputs, digests)


def _order(name: str):
    """Sorts leaves of a step as it computes them: the draft's confidences, the layers one after the other, the rest."""
    layer = re.fullmatch(r"(window|pending|global_kv|index)\[(\d+)\]", name)
    return (0, 0) if name == "confidence" else (1, int(layer[2])) if layer else (2, 0) if name not in OUTPUTS else (3, 0)


def _unequal(want: Record, got: Record, step: int) -> dict:
    """{leaf: bool[rows] which slots, pages or requests differ in bits} after a step, in the order of `_order`."""
    import jax
    import numpy as np

    def differ(w, g):
        w, g = (np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (w, g))
        return (w != g).any(1)

    pair = want.outputs[step], got.outputs[step]
    out = {name: differ(*(getattr(o, name) for o in pair)) for name in ("confidence", *OUTPUTS)}
    leaves = zip(jax.tree_util.tree_leaves_with_path(want.digests[step]), jax.tree.leaves(got.digests[step]), strict=True)
    out |= {jax.tree_util.keystr(path).lstrip("."): differ(w, g) for (path, w), g in leaves}
    return dict(sorted(out.items(), key=lambda item: _order(item[0])))


def _request(leaf: str, row: int, batch) -> int | None:
    """The request of a rank's DecodeBatch that owns a row of a leaf; None: nobody does."""
    import numpy as np

    if leaf in OUTPUTS or leaf == "confidence":
        return row
    paged = leaf.split("[")[0] in PAGED
    table = next(iter(batch.tables.global_kv.values())) if paged else batch.slots[:, None]
    owners = np.flatnonzero((np.asarray(table) == row).any(1))
    return int(owners[0]) if len(owners) else None


def _first_difference(unequal: list, batch) -> dict | None:
    """Of the first step with one: the step, the first leaf, its first row and whose it is, and all leaves with how many of
    their rows differ. None if nothing differs."""
    for step, leaves in enumerate(unequal):
        odd = {leaf: rows for leaf, rows in leaves.items() if rows.any()}
        if odd:
            leaf, rows = next(iter(odd.items()))
            row = int(rows.argmax())
            counts = {name: f"{int(r.sum())} of {r.size}" for name, r in odd.items()}
            return {"step": step, "leaf": leaf, "row": row, "request": _request(leaf, row, batch), "leaves": counts}
    return None


def compare(want: Record, got: Record, batch) -> dict:
    """Plain data on one rank's two records and its DecodeBatch. equal: every bit of every output and of the state after every
    step. A request's tokens count as equal if those of all steps are; slots and pages are those after the last step."""
    import numpy as np

    unequal = [_unequal(want, got, step) for step in range(len(want.outputs))]
    tokens = np.stack([functools.reduce(np.logical_or, [leaves[name] for name in OUTPUTS]) for leaves in unequal])
    state = np.concatenate([rows for leaf, rows in unequal[-1].items() if leaf not in (*OUTPUTS, "confidence")])
    difference = [np.abs(w.confidence - g.confidence).max() for w, g in zip(want.outputs, got.outputs, strict=True)]
    return {
        "equal": not any(rows.any() for leaves in unequal for rows in leaves.values()),
        "steps": len(unequal),
        "steps_with_equal_tokens": int((~tokens.any(1)).sum()),
        "requests": tokens.shape[1],
        "requests_with_equal_tokens": int((~tokens.any(0)).sum()),
        "tokens": int(sum(w.count.sum() for w in want.outputs)),
        "accepted_drafts": int(sum((w.count - 1).clip(0).sum() for w in want.outputs)),
        "all_finite": all(bool(np.all(o.finite)) for r in (want, got) for o in r.outputs),
        "largest_confidence_difference": float(max(difference)),
        "equal_slots_and_pages": round(1 - float(state.mean()), 6),
        "first_difference": _first_difference(unequal, batch),
    }


class Check:
    """Weights, caches and requests of one check, made anew for each side. Raises ValueError for ranks that do not fit."""

    def __init__(self, args):
        from bench import presets
        from bench.decode import decode_options
        from bench.ranks import exchange_here
        from dsv41_jax.cache import CacheGeometry
        from dsv41_jax.precision import precision
        from sharding.mesh import check_ranks, make_mesh

        tiny = args.preset == "tiny"
        w = presets.workload(args.preset, layers=args.layers, batch=args.batch, context=args.context or (64 if tiny else 4096))
        self.args, self.workload, self.mesh = args, w, make_mesh(args.ranks)
        self.config = c = w.config if tiny else presets.with_engram_vocab(w.config, ENGRAM_ROWS)
        check_ranks(c, args.ranks)
        for name in args.exchanges.split(","):
            exchange_here(name, args.ranks, c.hidden_size)
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

    @functools.cached_property
    def start(self):
        """The state that every run begins with, of all ranks, each rank's part on its device. Never donated."""
        from jax.sharding import NamedSharding

        from bench.synthetic import random_state
        from sharding.rules import state_spec

        placed = NamedSharding(self.mesh, state_spec())
        return random_state(self.config, self.all, self.workload.context, self.args.seed, placed)

    def on_one(self, rank: int | None = None):
        """A copy of one rank's part of `start` on the first device, or of all of it."""
        import jax

        part = self.start if rank is None else jax.tree.map(lambda x: x.addressable_data(rank), self.start)
        return _copy()(jax.device_put(part, self.mesh.devices.flat[0]))

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

    def _on_one(self, geometry, params):
        from dsv41_jax.model import Network
        from dsv41_jax.step import Steps
        from sharding.exchange import BlockedExchange

        net = Network(self.config, geometry, self.precision, self.options, exchange=BlockedExchange(self.args.ranks))
        return Steps(net, params)

    def batches(self) -> list:
        """Each rank's DecodeBatch, slots and pages local to it."""
        from sharding.step import of_rank

        return [of_rank(self.batch(through=False), r, self.args.ranks) for r in range(self.args.ranks)]

    def alone(self, params) -> list[Record]:
        """Every rank's requests by themselves on one device that holds all experts: one executable, one state at a time."""
        steps = self._on_one(self.one, params)
        return [run(steps, self.on_one(r), batch, self.args.steps) for r, batch in enumerate(self.batches())]

    def one_batch(self, params) -> list[Record]:
        """All ranks' requests as one batch on one device that holds all experts and caches; cut into the ranks'."""
        whole = run(self._on_one(self.all, params), self.on_one(), self.batch(through=True), self.args.steps)
        return [whole.of_rank(r, self.args.ranks) for r in range(self.args.ranks)]

    def ranks(self, exchange: str, params) -> list[Record]:
        """The step over the mesh, cut into the ranks' parts."""
        from bench.compile_report import make_exchange
        from dsv41_jax.model import Network
        from sharding.step import ShardedSteps

        net = Network(self.config, self.one, self.precision, self.options)
        steps = ShardedSteps(net, params, self.mesh, exchange=make_exchange(exchange, self.args.ranks))
        whole = run(steps, _copy()(self.start), self.batch(through=False), self.args.steps)
        return [whole.of_rank(r, self.args.ranks) for r in range(self.args.ranks)]

    def compare(self, want: list[Record], got: list[Record]) -> dict:
        """Plain data: "ranks": `compare` of each; beside it all of them together, the lowest share of equal slots and pages."""
        each = [compare(*pair) for pair in zip(want, got, self.batches(), strict=True)]
        sums = ("requests", "requests_with_equal_tokens", "tokens", "accepted_drafts")
        return {
            "equal": all(r["equal"] for r in each),
            **{name: sum(r[name] for r in each) for name in sums},
            "equal_slots_and_pages": min(r["equal_slots_and_pages"] for r in each),
            "ranks": each,
        }


def _tell(what: str, result: dict) -> None:
    print(f"{what}: {'every bit equal' if result['equal'] else 'DIFFERS'}", flush=True)
    for rank, r in enumerate(result["ranks"]):
        print(f"  rank {rank}: {r}", flush=True)


def main(argv=None) -> dict:
    args = parse(argv)
    from bench.common import environment, write_json

    check = Check(args)
    c, w = check.config, check.workload
    protocol = {"preset": args.preset, "layers": [s.kind for s in c.layers], "ranks": args.ranks, "batch": w.batch,
                "context": w.context, "steps": args.steps, "precision": args.precision, "impl": args.impl,
                "against": "each rank's requests alone on one device",
                "notes": [*w.notes, f"engram tables of {sum(c.engram_num_embeddings)} rows"]}  # fmt: skip
    out = {"benchmark": "ranks_check", "environment": environment(args.seed), "protocol": protocol, "result": {}}
    params = check.params()
    want = check.alone(params)
    print(f"one device: {sum(int(o.count.sum()) for r in want for o in r.outputs)} tokens in {args.steps} steps", flush=True)
    if args.one_batch:
        out["one_batch"] = check.compare(want, check.one_batch(params))
        _tell("one device, all requests in one batch (other products' rows: no verdict)", out["one_batch"])
    del params  # before those of the ranks are made
    params = check.params(check.mesh)
    for name in args.exchanges.split(","):
        out["result"][name] = check.compare(want, check.ranks(name, params))
        _tell(f"{args.ranks} ranks, {name}", out["result"][name])
        if args.out:
            write_json(args.out, out)
    if unequal := [n for n, r in out["result"].items() if not r["equal"]]:
        sys.exit(f"bench.ranks_check: a rank differs from the same requests alone on one device: {', '.join(unequal)}")
    return out


def _fix_products() -> None:
    """Both sides' library products the same: nothing chosen by timing. XLA reads the flags when JAX starts."""
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(f for f in XLA_FLAGS if f.split("=")[0] not in given)]).strip()


if __name__ == "__main__":
    _fix_products()
    run_program("bench.ranks_check", main)
