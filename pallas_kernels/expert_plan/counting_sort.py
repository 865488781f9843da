"""The plan in one launch, a counting sort in shared memory by blocks of threads that never wait for each other.

Every block counts the slots of all local experts with shared atomics: at a verify step's sizes that is shorter than a
second launch. It owns one expert, or a few neighbours where there are more experts than multiprocessors. A warp owns a
run of slots and gathers, by a ballot each, which belong to such an expert: lane i holds the bits of the i-th 32 slots,
so that ranks come from one prefix sum and only the set bits are walked. The ends that no slot reaches (rows behind the
last one, foreign slots, unused tiles) are cut in equal slices, the last threads first: the first ones have more slots.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .. import simt
from ..codecs import cdiv, round_up
from .reference import ALIGN, Plan, beyond, max_tiles, sorted_size

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_EXPERTS, MOST_SLOTS = 512, 32 * 32 * 32  # a bit for each slot in the lanes of 32 warps
THREADS, MOST_THREADS = 512, 1024
_SMS = 132


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static facts the kernel is specialised for."""

    slots: int
    k: int
    local: int
    tile_rows: int
    threads: int

    @property
    def own(self) -> int:
        """Experts of a block."""
        return cdiv(self.local, _SMS)

    @property
    def blocks(self) -> int:
        return cdiv(self.local, self.own)

    @property
    def chunks(self) -> int:
        """Runs of 32 slots of a warp."""
        return cdiv(self.slots, self.threads)

    @property
    def counted(self) -> int:
        return round_up(self.own * self.blocks, 32)

    @property
    def shared_words(self) -> int:
        return self.counted + 1 + self.own * (self.threads // 32)

    @property
    def rows(self) -> int:
        return sorted_size(self.slots, self.local, self.tile_rows)

    @property
    def tiles(self) -> int:
        return max_tiles(self.slots, self.local, self.tile_rows)

    def aligned(self, n):
        return (n + (ALIGN - 1)) & -ALIGN

    def in_tiles(self, n):
        return (n + (self.tile_rows - 1)) // self.tile_rows


def refuses(ids, weights, first_expert, *, local, tile_rows):
    """Why the kernel does not take these arguments, or None."""
    del first_expert, tile_rows
    return beyond(ids, weights, local, experts=MOST_EXPERTS, slots=MOST_SLOTS)


def kernel(shape: Shape, m, ids, weights, first, position, token, weight, tiles, count):
    """ids i32[T * K], weights f32[T * K], first i32[1]; position i32[T, K], token i32[R], weight f32[R], tiles i32[4, M],
    count i32[1]; a row of the grid is a block's experts."""
    bins = shape.counted + 1  # foreign slots have one too, for no thread to branch around its atomic
    counts, totals = m.shared(bins), m.shared(shape.own * m.warps)
    begin, mine = m.warp * (32 * shape.chunks), m.row * shape.own
    at = [begin + m.lane + 32 * i for i in range(shape.chunks)]
    loaded = [m.load(ids, slot, where=slot < shape.slots) for slot in at]
    first_expert = m.load(first, m.word(0))
    for i in range(cdiv(bins, m.threads)):
        m.put(counts, m.tid + i * m.threads, 0, where=m.tid + i * m.threads < bins)
    m.barrier()
    bits = [m.word(0)] * shape.own
    for i, (slot, expert) in enumerate(zip(at, loaded, strict=True)):
        key = expert - first_expert
        key = ((slot < shape.slots) & key.below(m.word(shape.local))).pick(key, shape.counted)
        m.add(counts, key, 1)
        for j in range(shape.own):
            bits[j] = m.lane.equals(i).pick(m.ballot(key.equals(mine + j)), bits[j])
    upto = [m.scan_warp(b.ones()) for b in bits]
    for j in range(shape.own):
        m.put(totals, m.warp + j * m.warps, upto[j], where=m.lane.equals(simt.FULL_WARP - 1))
    begin = begin + m.lane * 32  # of this lane's bits
    soon = [m.load(weights, begin + b.lowest_bit(), where=b.differs(0)) for b in bits]  # arrives while the others count
    m.barrier()
    before, everything = _sums(shape, m, counts, mine)
    row, tile = before & 0xFFFF, before >> 16
    end, all_tiles = everything & 0xFFFF, everything >> 16
    for j in range(shape.own):
        expert, here = mine + j, m.get(counts, mine + j)
        earlier = m.lane < m.warp
        of_warps = m.sum_warp(earlier.pick(m.get(totals, earlier.pick(m.lane, 0) + j * m.warps), 0))
        seen = of_warps + upto[j] - bits[j].ones()
        foremost = bits[j].lowest_bit()

        def place(bit, rank, expert=expert, foremost=foremost, value=soon[j]):
            slot, again = begin + bit, bit.differs(foremost)
            of_token = slot // shape.k
            value = again.pick(m.load(weights, slot, where=again), value)
            column = _column(shape, m, ids, slot, of_token, first_expert, expert)
            m.store(token, rank, of_token)
            m.store(weight, rank, value)
            m.store(position, of_token * shape.k + column, rank)
            return rank + 1

        m.each_bit(bits[j], row + seen, place)
        _finish(shape, m, token, weight, tiles, expert, here, row, tile)
        row, tile = row + shape.aligned(here), tile + shape.in_tiles(here)
    _slices(shape, m, ids, first_expert, position, token, weight, tiles, end, all_tiles)
    m.store(count, m.word(0), end, where=(m.row + m.tid).equals(0))


def _sums(shape: Shape, m, counts, mine):
    """Aligned rows + (tiles << 16) of the experts before `mine`, and of all."""
    before = everything = m.word(0)
    for i in range(shape.counted // 32):
        expert = m.lane + 32 * i
        n = m.get(counts, expert)
        both = shape.aligned(n) | (shape.in_tiles(n) << 16)
        before, everything = before + (expert < mine).pick(both, 0), everything + both
    return m.sum_warp(before), m.sum_warp(everything)


def _keys(shape: Shape, m, ids, of_token, first_expert):
    """The local experts of a token, anything else for foreign ones."""
    wide = next(w for w in (4, 2, 1) if shape.k % w == 0)
    loads = [m.load_many(ids, of_token * shape.k, wide, offset=j) for j in range(0, shape.k, wide)]
    return [e - first_expert for load in loads for e in load]


def _column(shape: Shape, m, ids, slot, of_token, first_expert, expert):
    """How many of the token's slots have a lower row."""
    place, column = slot - of_token * shape.k, m.word(0)
    for j, other in enumerate(_keys(shape, m, ids, of_token, first_expert)):
        # `expert` is local, so what is below it is too
        column = column + (other.below(expert) | (other.equals(expert) & (place > j))).pick(1, 0)
    return column


def _finish(shape: Shape, m, token, weight, tiles, expert, here, row, tile):
    """The gap behind an expert's `here` rows from `row` on, and its tiles from `tile` on."""
    back = (m.threads - 1) - m.tid
    gap = row + here + back
    _clear(m, token, weight, gap, gap < row + shape.aligned(here))

    def write(i):
        n = back + i * m.threads
        done = n * shape.tile_rows
        with m.when(n < shape.in_tiles(here)):
            for field, value in enumerate((expert, row + done, (here - done).minimum(shape.tile_rows))):
                m.store(tiles, tile + n + field * shape.tiles, value)

    m.loop((shape.in_tiles(here) + (m.threads - 1)) // m.threads, write)


def _clear(m, token, weight, row, where):
    with m.when(where):
        m.store(token, row, m.word(0))
        m.store(weight, row, m.word(0))


def _slices(shape: Shape, m, ids, first_expert, position, token, weight, tiles, end, all_tiles):
    """This block's part of what no expert owns."""

    def share(size, body):
        part, back = cdiv(size, shape.blocks), (m.threads - 1) - m.tid

        def step(i):
            n = back + i * m.threads
            at = m.row * part + n
            with m.when((n < part) & (at < size)):
                body(at)

        m.loop(m.word(cdiv(part, m.threads)), step)

    def foreign(of_token):
        owned = m.word(0)
        for key in _keys(shape, m, ids, of_token, first_expert):
            owned = owned + key.below(m.word(shape.local)).pick(1, 0)
        for j in range(shape.k):
            m.store(position, of_token * shape.k + j, end, where=owned <= j)

    def unused(column):
        m.store(tiles, column + 3 * shape.tiles, all_tiles)
        with m.when(column >= all_tiles):
            for field in range(3):
                m.store(tiles, column + field * shape.tiles, m.word(0))

    share(shape.slots // shape.k, foreign)
    share(shape.tiles, unused)
    share(shape.rows, lambda row: _clear(m, token, weight, row, row >= end))


def prepare(ids, weights, first_expert, *, local: int, tile_rows: int):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    (t, k), slots = ids.shape, ids.size
    threads = THREADS if slots <= THREADS * simt.FULL_WARP else MOST_THREADS
    shape = Shape(slots, k, local, tile_rows, threads)
    inputs = [ids, weights, jnp.asarray(first_expert, jnp.int32).reshape(1)]
    outputs = [((t, k), "int32"), ((shape.rows,), "int32"), ((shape.rows,), "float32"), ((4, shape.tiles), "int32"),
               ((1,), "int32")]  # fmt: skip
    launch = {"rows": shape.blocks, "threads": threads, "shared_words": shape.shared_words}
    return (lambda m, *refs: kernel(shape, m, *refs)), inputs, outputs, launch


def _plan(position, token, weight, tiles, count) -> Plan:
    return Plan(position, count.reshape(()), token, weight, tiles)


def emulated(ids, weights, first_expert, **static) -> Plan:
    """The kernel in numpy, thread by thread (tests)."""
    body, inputs, outputs, launch = prepare(ids, weights, first_expert, **static)
    return _plan(*simt.emulate(body, inputs, outputs, **launch))


@functools.partial(jax.jit, static_argnames=("local", "tile_rows"))  # lowered once for all layers
def expert_plan(ids, weights, first_expert, *, local: int, tile_rows: int) -> Plan:
    """See `api.expert_plan`; every element equals the reference's."""
    from .. import simt_mosaic

    body, inputs, outputs, launch = prepare(ids, weights, first_expert, local=local, tile_rows=tile_rows)
    return _plan(*simt_mosaic.launch(body, inputs, outputs, name="expert_plan", **launch))
