"""The counting sort of the T*K slots in plain jnp: the definition."""

import dataclasses

import jax
import jax.numpy as jnp

from ..codecs import cdiv, round_up

ALIGN = 4  # an expert's first sorted row: the TMA wants 16-byte aligned addresses, also of f32 scales along rows
_PAIRWISE = 4096  # up to here ranks come from all pairs of slots (one fusion); above it from a sort


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Sorted rows: local slots by expert, then by slot; an expert's rows start at a multiple of ALIGN.

    position,  # i32[T, K] sorted row of each slot, ascending along K (= ascending expert id within a token); a slot of
               # another rank's expert has `count`
    count,     # i32[] sorted rows of local slots, gaps included
    token,     # i32[R] token of each sorted row (0 in gaps and from `count` on), R >= count + rows of a tile
    weight,    # f32[R] its routing weight (0 in gaps and from `count` on)
    tiles,     # i32[4, M]: expert, first row, rows of each tile (0 past the last one); tiles[3, :] = number of tiles
    """

    position: jax.Array
    count: jax.Array
    token: jax.Array
    weight: jax.Array
    tiles: jax.Array


def beyond(ids, weights, local: int, *, experts: int, slots: int) -> str | None:
    """Why a kernel for at most so many local experts and slots does not take these arguments, or None."""
    if ids.dtype != jnp.int32 or weights.dtype != jnp.float32:
        return f"ids are {ids.dtype} and weights {weights.dtype}, the kernel is for int32 and float32"
    if local > experts:
        return f"{local} local experts, the kernel is for at most {experts}"
    if ids.size > slots:
        return f"{ids.size} slots, the kernel is for at most {slots}"
    return None


def max_tiles(slots: int, local: int, tile_rows: int) -> int:
    """Most tiles of `tile_rows` rows that `slots` rows on `local` experts can need."""
    return min(slots, local + slots // tile_rows)


def sorted_size(slots: int, local: int, tile_rows: int) -> int:
    """R: rows of the sorted arrays, with every gap and a whole tile behind the last row."""
    return round_up(slots + (ALIGN - 1) * min(local, slots), 8) + tile_rows


def _ranks(key):
    """i32[N] -> i32[N]: place of each element in a stable ascending sort."""
    n = key.shape[0]
    if n <= _PAIRWISE:
        i = jnp.arange(n, dtype=jnp.int32)
        before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (i[None, :] < i[:, None]))
        return jnp.sum(before, axis=1, dtype=jnp.int32)
    order = jnp.argsort(key, stable=True)
    return jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)


def expert_plan(ids, weights, first_expert, *, local: int, tile_rows: int) -> Plan:
    """See `api.expert_plan`."""
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
    tiles = cdiv(counts, tile_rows)
    tile_start = jnp.sum(lower[:local] * tiles[None, :], axis=1)
    i = jnp.arange(max_tiles(t * k, local, tile_rows), dtype=jnp.int32)
    expert = jnp.sum(tile_start[None, :] + tiles[None, :] <= i[:, None], axis=1, dtype=jnp.int32)
    used, expert = expert < local, jnp.minimum(expert, local - 1)
    first = start[expert] + (i - tile_start[expert]) * tile_rows
    size = jnp.minimum(start[expert] + counts[expert] - first, tile_rows)
    total = jnp.broadcast_to(jnp.sum(tiles), i.shape)
    size_of_sorted = sorted_size(t * k, local, tile_rows)
    # foreign slots stay distinct there too: a scatter of unique places is one pass
    place = jnp.where(key < local, position, size_of_sorted + jnp.arange(t * k, dtype=jnp.int32))
    scattered = lambda values: jnp.zeros(size_of_sorted, values.dtype).at[place].set(values, unique_indices=True, mode="drop")
    return Plan(
        position=jnp.sort(jnp.where(key < local, position, start[local]).reshape(t, k), axis=1),
        count=start[local],
        token=scattered(jnp.arange(t * k, dtype=jnp.int32) // k),
        weight=scattered(weights.reshape(-1)),
        tiles=jnp.concatenate([jnp.where(used, jnp.stack([expert, first, size]), 0), total[None]]),
    )
