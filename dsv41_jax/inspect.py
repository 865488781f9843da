"""What a geometry is and needs: schedule, parameters and bytes by kind, memory per GPU, active options.

Every number is counted from the same tables that the loader and the cache use; nothing is allocated.
"""

import dataclasses
import math
import re

import jax

from dsv41_jax.cache import CacheGeometry, init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.precision import RELEASED
from dsv41_jax.safetensors_io import tensor_bytes
from dsv41_jax.tensors import E8, I8, released_tensors

# device memory in bytes, as the devices report it (tests/targets/*.textproto)
DEVICES = {"h200": 151_397_597_184, "b200": 191_000_000_000, "b300": 297_021_865_984}

# kind -> pattern of released tensor names, first match wins
_KINDS = (
    ("draft stages", r"^mtp\."),
    ("engram tables", r"\.engram\.embed\."),
    ("engram gates", r"\.engram\."),
    ("routed experts", r"\.ffn\.experts\."),
    ("shared experts", r"\.ffn\.shared_experts\."),
    ("routers", r"\.ffn\.gate\."),
    ("indexers", r"\.attn\.indexer\."),
    ("compressors", r"\.attn\.compressor\."),
    ("attention", r"\.attn\."),
    ("hyper-connections", r"\.hc_"),
    ("embedding and head", r"^(embed|head)\."),
    ("norms", r"norm\."),
)
BACKBONE = tuple(kind for kind, _ in _KINDS if kind not in ("draft stages", "engram tables"))


def parameter_kinds(c: ModelConfig) -> dict[str, dict[str, int]]:
    """{kind: {"parameters", "bytes"}} of the whole checkpoint. Scales are bytes, not parameters; a packed FP4 byte is two
    parameters."""
    out = {kind: {"parameters": 0, "bytes": 0} for kind, _ in _KINDS}
    for source in released_tensors(c).values():
        for t in source.tensors():
            row = out[next(kind for kind, pattern in _KINDS if re.search(pattern, t.name))]
            row["bytes"] += tensor_bytes(t.dtype, t.shape)
            row["parameters"] += 0 if t.dtype == E8 else math.prod(t.shape) * (2 if t.dtype == I8 else 1)
    return {kind: row for kind, row in out.items() if row["bytes"]}


def _bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def rank_weights(c: ModelConfig, ranks: int, engram: str = "device") -> dict[str, int]:
    """Bytes of one rank's parameters: routed experts, engram tables (none with engram="host"), and what every rank holds.
    Raises ValueError if `ranks` does not divide the experts."""
    out = {"routed experts": 0, "engram tables": 0, "replicated": 0}
    for path, leaf in flat_paths(Transformer(c, ranks, engram)).items():
        kind = "routed experts" if ".ffn.experts." in path else "engram tables" if ".engram.table" in path else "replicated"
        out[kind] += _bytes(leaf)
    return out


def cache_bytes(c: ModelConfig, *, batch: int, context: int, page_tokens: int = 128) -> dict[str, float]:
    """Bytes of the decode state in precision `released`: per context token (paged pools), per request (rings, pending
    rows, registers), and all of it for `batch` requests of `context` tokens on one rank."""
    geometry = CacheGeometry(slots=batch, pages=1 + batch * -(-context // page_tokens), page_tokens=page_tokens)
    state = jax.eval_shape(lambda: init_state(c, geometry, RELEASED))
    paged = _bytes((state.global_kv, state.index))
    total = _bytes(state)
    return {
        "per_context_token": paged / (geometry.pages * page_tokens),
        "per_request": (total - paged) / batch,
        "window_rings_per_request": _bytes((state.window, state.draft_window)) / batch,
        "pending_rows_per_request": _bytes(state.pending) / batch,
        "paged": paged,
        "total": total,
    }


def working_bytes(c: ModelConfig, *, batch: int, context: int) -> dict[str, int]:
    """The largest arrays that a verify step of `batch` requests holds beside its inputs, one copy each; a lower bound of
    what XLA reserves."""
    rows = batch * (c.dspark_block_size + 1 if c.has_draft else 1)
    return {
        "target logits": rows * c.vocab_size * 4,
        "draft logits": batch * c.dspark_block_size * c.vocab_size * 4 if c.has_draft else 0,
        "index scores": rows * context * 4,
        "residual streams": 2 * rows * c.hc_mult * c.hidden_size * 2,
    }


def report(c: ModelConfig, *, batch: int, context: int, ranks: int, options: DecodeOptions | None = None,
           engram: str = "device") -> dict:  # fmt: skip
    """Everything `dsv41 inspect` shows, as plain data. engram: where its tables are, "device" or "host". Raises ValueError
    for a context beyond the model's, ranks that do not divide the experts, or another place."""
    if context > c.max_position_embeddings:
        raise ValueError(f"context: expected at most {c.max_position_embeddings} tokens, got {context}")
    kinds = parameter_kinds(c)
    weights = rank_weights(c, ranks, engram)
    cache = cache_bytes(c, batch=batch, context=context)
    working = working_bytes(c, batch=batch, context=context)
    total = sum(weights.values()) + cache["total"] + sum(working.values())
    return {
        "config": {f.name: getattr(c, f.name) for f in dataclasses.fields(c)},
        "schedule": [dataclasses.asdict(s) for s in (*c.layers, *c.draft_layers)],
        "parameters": {
            "by_kind": kinds,
            "backbone": sum(kinds[k]["parameters"] for k in BACKBONE if k in kinds),
            "engram": kinds.get("engram tables", {"parameters": 0})["parameters"],
            "draft": kinds.get("draft stages", {"parameters": 0})["parameters"],
            "bytes": sum(row["bytes"] for row in kinds.values()),
        },
        "workload": {"batch_per_rank": batch, "context": context, "ranks": ranks},
        "rank_weights": weights,
        "cache": cache,
        "working": working,
        "gpu_total": total,
        "host": {"engram tables": kinds["engram tables"]["bytes"]} if engram == "host" and c.engram_layer_ids else {},
        "devices": {
            name: {"bytes": size, "fits": total <= size, "free": size - total, "used": total / size}
            for name, size in DEVICES.items()
        },
        "options": option_rows(c, options or DecodeOptions(), batch=batch, context=context, ranks=ranks),
    }


def option_rows(c: ModelConfig, options: DecodeOptions, *, batch: int, context: int, ranks: int) -> list[dict]:
    """[{"option", "value", "why"}]: switches, then the implementation each operator gets here and why no faster one."""
    rows = [{"option": f.name, "value": str(getattr(options, f.name)), "why": ""} for f in dataclasses.fields(options)]
    from dsv41_jax.explain import explain_operators

    for operator, reasons in explain_operators(c, options, batch=batch, context=context, ranks=ranks).items():
        passed_over = "; ".join(f"{name}: {why}" for name, why in reasons.items() if name != "chosen")
        rows.append({"option": operator, "value": reasons["chosen"], "why": passed_over})
    return rows
