"""The dense scorer on Hopper whose keys are decoded by warps of their own, in Gluon. Imports Triton: import it only where
a GPU kernel is wanted.

What hopper_kernel.dense computes. One program fills a multiprocessor: 4 warps decode tiles of 64 keys into a ring of SLOTS
of them, three groups of 4 score two query rows each. `full` and `free`, an mbarrier for every slot each, hand tiles over;
a group gives a slot back as soon as it has read the tile into registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.index_score.hopper_kernel import (
    expand_keys,
    fill,
    key_layout,
    load_keys,
    operand,
    prepare_queries,
    register_sums,
    start_products,
    tile_layout,
)
from pallas_kernels.index_score.hopper_ring import own_shared, read_factors, read_keys, write_factors, write_keys
from pallas_kernels.index_score.hopper_rows import BLOCK, key_of_row, over_bytes, pair_layout, piece_of
from pallas_kernels.index_score.hopper_stream_kernel import page_at

AHEAD = gl.constexpr(4)  # tiles on their way from memory
GROUPS = gl.constexpr(3)
PER = gl.constexpr(2)  # query rows of a group
ROWS = gl.constexpr(6)
TILE = gl.constexpr(64)
SLOT = gl.constexpr(64 * 128)  # bytes of a tile's keys


def ring_bytes(slots: int) -> int:
    """Shared memory that the kernel addresses itself: keys and factors."""
    return slots * 64 * (128 + 4)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles(visible_ptr, first, B: gl.constexpr, BP: gl.constexpr, S: gl.constexpr, CAPACITY: gl.constexpr):
    """Tiles that ROWS rows from `first` on of every request reach -> (i32[BP] of each request, sums up to each); every warp
    holds them all."""
    request = gl.arange(0, BP, gl.BlockedLayout([BP // 32], [32], [4], [0]))
    longest = request * 0
    for s in gl.static_range(ROWS):
        longest = gl.maximum(longest, gl.load(visible_ptr + request * S + first + s, mask=request < B, other=0))
    tiles = (gl.minimum(longest, CAPACITY) + TILE - 1) // TILE
    return tiles, gl.associative_scan(tiles, 0, _add)


@gluon.jit
def _segment(tiles, until, at):
    """The request whose tiles hold the at-th of all -> (request, its first tile, the first behind it)."""
    behind = until <= at
    b = gl.sum(behind.to(gl.int32), 0)
    base = gl.sum(gl.where(behind, tiles, 0), 0)
    return b, base, base + gl.max(gl.where(behind, 0, gl.where(until - tiles <= at, tiles, 0)), 0)


@gluon.jit
def _decode(
    at, stop, own, pool_ptr, table_ptr, visible_ptr, out_ptr, first, full, free, B: gl.constexpr, BP: gl.constexpr,
    S: gl.constexpr, SLOTS: gl.constexpr, PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """Four warps: decode the tiles from `at` to `stop`, then write the -inf behind every row's tiles."""
    CAPACITY: gl.constexpr = COLUMNS * E
    line_of = gl.arange(0, TILE, key_layout(4))
    key = key_of_row(line_of)
    inside = (line_of // 16 * 2 + line_of // 4 % 2) * (BLOCK * 128)  # of a tile, its block's bytes
    piece = piece_of(line_of, tile_layout(4))
    lane = (line_of % 4).to(gl.uint32)
    tiles, until = _tiles(visible_ptr, first, B, BP, S, CAPACITY)
    b, base, last = _segment(tiles, until, at)
    words, scales, ids, columns = (), (), (), ()
    ask = at  # the tile whose page is asked for next
    for t in gl.static_range(2 * AHEAD):
        if ask == last:
            b, base, last = _segment(tiles, until, ask)
        column = (ask - base) * TILE
        column = gl.where(ask < stop, column, CAPACITY).to(gl.uint32)
        page = page_at(table_ptr + gl.minimum(b, B - 1) * COLUMNS, column, lane, PAGES, E, COLUMNS)
        ids, columns = ids + (page,), columns + (column,)
        ask += 1
    for t in gl.static_range(AHEAD):
        w, s = load_keys(pool_ptr, ids[t], (columns[t] % E).to(gl.int32) + key, ids[t] > 0, E)
        words, scales = words + (w,), scales + (s,)
    ids, columns = ids[AHEAD:], columns[AHEAD:]
    for step in range(0, (stop - at + AHEAD - 1) // AHEAD):
        new_words, new_scales, new_ids, new_columns = (), (), (), ()
        for t in gl.static_range(AHEAD):
            n = step * AHEAD + t
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), (n // SLOTS & 1) ^ 1)
            low, high, factor = expand_keys(words[t], scales[t])
            write_keys(low, high, over_bytes(own + slot * SLOT + inside, tile_layout(4)) + piece)
            factors_at = own + SLOTS * SLOT + slot * (TILE * 4)
            write_factors(factor.to(gl.int32, bitcast=True), factors_at + inside // 32 + line_of % 4 * 8)
            gl.thread_barrier()
            mbarrier.arrive(full.index(slot), count=1)
            w, s = load_keys(pool_ptr, ids[t], (columns[t] % E).to(gl.int32) + key, ids[t] > 0, E)
            new_words, new_scales = new_words + (w,), new_scales + (s,)
            if ask == last:
                b, base, last = _segment(tiles, until, ask)
            column = (ask - base) * TILE
            column = gl.where(ask < stop, column, CAPACITY).to(gl.uint32)
            page = page_at(table_ptr + gl.minimum(b, B - 1) * COLUMNS, column, lane, PAGES, E, COLUMNS)
            new_ids, new_columns = new_ids + (page,), new_columns + (column,)
            ask += 1
        words, scales, ids, columns = new_words, new_scales, new_ids, new_columns
    if FILL:
        request = gl.arange(0, BP, gl.BlockedLayout([BP // 32], [32], [4], [0]))
        for r in range(gl.program_id(0), B * ROWS, gl.num_programs(0)):
            b = r // ROWS
            done = gl.sum(gl.where(request == b, tiles, 0), 0) * TILE
            fill(out_ptr + (b * S + first + r % ROWS).to(gl.int64) * CAPACITY, done, CAPACITY)


@gluon.jit
def _score(
    group, at, stop, own, q_ptr, w_ptr, visible_ptr, out_ptr, first, q_low, q_high, weights, full, free,
    B: gl.constexpr, BP: gl.constexpr, S: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, CAPACITY: gl.constexpr,
):  # fmt: skip
    """Four warps: score the group-th PER rows of every request whose tiles lie from `at` to `stop`, two tiles at a time."""
    N: gl.constexpr = PER * HEADS
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    L: gl.constexpr = pair_layout(4)  # [key, row + PER * tile]
    line_of = gl.arange(0, TILE, key_layout(4))
    inside = (line_of // 16 * 2 + line_of // 4 % 2) * (BLOCK * 128)
    piece = piece_of(line_of, tile_layout(4))
    lane = gl.arange(0, 4, gl.SliceLayout(0, L))
    key = gl.expand_dims(key_of_row(gl.arange(0, TILE, gl.SliceLayout(1, L))), 1)
    tiles, until = _tiles(visible_ptr, first, B, BP, S, CAPACITY)
    ql, qh = q_low.index(group), q_high.index(group)
    start = at
    while at < stop:
        b, base, last = _segment(tiles, until, at)
        last = gl.minimum(last, stop)
        row = b * S + first + group * PER
        gl.thread_barrier()  # every warp has finished with the previous request's queries
        weights.index(group).store(prepare_queries(q_ptr, w_ptr, row, ql, qh, HEADS, N, M))
        fence_async_shared()
        gl.thread_barrier()
        w = weights.index(group).load(gl.SliceLayout(0, M))  # in pairs, as the products of a thread are multiplied
        own_row = row + lane % PER
        visible = gl.load(visible_ptr + own_row)
        line = out_ptr + gl.expand_dims(own_row.to(gl.int64) * CAPACITY, 0)
        for tile in range(at, last, 2):
            factors, products = (), ()
            for t in gl.static_range(2):
                n = gl.minimum(tile + t, last - 1) - start
                mbarrier.wait(full.index(n % SLOTS), n // SLOTS & 1)
            for t in gl.static_range(2):
                slot = (gl.minimum(tile + t, last - 1) - start) % SLOTS
                low, high = read_keys(over_bytes(own + slot * SLOT + inside, tile_layout(4)) + piece)
                factor = read_factors(own + SLOTS * SLOT + slot * (TILE * 4) + inside // 32 + line_of % 4 * 8)
                products = products + (start_products(operand(low, M), operand(high, M), ql, qh, N, M),)
                factor = gl.convert_layout(factor, gl.SliceLayout(1, L), assert_trivial=True)
                factors = factors + (gl.expand_dims(factor, 1),)
            score = gl.zeros([TILE, 4], gl.float32, L)
            for t in gl.static_range(2):
                if t == 0:
                    done = warpgroup_mma_wait(2, deps=[products[0]])
                else:
                    done = warpgroup_mma_wait(0, deps=[products[1]])
                even, odd = gl.split(register_sums(done, w, HEADS).reshape([TILE, 4, 2]))
                even, odd = (gl.convert_layout(even, L, assert_trivial=True), gl.convert_layout(odd, L, assert_trivial=True))
                total = gl.where(gl.expand_dims(lane % PER == 0, 0), even, odd) * factors[t]
                score = gl.where(gl.expand_dims(lane // PER == t, 0), total, score)
            gl.thread_barrier()  # every warp has read its keys
            for t in gl.static_range(2):
                mbarrier.arrive(free.index((tile + t - start) % SLOTS), count=1, pred=tile + t < last)
            column = gl.expand_dims((tile - base + lane // PER) * TILE, 0) + key
            score = gl.where(column < gl.expand_dims(visible, 0), score.to(gl.bfloat16) + 0.0, float("-inf")).to(gl.bfloat16)
            gl.store(line + column, score, mask=gl.expand_dims(tile + lane // PER < last, 0) & (column >= 0))
        at = last


@gluon.jit
def dense_stream(
    q_ptr, w_ptr, pool_ptr, table_ptr, visible_ptr, out_ptr,
    B: gl.constexpr, BP: gl.constexpr, S: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, BYTES: gl.constexpr,
    REGISTERS: gl.constexpr, PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """Program (p, g) scores ROWS rows from g*ROWS on of every request over the p-th equal share of all live tiles.

    COLUMNS table columns of E entries; BP is B rounded up to a power of two. REGISTERS: a thread of the scoring groups.
    """
    N: gl.constexpr = PER * HEADS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    CAPACITY: gl.constexpr = COLUMNS * E
    gdc_wait()
    program, programs = gl.program_id(0), gl.num_programs(0)
    first = gl.program_id(1) * ROWS
    tiles, until = _tiles(visible_ptr, first, B, BP, S, CAPACITY)
    live = gl.sum(tiles, 0)
    at = (live.to(gl.int64) * program // programs).to(gl.int32)
    stop = (live.to(gl.int64) * (program + 1) // programs).to(gl.int32)
    own = own_shared(BYTES)
    q_low = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, N, 64], SHARED)
    q_high = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, N, 64], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=GROUPS)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _decode,
                (
                    at, stop, own, pool_ptr, table_ptr, visible_ptr, out_ptr, first, full, free, B, BP, S, SLOTS, PAGES, E,
                    COLUMNS, FILL,
                ),
            ),
            (
                _score,
                (
                    0, at, stop, own, q_ptr, w_ptr, visible_ptr, out_ptr, first, q_low, q_high, weights, full, free,
                    B, BP, S, HEADS, SLOTS, CAPACITY,
                ),
            ),
            (
                _score,
                (
                    1, at, stop, own, q_ptr, w_ptr, visible_ptr, out_ptr, first, q_low, q_high, weights, full, free,
                    B, BP, S, HEADS, SLOTS, CAPACITY,
                ),
            ),
            (
                _score,
                (
                    2, at, stop, own, q_ptr, w_ptr, visible_ptr, out_ptr, first, q_low, q_high, weights, full, free,
                    B, BP, S, HEADS, SLOTS, CAPACITY,
                ),
            ),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
