"""The sparse plan in plain jnp: the definition (spec/decode.md section 3, "Plan contents")."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..ordering import compact


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["row_ks", "row_ke", "sparse_indices", "end"],
    meta_fields=["key_count", "block_size"],
)
@dataclasses.dataclass(frozen=True)
class SparsePlan:
    """Which keys the four REINDEX layers score, built once per step and shared by them.

    Column c of a candidate-only score row stands for position sparse_indices[c // 8] * 8 + c % 8, for c < end.
    """

    row_ks: jax.Array  # i32[T], zeros: first key of the row, request-local
    row_ke: jax.Array  # i32[T], causal visible length clamp(visible, 0, key_count)
    sparse_indices: jax.Array  # i32[T, K], valid block ids ascending and unique, then the last valid id (0 if none)
    end: jax.Array  # i32[T], compact scan length; 0 for an invalid request or a row without candidates
    key_count: int
    block_size: int


def finish(ids, count, row_ke, valid, key_count: int, block_size: int) -> SparsePlan:
    """ids i32[T, K], valid ascending prefix of length count i32[T] -> the plan. Invalid requests keep no blocks."""
    n = count if valid is None else jnp.where(valid, count, 0)
    last = jnp.take_along_axis(ids, jnp.maximum(n - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(n > 0, last, 0)
    tail = jnp.clip(row_ke - last * block_size, 0, block_size)
    end = jnp.where(n > 0, (n - 1) * block_size + tail, 0)
    indices = jnp.where(jnp.arange(ids.shape[1]) < n[:, None], ids, last[:, None])
    return SparsePlan(jnp.zeros_like(row_ke), row_ke, indices, end, key_count, block_size)


def sparse_plan(candidates, visible, *, key_count, k, kind, count=None, valid=None, block_size=8) -> SparsePlan:
    """The operator; see `api.sparse_plan` for the contract."""
    row_ke = jnp.clip(visible, 0, key_count)
    limit = -(-row_ke // block_size)
    if kind == "prefix":  # already ascending and unique: what is valid is a shorter prefix
        ids = candidates.astype(jnp.int32)
        inside = (jnp.arange(ids.shape[1]) < count[:, None]) & (ids >= 0) & (ids < limit[:, None])
        return finish(ids, jnp.sum(inside, -1, dtype=jnp.int32), row_ke, valid, key_count, block_size)
    blocks = -(-key_count // block_size)
    if kind == "flags":
        kept = candidates != 0
    else:
        ids = candidates.astype(jnp.int32)
        target = jnp.where((ids >= 0) & (ids < limit[:, None]), ids, blocks)
        row = jnp.arange(ids.shape[0])[:, None]
        kept = jnp.zeros((ids.shape[0], blocks), bool).at[row, target].set(True, mode="drop")
    kept = kept & (jnp.arange(kept.shape[1]) < limit[:, None])
    ids, n = compact(kept, k)
    return finish(ids, n, row_ke, valid, key_count, block_size)
