"""Compiles the sharded MTP step for GPUs that are not there, and reports what one GPU holds, moves and launches.

    python -m bench.compile_report --preset flash --target b300 --ranks 4 --batch 64 --context 32768 --out FILE

Nothing is allocated: parameters, state and batch are shapes. Needs the CUDA plugin and its compiler, no driver. Fails with
the reason if the state is not updated in place, if anything is computed twice to save memory, or if the GPU's memory does
not hold the step.
"""

import argparse
import os
import pathlib
import sys
import time

import numpy as np

from bench.command_line import out_file, run_program
from dsv41_jax.arguments import at_least

EXCHANGES = ("gather", "reduce_scatter", "ring", "all_to_all", "ragged")  # --exchange
ARCHES = {"h200": "sm_90", "b200": "sm_100", "b300": "sm_103"}
TARGETS = pathlib.Path(__file__).resolve().parents[1] / "tests" / "targets"
PLUGIN = TARGETS.parents[1] / ".venv" / "deviceless"  # where .ci/setup puts it, out of the sight of other runs
KINDS = (  # what a parameter counts as, by its path: the first that matches
    ("engram tables", ".engram.table"),
    ("routed experts", ".experts."),
    ("shared experts", ".shared_"),
    ("attention", ".attn."),
    ("embedding, head, Markov head", ("embed", "head", "draft.markov")),
    ("hyper-connections", ".hc_"),
)


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench.compile_report", description=__doc__.split("\n\n")[0])
    p.add_argument("--preset", default="flash", help="flash or tiny")
    p.add_argument("--target", default="b300", help="h200, b200 or b300")
    p.add_argument("--ranks", type=at_least(1), default=4, help="GPUs: data-parallel attention, expert-parallel experts")
    p.add_argument("--batch", type=at_least(1), default=64, help="requests per rank")
    p.add_argument("--context", type=at_least(1), default=32768, help="tokens of a request; 1024 more fit in its pages")
    p.add_argument("--layers", type=at_least(3), help="cut to this many layers; 6 keep every layer class")
    p.add_argument("--gamma", type=at_least(0, 5), help="drafts per step (default: the draft block)")
    p.add_argument("--exchange", default="gather", choices=EXCHANGES)
    p.add_argument("--exchange-parts", type=at_least(1), default=1, help="column parts in which the experts' contributions go home")
    p.add_argument("--impl", default="auto", help="auto, reference, or operator=name[,...] beside either")
    p.add_argument("--hlo", type=out_file, metavar="FILE", help="write the compiled HLO")
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the report as JSON")
    return p.parse_args(argv)


def network(args):
    """The ModelConfig of the command line. Raises ValueError for a preset, cut, rank count or exchange that does not fit."""
    from bench.presets import cut_layers
    from dsv41_jax.presets import PRESETS
    from sharding.mesh import check_ranks

    if args.preset not in PRESETS:
        raise ValueError(f"preset: expected one of {sorted(PRESETS)}, got {args.preset!r}")
    c = PRESETS[args.preset]
    c = cut_layers(c, args.layers) if args.layers else c
    check_ranks(c, args.ranks)
    make_exchange(args.exchange, args.ranks, args.exchange_parts, hidden=c.hidden_size)
    return c


def lower(args, mesh):
    """(jax.stages.Lowered of the step, its Network, abstract parameters, abstract state). Nothing is allocated.

    Raises ValueError for a preset, cut, rank count or operator that does not fit."""
    import jax
    from jax.sharding import NamedSharding

    from bench.decode import decode_options, takes_shuffled_experts
    from dsv41_jax.cache import CacheGeometry, PageTables
    from dsv41_jax.expert_order import as_shuffled
    from dsv41_jax.hyper_parts import as_parts
    from dsv41_jax.model import Network
    from dsv41_jax.params import flat_paths
    from dsv41_jax.precision import RELEASED
    from dsv41_jax.sampling import pack_sampling
    from dsv41_jax.step import DecodeBatch
    from sharding.rules import abstract_state, batch_spec, global_parameters
    from sharding.step import ShardedSteps

    c = network(args)
    options = decode_options(args)
    page_tokens, rows = 128, args.batch * mesh.size
    columns = -(-(args.context + 1024) // page_tokens)
    g = CacheGeometry(args.batch, 1 + args.batch * columns, page_tokens, span=c.dspark_block_size + 1)
    net = Network(c, g, RELEASED, options)
    params, state = global_parameters(c, mesh), abstract_state(c, g, RELEASED, mesh)
    leaves = as_parts(flat_paths(params))
    if takes_shuffled_experts(options):
        leaves = as_shuffled(leaves)
    params = jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))
    table = np.broadcast_to(np.int32(0), (rows, columns))
    batch = DecodeBatch(np.zeros(rows, np.int32), PageTables.shared(table, c),
                        pack_sampling([None] * rows, [0] * rows, c.eos_token_id))  # fmt: skip
    sharding = NamedSharding(mesh, batch_spec())
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), batch)
    steps = ShardedSteps(net, params, mesh, args.gamma, make_exchange(args.exchange, mesh.size, args.exchange_parts))
    return steps.lower_decode(state, batch), net, params, state


def make_exchange(name: str, ranks: int, parts: int = 1, spare_sms: int | None = None, hidden: int | None = None):
    """An exchange of `sharding.exchange` by its command-line name, contributions in `parts` parts; "<name>/<parts>" asks
    for parts by name. Raises ValueError for an unknown name, parts < 1 or that do not divide `hidden` (if given), and
    spare_sms < 0."""
    from sharding.exchange import AllToAllExchange, GatherExchange, RingExchange

    whole, (name, slash, asked) = name, name.partition("/")
    if slash and not asked.isdecimal():
        raise ValueError(f"exchange: expected a number of parts behind the slash, got {whole!r}")
    cut = {"parts": int(asked or parts)} | ({} if spare_sms is None else {"spare_sms": spare_sms})
    known = {
        "gather": lambda: GatherExchange(ranks, **cut),
        "reduce_scatter": lambda: GatherExchange(ranks, **cut, combine="reduce_scatter"),
        "ring": lambda: RingExchange(ranks, **cut),
        "all_to_all": lambda: AllToAllExchange(ranks, **cut),
        "ragged": lambda: AllToAllExchange(ranks, **cut, ragged=True),
    }
    if name not in known:
        raise ValueError(f"exchange: expected one of {', '.join(known)}, got {name!r}")
    exchange = known[name]()
    if hidden is not None and hidden % exchange.parts:
        raise ValueError(f"exchange: expected parts that divide the hidden size {hidden}, got {exchange.parts} of {whole!r}")
    return exchange


def _local_bytes(leaf) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def weight_bytes(params) -> dict[str, int]:
    """{kind: bytes on one GPU}; the drafter's are counted apart."""
    from dsv41_jax.params import flat_paths

    out: dict[str, int] = {}
    for path, leaf in flat_paths(params).items():
        kind = next((k for k, marks in KINDS if any(m in path for m in ((marks,) if isinstance(marks, str) else marks))), "other")
        kind = f"draft {kind}" if path.startswith("draft.stages") else kind
        out[kind] = out.get(kind, 0) + _local_bytes(leaf)
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))


def pool_bytes(state) -> dict[str, int]:
    """{pool: bytes on one GPU}"""
    import jax

    fields = ("window", "draft_window", "global_kv", "index", "pending")
    out = {f: sum(map(_local_bytes, jax.tree.leaves(getattr(state, f)))) for f in fields}
    registers = (state.length, state.anchor, state.history, state.draft_from)
    return {**out, "registers": sum(map(_local_bytes, registers))}


def memory(compiled) -> dict[str, int]:
    """Bytes of one GPU by XLA's buffer assignment; `peak` = arguments + outputs that alias none of them + temporaries."""
    m = compiled.memory_analysis()
    out = {
        "arguments": m.argument_size_in_bytes,
        "outputs": m.output_size_in_bytes,
        "aliased": m.alias_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "code": m.generated_code_size_in_bytes,
    }
    return {**out, "peak": out["arguments"] + out["outputs"] - out["aliased"] + out["temporaries"]}


def _card_bytes(target_file: pathlib.Path) -> int:
    text = target_file.read_text()
    return int(text.split("device_memory_size:")[1].split()[0])


def report(args) -> dict:
    """The whole report as plain data. Raises ValueError for arguments that do not fit, SystemExit for a defect."""
    import jax

    from bench import hlo_report
    from bench.common import environment
    from pallas_kernels import registry
    from sharding.mesh import compiling_for, topology_mesh

    target = TARGETS / f"{args.target}.textproto"
    if args.target not in ARCHES:
        raise ValueError(f"target: expected one of {sorted(ARCHES)}, got {args.target!r}")
    network(args)
    mesh = topology_mesh(target, args.ranks)
    with compiling_for(mesh), registry.compiling_for(ARCHES[args.target]):
        began = time.perf_counter()
        lowered, net, params, state = lower(args, mesh)
        lowered_at = time.perf_counter()
        print(f"lowered in {lowered_at - began:.0f} s", flush=True)
        compiled = lowered.compile()
        compiled_at = time.perf_counter()
    hlo = compiled.as_text()
    if args.hlo:
        pathlib.Path(args.hlo).write_text(hlo)
    weights, pools, held = weight_bytes(params), pool_bytes(state), memory(compiled)
    arrays = jax.tree.leaves((state.window, state.draft_window, state.global_kv, state.index))
    sizes = {("u8", int(np.prod(a.sharding.shard_shape(a.shape), dtype=np.int64))) for a in arrays}
    launched = hlo_report.launches(hlo)
    return {
        "benchmark": "compile_report",
        "what": {
            "preset": args.preset, "target": args.target, "ranks": args.ranks, "batch_per_rank": args.batch,
            "context": args.context, "layers": net.config.num_hidden_layers, "gamma": args.gamma or net.config.dspark_block_size,
            "exchange": args.exchange, "exchange_parts": args.exchange_parts, "operators": args.impl,
        },
        "weights_bytes": {**weights, "total": sum(weights.values())},
        "pools_bytes": {**pools, "total": sum(pools.values())},
        "memory_bytes": {**held, "card": _card_bytes(target)},
        "collectives": hlo_report.collectives(hlo, args.ranks),
        "collective_overlap": hlo_report.overlapped(hlo),
        "launches": {"total": sum(launched.values()), **launched},
        "pool_copies": hlo_report.pool_copies(hlo, sizes),
        "recomputed": hlo_report.recomputed(hlo),
        "seconds": {"trace_and_lower": round(lowered_at - began, 1), "compile": round(compiled_at - lowered_at, 1)},
        "environment": environment(),
    }  # fmt: skip


def defects(r: dict) -> list[str]:
    """What is wrong with the compiled step; empty if nothing is."""
    m = r["memory_bytes"]
    out = [f"copies a whole pool: {line}" for line in r["pool_copies"]]
    if m["aliased"] < r["pools_bytes"]["total"]:
        out.append(f"holds {r['pools_bytes']['total']} bytes of state, aliases only {m['aliased']}")
    if r["recomputed"]:
        out.append(f"computes {r['recomputed']} instructions again, to save memory")
    if m["peak"] > m["card"]:
        out.append(f"needs {m['peak'] / 1e9:.1f} GB of a GPU with {m['card'] / 1e9:.1f} GB")
    return out


def show(r: dict) -> None:
    """Print the report for people."""
    gb = lambda n: f"{n / 1e9:10.3f} GB"
    for part in ("weights_bytes", "pools_bytes", "memory_bytes"):
        print(part.removesuffix("_bytes") + " per GPU")
        for name, n in r[part].items():
            print(f"  {name:32}{gb(n)}")
    print("collectives per step, bytes received per GPU")
    for row in r["collectives"]:
        print(f"  {row['kind']:20}{row['count']:5} x {row['bytes_each'] / 1e6:9.3f} MB = {row['bytes'] / 1e6:9.1f} MB")
    print(f"  {r['collective_overlap']}")
    print(f"launches {r['launches']['total']}, pool-sized copies {len(r['pool_copies'])}, compiled in {r['seconds']['compile']} s")


def main(argv=None) -> None:
    args = parse(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler is found by its plugin, no GPU is asked for
    if PLUGIN.is_dir() and "jax" not in sys.modules:
        sys.path.append(str(PLUGIN))
    # what the benchmarks on a GPU run with; without a device to time them on, Triton's tilings would all be compiled
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    from bench.common import write_json

    try:
        r = report(args)
    except ValueError as e:
        sys.exit(f"bench.compile_report: {e}")
    show(r)
    if args.out:
        write_json(args.out, r)
    if wrong := defects(r):
        sys.exit("bench.compile_report: the compiled step\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    run_program("bench.compile_report", main)
