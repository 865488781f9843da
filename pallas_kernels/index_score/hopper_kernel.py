"""The Hopper kernels of the index scores that decode a key for the rows of one program, in Gluon. Imports Triton: import it
only where a GPU kernel is wanted. The arithmetic is hopper_tiles.py's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.index_score.hopper_tiles import (
    LK,
    TILE,
    decode,
    expand_keys,
    fill,
    head_sums,
    load_keys,
    operand,
    prepare_queries,
    register_sums,
    start_products,
    sums,
)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def dense(
    q_ptr, w_ptr, pool_ptr, table_ptr, visible_ptr, out_ptr,
    B: gl.constexpr, BP: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr, PER: gl.constexpr, HEADS: gl.constexpr,
    PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr, FILL: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Program (p, g) scores rows g*ROWS.. of every request over the p-th equal share of all live tiles.

    PER query rows share one product; COLUMNS table columns of E entries; BP is B rounded up to a power of two;
    WIDE: the pool has offsets in words of 64 bits.
    """
    R: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    N: gl.constexpr = PER * HEADS
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    RL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    CAPACITY: gl.constexpr = COLUMNS * E
    GROUPS: gl.constexpr = ROWS // PER
    gdc_wait()
    program, programs = gl.program_id(0), gl.num_programs(0)
    group = gl.program_id(1) * ROWS
    q_low = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, N, 64], SHARED)
    q_high = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, N, 64], SHARED)
    request = gl.arange(0, BP, RL)
    longest = gl.full([BP], 0, gl.int32, RL)
    for s in gl.static_range(ROWS):
        longest = gl.maximum(longest, gl.load(visible_ptr + request * S + group + s, mask=request < B, other=0))
    tiles = (gl.minimum(longest, CAPACITY) + TILE - 1) // TILE
    until = gl.associative_scan(tiles, 0, _add)
    live = gl.sum(tiles, 0)
    at = (live.to(gl.int64) * program // programs).to(gl.int32)
    stop = (live.to(gl.int64) * (program + 1) // programs).to(gl.int32)
    key = gl.arange(0, TILE, LK)
    while at < stop:
        b = gl.sum(gl.where(until <= at, 1, 0), 0)
        base = gl.sum(gl.where(request < b, tiles, 0), 0)
        last = gl.minimum(stop, gl.sum(gl.where(request == b, until, 0), 0))
        row = b * S + group
        gl.thread_barrier()  # every warp has finished with the previous request's queries
        ws = ()
        for g in gl.static_range(GROUPS):
            ws = ws + (prepare_queries(q_ptr, w_ptr, row + g * PER, q_low.index(g), q_high.index(g), HEADS, N, M),)
        fence_async_shared()
        gl.thread_barrier()
        pages = table_ptr + b * COLUMNS
        column_row = gl.arange(0, 8, gl.SliceLayout(0, R))
        visible = gl.load(visible_ptr + row + column_row, mask=column_row < ROWS, other=0)
        first = (at - base) * TILE
        end = (last - base) * TILE
        page = gl.load(pages + first // E)
        inside = (page > 0) & (page < PAGES) & (key >= 0)
        words, scales = load_keys(pool_ptr, gl.where(inside, page, 0), first % E + key, inside, E, WIDE)
        page = gl.load(pages + (first + TILE) // E, mask=first + TILE < end, other=0)
        for column in range(first, end, TILE):
            low, high, factor = expand_keys(words, scales)
            inside = (page > 0) & (page < PAGES) & (key >= 0)
            words, scales = load_keys(pool_ptr, gl.where(inside, page, 0), (column + TILE) % E + key, inside, E, WIDE)
            page = gl.load(pages + (column + 2 * TILE) // E, mask=column + 2 * TILE < end, other=0)
            flying = (start_products(operand(low, M), operand(high, M), q_low.index(0), q_high.index(0), N, M),)
            scores = gl.zeros([TILE, 8], gl.float32, R)
            for g in gl.static_range(GROUPS):
                if g + 1 < GROUPS:
                    after = start_products(
                        operand(low, M), operand(high, M), q_low.index(g + 1), q_high.index(g + 1), N, M
                    )  # fmt: skip
                    flying = flying + (after,)
                    products = warpgroup_mma_wait(2, deps=[flying[g]])
                else:
                    products = warpgroup_mma_wait(0, deps=[flying[g]])
                total = register_sums(products, ws[g], HEADS)
                scores = gl.where(gl.expand_dims(column_row // PER == g, 0), total, scores)
            scores *= gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, R), assert_trivial=True), 1)
            _store_rows(scores.to(gl.bfloat16) + 0.0, visible, out_ptr, row, column, CAPACITY, ROWS)
        at = last
    if FILL:
        for r in range(program, B * ROWS, programs):
            b = r // ROWS
            done = gl.sum(gl.where(request == b, tiles, 0), 0) * TILE
            fill(out_ptr + (b * S + group + r % ROWS).to(gl.int64) * CAPACITY, done, CAPACITY)


@gluon.jit
def _store_rows(score, visible, out_ptr, row, column, CAPACITY: gl.constexpr, ROWS: gl.constexpr):
    """bf16[TILE, 8] scores of ROWS rows from `row` on to their columns from `column` on, -inf where not visible."""
    LAYOUT: gl.constexpr = score.type.layout
    c = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT)), 1)
    r = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    score = gl.where(column + c < gl.expand_dims(visible, 0), score, float("-inf")).to(gl.bfloat16)
    line = out_ptr + row.to(gl.int64) * CAPACITY + column
    gl.store(line + gl.expand_dims(r * CAPACITY, 0) + c, score, mask=gl.expand_dims(r < ROWS, 0) & (c >= 0))


@gluon.jit
def _candidate(ids, column, KB: gl.constexpr, BLOCK: gl.constexpr):
    """Logical positions u32[TILE] of compact columns; a negative block becomes a position outside every table."""
    block = gl.minimum((column.to(gl.uint32) + gl.arange(0, TILE, LK).to(gl.uint32)) // BLOCK, KB - 1)
    inner = gl.arange(0, TILE, LK).to(gl.uint32) % BLOCK  # a tile starts at the head of a block
    return gl.load(ids + block).to(gl.uint32) * BLOCK + inner


@gluon.jit
def _page_of(pages, position, PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr):
    """Page ids i32[TILE] of logical positions, 0 where there is none."""
    column = position // E
    page = gl.load(pages + column, mask=column < COLUMNS, other=0)
    return gl.where(page.to(gl.uint32) < PAGES, page, 0)


@gluon.jit
def blocks(
    q_ptr, w_ptr, pool_ptr, table_ptr, ids_ptr, end_ptr, out_ptr,
    S: gl.constexpr, HEADS: gl.constexpr, KB: gl.constexpr, BLOCK: gl.constexpr, CHUNK: gl.constexpr,
    PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Program (t, c) scores compact columns c*CHUNK.. of query row t; WIDE: the pool has offsets in words of 64 bits."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    WIDTH: gl.constexpr = KB * BLOCK
    gdc_wait()
    t = gl.program_id(0)
    first = gl.program_id(1) * CHUNK
    end = gl.minimum(gl.load(end_ptr + t), WIDTH)
    line = out_ptr + t.to(gl.int64) * WIDTH
    stop = gl.minimum(first + CHUNK, WIDTH)
    live = gl.minimum(end, stop)
    done = first
    if first < end:
        q_low = gl.allocate_shared_memory(gl.float8e4nv, [HEADS, 64], SHARED)
        q_high = gl.allocate_shared_memory(gl.float8e4nv, [HEADS, 64], SHARED)
        ones = gl.allocate_shared_memory(gl.bfloat16, [8, HEADS], gl.NVMMASharedLayout(2 * HEADS, 16, 2))
        head_sums(ones, HEADS, HEADS)
        ids, pages = ids_ptr + t * KB, table_ptr + t // S * COLUMNS
        position = _candidate(ids, first, KB, BLOCK)
        page = _page_of(pages, position, PAGES, E, COLUMNS)
        ahead = _candidate(ids, first + TILE, KB, BLOCK)
        w = prepare_queries(q_ptr, w_ptr, t, q_low, q_high, HEADS, HEADS, M)
        words, scales = load_keys(pool_ptr, page, (position % E).to(gl.int32), page > 0, E, WIDE)
        page = _page_of(pages, ahead, PAGES, E, COLUMNS)
        position = ahead
        ahead = _candidate(ids, first + 2 * TILE, KB, BLOCK)
        fence_async_shared()
        gl.thread_barrier()
        for column in range(first, live, TILE):
            ka, kb, factor = decode(words, scales, M)
            words, scales = load_keys(pool_ptr, page, (position % E).to(gl.int32), page > 0, E, WIDE)
            page = _page_of(pages, ahead, PAGES, E, COLUMNS)
            position = ahead
            ahead = _candidate(ids, column + 3 * TILE, KB, BLOCK)
            products = start_products(ka, kb, q_low, q_high, HEADS, M)
            products = warpgroup_mma_wait(0, deps=[products])
            score = sums(products, w, ones, factor)
            LAYOUT: gl.constexpr = score.type.layout
            c = gl.expand_dims(column + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT)), 1)
            alone = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LAYOUT)) == 0, 0)
            score = gl.where(c < end, score, float("-inf")).to(gl.bfloat16)
            gl.store(line + c + gl.where(alone, 0, 1), score, mask=(c < stop) & alone)
        done = first + (live - first + TILE - 1) // TILE * TILE
    fill(line, done, stop)
