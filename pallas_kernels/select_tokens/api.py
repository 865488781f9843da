"""select_tokens: the exact k best-scored tokens of every row."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import radix_select, radix_wide, reference
from .reference import SlotMap

IMPLEMENTATIONS = (
    Implementation("radix_select", radix_select.select_tokens, radix_select.ARCHES, radix_select.refuses),
    Implementation("radix_wide", radix_wide.select_tokens, radix_wide.ARCHES, radix_wide.refuses),
    Implementation("reference", reference.select_tokens),
)


def _validate(logits, end, k, block_ids, causal, block_size, slot_map):
    if logits.ndim != 2 or logits.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"select_tokens: expected logits bf16 or f32 [T, width], got {logits.dtype} {logits.shape}"
        )
    rows, width = logits.shape
    if end.shape != (rows,) or end.dtype != jnp.int32:
        raise ValueError(f"select_tokens: expected end i32[{rows}], got {end.dtype} {end.shape}")
    if k < 1 or width < 1:
        raise ValueError(f"select_tokens: expected k >= 1 and width >= 1, got k = {k}, width = {width}")
    if (block_ids is None) != (causal is None):
        raise ValueError("select_tokens: expected block_ids and causal together (sparse rows) or neither (dense rows)")
    if block_ids is not None:
        if block_ids.ndim != 2 or block_ids.shape[0] != rows or block_ids.dtype != jnp.int32:
            raise ValueError(
                f"select_tokens: expected block_ids i32[{rows}, K], got {block_ids.dtype} {block_ids.shape}"
            )
        if block_ids.shape[1] * block_size < width:
            raise ValueError(
                f"select_tokens: expected block_ids for all {width} columns, got {block_ids.shape[1]} of {block_size}"
            )
        if causal.shape != (rows,) or causal.dtype != jnp.int32:
            raise ValueError(f"select_tokens: expected causal i32[{rows}], got {causal.dtype} {causal.shape}")
    bad_map = slot_map is not None and (
        slot_map.table.ndim != 2 or slot_map.request.shape != (rows,) or slot_map.entries < 1
    )
    if bad_map:
        raise ValueError(
            f"select_tokens: expected slot_map with table i32[B, P], request i32[{rows}], entries >= 1, got "
            f"{slot_map.table.shape}, {slot_map.request.shape}, {slot_map.entries}"
        )


def select_tokens(
    logits,  # bf16[T, width] or f32[T, width]
    end,  # i32[T], columns that may be selected: [0, clamp(end, 0, width))
    *,
    k: int,
    block_ids=None,  # i32[T, K], sparse rows: block of columns [8j, 8j + 8), ascending prefix (sparse_plan's)
    causal=None,  # i32[T], sparse rows: visible length in logical positions
    block_size: int = 8,
    slot_map: SlotMap | None = None,
    impl: str = "auto",
    arch: str | None = None,
):
    """The exact k largest of every row's columns [0, end), as logical positions.

    Dense rows (no block_ids): a column is its own logical position. Sparse rows: column c stands for
    block_ids[c // 8] * 8 + c % 8, and a selected column whose position is negative or not below `causal` gives none.
    A row with end <= k takes its columns 0..end-1 and its scores are not read. A longer row with a NaN in its range
    selects nothing; a selected infinity gives none; NaNs and anything else at or beyond `end` are never seen. Order and
    ties: by the remapped bits (-0 below +0), lowest column first.
    Returns i32[T, k]: the positions in column order, which is ascending when block_ids ascends, then -1. With
    `slot_map`, a pair: that and i32[T, k] physical slots (page * entries + position % entries, -1 where there is none).
    Raises ValueError for shapes that do not fit together. Source: spec/decode.md sections 2 (A5, A8) and 3.
    """
    _validate(logits, end, k, block_ids, causal, block_size, slot_map)
    kwargs = {"k": k, "block_ids": block_ids, "causal": causal, "block_size": block_size, "slot_map": slot_map}
    chosen, _ = resolve("select_tokens", IMPLEMENTATIONS, impl, arch, logits, end, **kwargs)
    return chosen.run(logits, end, **kwargs)


def explain(
    logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None, impl="auto", arch=None
) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(logits, end, k, block_ids, causal, block_size, slot_map)
    kwargs = {"k": k, "block_ids": block_ids, "causal": causal, "block_size": block_size, "slot_map": slot_map}
    chosen, against = resolve("select_tokens", IMPLEMENTATIONS, impl, arch, logits, end, **kwargs)
    return {**against, "chosen": chosen.name}
