"""The plan in one launch, Pallas on Triton: a program per expert, none waits for another.

Every program counts the slots of all experts (9 KB of ids in a verify step: cheaper than a barrier across the device),
four experts in a 32-bit word, hence finds its own first row, ranks its slots by a prefix sum and scatters them. What no
expert owns (rows past the last one, foreign slots, unused tiles) is cut in equal slices. As XLA fusions and sorts the
same is about ten launches.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .reference import ALIGN, Plan, beyond, max_tiles, sorted_size

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_EXPERTS = 512
WARPS = 8
TOGETHER = 8  # loads in flight while counting
PLACED = 1024  # slots ranked at a time
TILES = 32  # of one expert, written at a time


def _power(n: int) -> int:
    """The smallest power of two >= n: Triton's arrays are powers of two."""
    return 1 << (n - 1).bit_length()


def _lanes(local: int) -> int:
    """Slots compared at a time: below a program's threads Triton loads them where they are needed, without an exchange
    through shared memory; fewer for many experts, whose counts stay in registers."""
    return 128 if local <= 256 else 64


def refuses(ids, weights, first_expert, *, local, tile_rows):
    """Why the kernel does not take these arguments, or None."""
    del first_expert, tile_rows
    return beyond(ids, weights, local, experts=MOST_EXPERTS, slots=255 * _lanes(local))  # it counts to 255 in a lane


def _counts(key, slots: int, local: int):
    """Four times (experts i32[B], their slots i32[B]); key(i32[lanes]) gives the local experts of these slots, or -1."""
    lanes, buckets = _lanes(local), _power((local + 3) // 4)
    together = min(TOGETHER, pl.cdiv(slots, lanes))
    lane = jax.lax.broadcasted_iota(jnp.int32, (lanes,), 0)
    bucket = jax.lax.broadcasted_iota(jnp.int32, (buckets, lanes), 0)

    def count(i, packed):
        keys = [key((i * together + j) * lanes + lane) for j in range(together)]
        for e in keys:
            packed += jnp.where((e >> 2)[None, :] == bucket, (jnp.int32(1) << ((e & 3) << 3))[None, :], 0)
        return packed

    packed = jax.lax.fori_loop(0, pl.cdiv(slots, lanes * together), count, jnp.zeros((buckets, lanes), jnp.int32))
    first = jax.lax.broadcasted_iota(jnp.int32, (buckets,), 0) << 2
    return [(first + j, jnp.sum((packed >> (8 * j)) & 255, axis=1)) for j in range(4)]


def _body(ids, weights, first, position, token, weight, tiles, count, *, k: int, local: int, tile_rows: int):
    """ids i32[T * K], weights f32[T * K], first i32[1]; position i32[T, K], token i32[R], weight f32[R], tiles i32[4, M],
    count i32[1]. The grid is the local experts."""
    from jax.experimental.pallas import triton as plt

    expert, slots, size = pl.program_id(0), ids.shape[0], token.shape[0]
    iota = lambda n: jax.lax.broadcasted_iota(jnp.int32, (n,), 0)
    first_expert = first[0]

    def key(at, wanted=True):
        there = (at < slots) & wanted
        e = plt.load(ids.at[at], mask=there, other=0) - first_expert
        return jnp.where(there & (e >= 0) & (e < local), e, -1)

    counts = _counts(key, slots, local)
    total = lambda part: jnp.sum(functools.reduce(jnp.add, [part(e, n) for e, n in counts]))
    aligned, in_tiles = (lambda n: (n + (ALIGN - 1)) & -ALIGN), (lambda n: jax.lax.div(n + (tile_rows - 1), tile_rows))
    here = total(lambda e, n: jnp.where(e == expert, n, 0))
    start = total(lambda e, n: jnp.where(e < expert, aligned(n), 0))
    end = total(lambda e, n: aligned(n))
    first_tile = total(lambda e, n: jnp.where(e < expert, in_tiles(n), 0))
    all_tiles = total(lambda e, n: in_tiles(n))
    placed = min(PLACED, _power(slots))

    def place(i, seen):
        at = i * placed + iota(placed)
        own = key(at) == expert
        before = jnp.cumsum(own.astype(jnp.int32))
        row = start + seen + before - 1
        _store(token, (), row, jax.lax.div(at, k), own)
        _store(weight, (), row, plt.load(weights.at[at], mask=own, other=0.0), own)
        column, first_slot = jnp.zeros(placed, jnp.int32), at - jax.lax.rem(at, k)
        for j in range(k):
            other = key(first_slot + j, own)
            column += ((other >= 0) & ((other < expert) | ((other == expert) & (first_slot + j < at)))).astype(jnp.int32)
        _store(position, (jax.lax.div(at, k),), column, row, own)
        return seen + jnp.sum(own.astype(jnp.int32))

    jax.lax.fori_loop(0, pl.cdiv(slots, placed), place, jnp.int32(0))
    gap = start + here + iota(ALIGN)
    _clear(token, weight, gap, gap < start + aligned(here))
    _write_tiles(tiles, expert, start, here, first_tile, in_tiles(here), tile_rows)

    def share(size):
        """This program's slice of an axis."""
        part = _power(pl.cdiv(size, local))
        at = expert * part + iota(part)
        return at, at < size

    rows, inside = share(size)
    _clear(token, weight, rows, inside & (rows >= end))
    tokens, inside = share(slots // k)
    found = [key(tokens * k + j, inside) for j in range(k)]
    owned = functools.reduce(jnp.add, [(e >= 0).astype(jnp.int32) for e in found])
    for j in range(k):
        _store(position, (), tokens, end, inside & (j >= owned), j)
    columns, inside = share(tiles.shape[1])
    _store(tiles, (3,), columns, all_tiles, inside)
    for field in range(3):
        _store(tiles, (field,), columns, 0, inside & (columns >= all_tiles))

    @pl.when(expert == 0)
    def _():
        count[0] = end


def _clear(token, weight, rows, mask):
    """Token 0 and weight 0 in `rows`."""
    _store(token, (), rows, 0, mask)
    _store(weight, (), rows, 0.0, mask)


def _store(ref, before: tuple, at, value, mask, *after):
    """value to ref[*before, at, *after] where mask. Interpreted, a masked lane writes the old value back: out of bounds,
    so that it cannot undo another lane's store."""
    from jax.experimental.pallas import triton as plt

    value = jnp.broadcast_to(jnp.asarray(value, ref.dtype), at.shape)
    plt.store(ref.at[(*before, jnp.where(mask, at, ref.shape[len(before)]), *after)], value, mask=mask)


def _write_tiles(tiles, expert, start, here, first_tile, own_tiles, tile_rows: int):
    """The tiles of one expert's `here` rows."""
    def write(i, _):
        tile = i * TILES + jax.lax.broadcasted_iota(jnp.int32, (TILES,), 0)
        done = tile * tile_rows
        for field, value in enumerate((expert, start + done, jnp.minimum(here - done, tile_rows))):
            _store(tiles, (field,), first_tile + tile, value, tile < own_tiles)

    jax.lax.fori_loop(0, jax.lax.div(own_tiles + (TILES - 1), TILES), write, None)


@functools.partial(jax.jit, static_argnames=("local", "tile_rows", "interpret"))  # lowered once for all layers
def expert_plan(ids, weights, first_expert, *, local: int, tile_rows: int, interpret: bool = False) -> Plan:
    """See `api.expert_plan`; every element equals the reference's."""
    from jax.experimental.pallas import triton as plt

    t, k = ids.shape
    slots = t * k
    size, most = sorted_size(slots, local, tile_rows), max_tiles(slots, local, tile_rows)
    shape = lambda *dims, dtype=jnp.int32: jax.ShapeDtypeStruct(dims, dtype)
    position, token, weight, tiles, count = pl.pallas_call(
        functools.partial(_body, k=k, local=local, tile_rows=tile_rows),
        out_shape=(shape(t, k), shape(size), shape(size, dtype=jnp.float32), shape(4, most), shape(1)),
        grid=(local,),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        name="expert_plan",
    )(ids.reshape(-1), weights.reshape(-1), jnp.asarray(first_expert, jnp.int32).reshape(1))
    return Plan(position, count.reshape(()), token, weight, tiles)
