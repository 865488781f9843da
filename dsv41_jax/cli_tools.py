"""The commands that run nothing: inspect and make-checkpoint (see `cli`)."""

import json
import math
import sys

from dsv41_jax.config import ModelConfig
from dsv41_jax.presets import PRESETS


def make_checkpoint(args) -> None:
    """`dsv41 make-checkpoint`. Raises ValueError or OSError for bad input; then nothing is left on the disk."""
    from dsv41_jax.make_checkpoint import make_checkpoint as write

    if not 0 < args.shard_gb < math.inf:
        raise ValueError(f"--shard-gb: expected > 0 and finite, got {args.shard_gb}")
    config = _preset(args.preset) if args.preset else ModelConfig.from_file(args.config)
    path = write(config, args.out, seed=args.seed, shard_bytes=int(args.shard_gb * 1e9))
    size = sum(f.stat().st_size for f in path.iterdir())
    print(f"{path}: {size / 1e6:.1f} MB in {len(list(path.iterdir()))} files", file=sys.stderr)


def inspect(args) -> None:
    """`dsv41 inspect`. Raises ValueError or OSError for bad input."""
    from dsv41_jax.inspect import report
    from dsv41_jax.options import DecodeOptions

    if args.preset:
        config, problems = _preset(args.preset), []
    else:
        config, problems = _checkpoint(args.checkpoint)
    context = args.context or min(32768, config.max_position_embeddings)
    facts = report(config, batch=args.batch, context=context, ranks=args.ranks, options=DecodeOptions.from_env(),
                   engram=args.engram)  # fmt: skip
    if args.json:
        print(json.dumps(facts | {"checkpoint_problems": problems}, indent=1))
    else:
        _render(facts)
    if problems:
        from dsv41_jax.checkpoint import CheckpointError

        raise CheckpointError(args.checkpoint, problems)


def _preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise ValueError(f"--preset: expected one of {sorted(PRESETS)}, got {name!r}")
    return PRESETS[name]


def _checkpoint(folder) -> tuple[ModelConfig, list[str]]:
    from dsv41_jax.checkpoint import checkpoint_problems
    from dsv41_jax.cli_run import _config

    config = _config(folder)
    return config, checkpoint_problems(folder, config)


# tables ---------------------------------------------------------------------------------------------------------------


def _render(facts: dict) -> None:
    from rich.console import Console

    # a pipe has no width of its own; tables must not be folded to 80 columns there
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for title, table in (_schedule(facts), _parameters(facts), _memory(facts), _devices(facts), _options(facts)):
        console.print(title, style="bold", soft_wrap=True)  # whole on one line, for eyes and for grep
        console.print(table)
    console.print("config: " + ", ".join(f"{k} {v}" for k, v in facts["config"].items() if not isinstance(v, tuple)), style="dim")


def _table(*columns: str):
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column in ("parameters", "bytes", "used", "free") else "left")
    return table


def _schedule(facts: dict):
    """(title, table): one line per run of layers that differ only in their number."""
    table = _table("layers", "kind", "ratio", "KV from", "indices from", "notes")
    none = "-"
    runs: list[tuple[list[int], tuple]] = []
    layers = facts["config"]["num_hidden_layers"]
    for s in facts["schedule"]:
        notes = [
            text
            for on, text in (
                (s["index"] >= layers, "draft stage"),
                (s["engram"] is not None, "engram before"),
                (s["publishes_candidates"], "publishes candidates"),
                (s["restricted"], "within candidates"),
                (s["feature"] is not None, "drafter feature"),
            )
            if on
        ]
        cells = (s["kind"], str(s["ratio"]), _id(s["kv_source"], none), _id(s["index_source"], none), ", ".join(notes))
        if runs and runs[-1][1] == cells:
            runs[-1][0].append(s["index"])
        else:
            runs.append(([s["index"]], cells))
    for ids, cells in runs:
        table.add_row(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}", *cells)
    return "Layer schedule", table


def _id(value, none: str) -> str:
    return none if value is None else str(value)


def _parameters(facts: dict):
    p = facts["parameters"]
    title = (f"Parameters: {_billions(p['backbone'])} backbone + {_billions(p['engram'])} engram"
             f" + {_billions(p['draft'])} draft, {p['bytes'] / 1e9:.1f} GB stored")  # fmt: skip
    table = _table("kind", "parameters", "bytes")
    for kind, row in p["by_kind"].items():
        table.add_row(kind, f"{row['parameters']:,}", f"{row['bytes']:,}")
    return title, table


def _billions(n: int) -> str:
    return f"{n / 1e9:.0f} B" if n >= 1e10 else f"{n / 1e9:.1f} B" if n >= 1e8 else f"{n / 1e6:.1f} M"


def _memory(facts: dict):
    w, c = facts["workload"], facts["cache"]
    title = (f"Memory per GPU: {w['batch_per_rank']} requests of {w['context']} tokens each, {w['ranks']} ranks; "
             f"{c['per_context_token']:g} B per context token")  # fmt: skip
    table = _table("what", "bytes")
    rows = {f"weights: {k}": v for k, v in facts["rank_weights"].items()}
    rows["cache: paged KV and index keys"] = c["paged"]
    rows["cache: window rings, pending rows, registers"] = c["total"] - c["paged"]
    rows |= {f"step: {k}": v for k, v in facts["working"].items()}
    for name, value in rows.items():
        table.add_row(name, f"{value:,.0f}")
    table.add_row("total", f"{facts['gpu_total']:,.0f}", style="bold")
    for name, value in facts["host"].items():
        table.add_row(f"in the host's page cache: {name}", f"{value:,}")
    table.add_row("per request: window rings", f"{c['window_rings_per_request']:,.0f}", style="dim")
    table.add_row("per request: pending rows", f"{c['pending_rows_per_request']:,.0f}", style="dim")
    return title, table


def _devices(facts: dict):
    table = _table("GPU", "bytes", "used", "free", "verdict")
    for name, d in facts["devices"].items():
        verdict = "fits" if d["fits"] else "does not fit"
        if d["fits"] and d["used"] > 0.75:
            verdict += f", with XLA_PYTHON_CLIENT_MEM_FRACTION >= {d['used']:.2f}"
        table.add_row(name, f"{d['bytes']:,}", f"{d['used']:.1%}", f"{d['free'] / 1e9:,.1f} GB", verdict)
    return "Does it fit?", table


def _options(facts: dict):
    import jax

    table = _table("option", "value", "why not another")
    for row in facts["options"]:
        table.add_row(row["option"], row["value"], row["why"])
    return f"Options, on this device ({jax.default_backend()})", table
