"""Exact top-k token selection in plain jnp: the definition (spec/decode.md section 2 A5, A8 and section 3)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..ordering import KEY_MIN, compact, is_infinite, is_nan, largest, order_keys


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table", "request"], meta_fields=["entries"])
@dataclasses.dataclass(frozen=True)
class SlotMap:
    """Where a logical compressed position lives: page table[request, index // entries], entry index % entries."""

    table: jax.Array  # i32[B, P], page ids, <= 0 = unallocated
    request: jax.Array  # i32[T], row of the table; outside [0, B) = no slots
    entries: int  # entries per page


def logical_positions(column, block_ids, causal, block_size: int):
    """Compact candidate columns -> logical positions.

    column i32[T, k], -1 = none; block_ids i32[T, K], -1 = none; causal i32[T]. -1 where there is no such block or the
    position is not below `causal`.
    """
    last = block_ids.shape[1] - 1
    block = jnp.take_along_axis(block_ids, jnp.clip(column // block_size, 0, last), axis=1)
    position = block * block_size + column % block_size
    return jnp.where((column >= 0) & (block >= 0) & (position < causal[:, None]), position, -1)


def physical_slots(index, slot_map: SlotMap):
    """i32[T, k] logical positions, -1 = none -> i32[T, k] pool slots, -1 = none, unallocated or outside the table."""
    table, request, entries = slot_map.table, slot_map.request, slot_map.entries
    page, known = index // entries, (request >= 0) & (request < table.shape[0])
    inside = (index >= 0) & (page < table.shape[1]) & known[:, None]
    row = jnp.clip(request, 0, table.shape[0] - 1)[:, None]
    page_id = table[row, jnp.clip(page, 0, table.shape[1] - 1)]
    return jnp.where(inside & (page_id > 0), page_id * entries + index % entries, -1)


def select_tokens(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None):
    """The operator; see `api.select_tokens` for the contract."""
    width = logits.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)
    scan = jnp.clip(end, 0, width)[:, None]
    live = column < scan
    kept = live & (column < k)  # short rows: a prefix, whatever the scores are
    if width > k:
        chosen = largest(jnp.where(live, order_keys(logits), KEY_MIN), k) & live & ~is_infinite(logits)
        poisoned = jnp.any(is_nan(logits) & live, -1, keepdims=True)
        kept = jnp.where(scan <= k, kept, chosen & ~poisoned)
    index, _ = compact(kept, k)
    if block_ids is not None:
        position = logical_positions(index, block_ids, causal, block_size)
        order, _ = compact(position >= 0, k)
        index = jnp.where(order >= 0, jnp.take_along_axis(position, jnp.maximum(order, 0), axis=1), -1)
    if slot_map is None:
        return index
    return index, physical_slots(index, slot_map)
