"""Which rows each expert gets: a counting sort of the T*K slots and the row tiles of a grouped GEMM."""

import dataclasses

import jax
import jax.numpy as jnp

from ..codecs import cdiv, round_up

ALIGN = 4  # an expert's first sorted row: the TMA wants 16-byte aligned addresses, also of f32 scales along rows
_PAIRWISE = 4096  # up to here ranks come from all pairs of slots (one fusion); above it from a sort


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Sorted rows: local slots first, by expert, then by slot; an expert's rows start at a multiple of ALIGN.

    position,  # i32[T, K] sorted row of each slot, ascending along K (= ascending expert id within a token)
    count,     # i32[] sorted rows before the first slot of another rank's expert (gaps included)
    token,     # i32[R] token of each sorted row (0 in gaps), R >= every position + rows of a tile
    weight,    # f32[R] its routing weight (0 in gaps)
    tiles,     # i32[4, M]: expert, first row, rows of each tile; [3, 0] = number of tiles
    """

    position: jax.Array
    count: jax.Array
    token: jax.Array
    weight: jax.Array
    tiles: jax.Array


def _ranks(key):
    """i32[N] -> i32[N]: place of each element in a stable ascending sort."""
    n = key.shape[0]
    if n <= _PAIRWISE:
        i = jnp.arange(n, dtype=jnp.int32)
        before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (i[None, :] < i[:, None]))
        return jnp.sum(before, axis=1, dtype=jnp.int32)
    order = jnp.argsort(key, stable=True)
    return jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)


def max_tiles(slots: int, local: int, rows: int) -> int:
    """Most tiles of `rows` rows that `slots` rows on `local` experts can need."""
    return min(slots, local + slots // rows)


def plan(ids, weights, first_expert, local: int, rows: int) -> Plan:
    """ids i32[T, K], weights f32[T, K]; `rows`: rows of a tile. Slots of other experts are sorted to the end."""
    t, k = ids.shape
    e = (ids - first_expert).reshape(-1)
    key = jnp.where((e >= 0) & (e < local), e, local)
    rank = _ranks(key)
    counts = jnp.sum(key[None, :] == jnp.arange(local, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    # Sums over the triangle instead of a scan: a few hundred experts, one fusion.
    lower = jnp.tri(local + 1, local, k=-1, dtype=jnp.int32)
    before = jnp.sum(lower * counts[None, :], axis=1)
    start = jnp.sum(lower * (cdiv(counts, ALIGN) * ALIGN)[None, :], axis=1)
    position = rank + (start - before)[key]
    tiles = cdiv(counts, rows)
    tile_start = jnp.sum(lower[:local] * tiles[None, :], axis=1)
    m = max_tiles(t * k, local, rows)
    i = jnp.arange(m, dtype=jnp.int32)
    expert = jnp.sum(tile_start[None, :] + tiles[None, :] <= i[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, local - 1)
    first = start[expert] + (i - tile_start[expert]) * rows
    size = jnp.clip(start[expert] + counts[expert] - first, 0, rows)
    total = jnp.broadcast_to(jnp.sum(tiles), (m,))
    padded = round_up(t * k + (ALIGN - 1) * min(local, t * k), 8) + rows
    place = dict(unique_indices=True, mode="promise_in_bounds")
    token = jnp.zeros(padded, jnp.int32).at[position].set(jnp.arange(t * k, dtype=jnp.int32) // k, **place)
    weight = jnp.zeros(padded, jnp.float32).at[position].set(weights.reshape(-1), **place)
    return Plan(
        position=jnp.sort(position.reshape(t, k), axis=1),
        count=start[local],
        token=token,
        weight=weight,
        tiles=jnp.stack([expert, first, size, total]),
    )


def combine(y, plan: Plan):
    """y [R, H] sorted rows' outputs -> f32[T, H]: fp32 sum of each token's local rows in ascending expert id."""
    out = jnp.zeros((plan.position.shape[0], y.shape[1]), jnp.float32)
    for k in range(plan.position.shape[1]):
        p = plan.position[:, k]
        out += jnp.where((p < plan.count)[:, None], y[p].astype(jnp.float32), 0.0)
    return out
