"""The candidate-only scorer on Hopper that decodes a key once for all rows of its request, in Gluon. Imports Triton:
import it only where a GPU kernel is wanted.

A program walks a range of a request's logical blocks in windows. It expands a window's keys to e4m3 into a ring in
shared memory (the arithmetic is hopper_tiles.py's), then scores each row's candidates that lie there: a thread reads
the bytes of its keys straight into the registers that the tensor core takes them from, so a tile may gather any blocks
of the ring. Candidates that do not fill a tile wait for the next window while their block stays in the ring.

Triton's shared memory can be addressed as whole buffers only, so the ring, the rows' lists of ring slots and what a row
does in a window lie in bytes of dynamic shared memory behind Triton's own (`ring_bytes`, gluon_call's extra_shared),
read and written by the inline assembly of hopper_ring.py. Two barriers a window separate its writers from its readers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.index_score.hopper_lists import (
    first_listed,
    list_length,
    next_listed,
    padded_rows,
    window_slots,
    write_lists,
)
from pallas_kernels.index_score.hopper_ring import (
    meet,
    own_shared,
    write_factors,
    write_keys,
)
from pallas_kernels.index_score.hopper_rows import (
    BLOCK,
    key_of_row,
    over_bytes,
    piece_of,
    score_in_turn,
    unfinished,
)
from pallas_kernels.index_score.hopper_tiles import (
    expand_keys,
    fill,
    head_sums,
    key_layout,
    prepare_queries,
    tile_layout,
)


def ring_bytes(fresh: int, kept: int, span: int, halves: int) -> int:
    """Shared memory that the kernel addresses itself: ring and a block of zeros (bytes, factors), lists, rows' work."""
    ring = (fresh + kept + 1) * BLOCK.value * (128 + 4)
    return ring + halves * padded_rows(span, halves) * (4 * list_length(fresh) + 16)


@gluon.jit
def _pages_of(pages, column, lane, STEP: gl.constexpr, TILES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr):
    """Page ids of TILES tiles of keys, STEP columns apart from `column` on, 0 past the table. They are asked for by lane
    (i32[n], 0..3): a scalar would be waited for at once, to be put in a uniform register."""
    ids = ()
    for i in gl.static_range(TILES):
        at = column + i * STEP + lane
        ids = ids + (gl.load(pages + at // E, mask=at < COLUMNS * E, other=0),)
    return ids


@gluon.jit
def _load_window(
    pool, page_ids, column, key, HALVES: gl.constexpr, TILES: gl.constexpr, PAGES: gl.constexpr, E: gl.constexpr
):  # fmt: skip
    """Packed keys of every HALVES-th tile from `column` on -> (words of every tile, scales of every tile)."""
    STEP: gl.constexpr = HALVES * key.shape[0]
    LG: gl.constexpr = key.type.layout.parent
    group = gl.arange(0, 4, gl.SliceLayout(0, LG))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, LG.parent)))
    words, scales = (), ()
    for i in gl.static_range(TILES):
        page = page_ids[i]
        live = (page > 0) & (page < PAGES)
        entry = (column + i * STEP) % E
        base = pool + gl.where(live, page, 0).to(gl.int64) * (E * 68)  # [n], as all of this
        words_at = (base + (entry * 64 + key * 64)).to(gl.pointer_type(gl.int32))
        words_at = gl.expand_dims(gl.expand_dims(words_at, 1) + gl.expand_dims(group * 4, 0), 2)
        seen = gl.expand_dims(live, 1)
        w = gl.load(words_at + gl.expand_dims(gl.expand_dims(word, 0), 0), mask=gl.expand_dims(seen, 2), other=0)
        scales_at = gl.expand_dims(base + (entry * 4 + key * 4 + E * 64), 1) + gl.expand_dims(group, 0)
        s = gl.load(scales_at, mask=seen, other=0)
        words = words + (w,)
        scales = scales + (s,)
    return words, scales


@gluon.jit
def _score_windows(
    half, k, stop, windows, own, b, q_ptr, w_ptr, pool_ptr, pages, ids_ptr, end_ptr, out_ptr, q_low, q_high, weights,
    ones, S: gl.constexpr, SP: gl.constexpr, HALVES: gl.constexpr, HEADS: gl.constexpr, KB: gl.constexpr,
    FRESH: gl.constexpr, KEPT: gl.constexpr, LIST: gl.constexpr, PAGES: gl.constexpr, E: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Four warps: decode every HALVES-th tile of the windows from k to stop, score the half-th share of the rows."""
    TILE: gl.constexpr = 64
    PER: gl.constexpr = TILE // BLOCK  # blocks a tile
    TILES: gl.constexpr = FRESH // PER // HALVES
    RING: gl.constexpr = FRESH + KEPT
    SHARE: gl.constexpr = (S + HALVES - 1) // HALVES
    WIDTH: gl.constexpr = KB * BLOCK
    LIMIT: gl.constexpr = COLUMNS * E // BLOCK  # blocks of the table
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    L4: gl.constexpr = tile_layout(4)
    rows = gl.minimum(SHARE, S - half * SHARE)
    for r in range(rows):
        s = half * SHARE + r
        w = prepare_queries(q_ptr, w_ptr, b * S + s, q_low.index(s), q_high.index(s), HEADS, HEADS, M)
        weights.index(s).store(w)
    fence_async_shared()
    gl.thread_barrier()

    factors_at = own + (RING + 1) * (BLOCK * 128)
    lists_at = factors_at + (RING + 1) * (BLOCK * 4)
    work_at = lists_at + HALVES * SP * (LIST * 4)
    own_lists_at = lists_at + half * SP * (LIST * 4)
    line_of = gl.arange(0, TILE, key_layout(4))  # rows of the product
    key = key_of_row(line_of)
    block = line_of // 16 * 2 + line_of // 4 % 2  # of the tile
    piece = piece_of(line_of, L4)
    first_column = half * TILE
    page_ids = _pages_of(pages, k * (FRESH * BLOCK) + first_column, line_of % 4, HALVES * TILE, TILES, E, COLUMNS)
    ids, counts, end, pending, listed = first_listed(
        ids_ptr, end_ptr, b * S + half * SHARE, rows, k, KB, FRESH, SP, LIST
    )
    decoded = k - 1  # last window that the ring holds
    while k < stop:
        v = k * FRESH
        words, scales = _load_window(pool_ptr, page_ids, v * BLOCK + first_column, key, HALVES, TILES, PAGES, E)
        slot, taken, more = window_slots(listed, k, stop, windows, FRESH, KEPT, RING, LIMIT)
        meet(HALVES)  # every warp has finished with the previous window
        write_lists(slot, taken, pending, end, more, own_lists_at, work_at + half * SP * 16)
        if decoded < k:
            for t in gl.static_range(TILES):
                low, high, factor = expand_keys(words[t], scales[t])
                to = v % RING + (t * HALVES + half) * PER + block
                to = gl.where(to >= RING, to - RING, to)
                write_keys(low, high, over_bytes(own + to * (BLOCK * 128), L4) + piece)
                write_factors(factor.to(gl.int32, bitcast=True), factors_at + to * (BLOCK * 4) + line_of % 4 * 8)
        decoded = k
        meet(HALVES)
        pending += taken
        listed = next_listed(ids, counts, pending, LIST)
        page_ids = _pages_of(
            pages, (k + 1) * (FRESH * BLOCK) + first_column, line_of % 4, HALVES * TILE, TILES, E, COLUMNS
        )
        out = out_ptr + (b * S + half * SHARE).to(gl.int64) * WIDTH
        score_in_turn(
            out, work_at + half * SP * 16, half * SHARE, own_lists_at, own, factors_at, q_low, q_high, weights, ones,
            SHARE, HEADS, WIDTH, LIST,
        )  # fmt: skip
        k += 1 - unfinished(work_at, SP, HALVES, SHARE)


@gluon.jit
def windows_of(ids_ptr, end_ptr, b, S: gl.constexpr, KB: gl.constexpr, FRESH: gl.constexpr, LIMIT: gl.constexpr):
    """Windows of FRESH blocks up to the newest candidate of request b's rows, of LIMIT blocks at most."""
    row = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    end = gl.load(end_ptr + b * S + row, mask=row < S, other=0)
    count = (gl.minimum(gl.maximum(end, 0), KB * BLOCK) + (BLOCK - 1)) // BLOCK
    newest = gl.load(ids_ptr + (b * S + row) * KB + count - 1, mask=count > 0, other=-1)
    newest = gl.minimum(gl.maximum(gl.max(newest, 0), 0), LIMIT - 1)
    return gl.where(gl.max(count, 0) > 0, newest // FRESH + 1, 0)


@gluon.jit
def write_blank(own, RING: gl.constexpr):
    """Zeros behind the ring's blocks: the keys of candidates that it does not hold."""
    line_of = gl.arange(0, 64, key_layout(4))
    zeros = gl.zeros([64, 4, 4, 4], gl.uint8, tile_layout(4))
    write_keys(zeros, zeros, own + RING * (BLOCK * 128) + piece_of(line_of, tile_layout(4)))
    write_factors(line_of * 0, own + (RING + 1) * (BLOCK * 128) + RING * (BLOCK * 4) + line_of % 4 * 8)


@gluon.jit
def request_blocks(
    q_ptr, w_ptr, pool_ptr, table_ptr, ids_ptr, end_ptr, out_ptr,
    S: gl.constexpr, SP: gl.constexpr, HALVES: gl.constexpr, HEADS: gl.constexpr, KB: gl.constexpr,
    FRESH: gl.constexpr, KEPT: gl.constexpr, LIST: gl.constexpr, BYTES: gl.constexpr, REGISTERS: gl.constexpr,
    PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Program (p, b) scores the candidates of request b in the p-th equal share of the windows that its rows reach.

    A window is FRESH blocks; the ring holds KEPT older ones too. HALVES: groups of 4 warps (1 or 2) that share the rows,
    SP a group's rows, rounded up to a power of two. REGISTERS: a thread of the second group.
    """
    WIDTH: gl.constexpr = KB * BLOCK
    SHARED: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    gdc_wait()
    program, programs, b = gl.program_id(0), gl.num_programs(0), gl.program_id(1)
    windows = windows_of(ids_ptr, end_ptr, b, S, KB, FRESH, COLUMNS * E // BLOCK)
    k = windows * program // programs
    stop = windows * (program + 1) // programs
    for s in range(program, S, programs):
        live = gl.minimum(gl.maximum(gl.load(end_ptr + b * S + s), 0), WIDTH)
        fill(out_ptr + (b * S + s).to(gl.int64) * WIDTH, live, WIDTH)
    own = own_shared(BYTES)
    ROWS: gl.constexpr = (S + HALVES - 1) // HALVES * HALVES
    q_low = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, HEADS, 64], SHARED)
    q_high = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, HEADS, 64], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ones = gl.allocate_shared_memory(gl.bfloat16, [8, HEADS], gl.NVMMASharedLayout(2 * HEADS, 16, 2))
    head_sums(ones, HEADS, HEADS)
    write_blank(own, FRESH + KEPT)
    fence_async_shared()
    pages = table_ptr + b * COLUMNS
    if HALVES == 1:
        _score_windows(
            0, k, stop, windows, own, b, q_ptr, w_ptr, pool_ptr, pages, ids_ptr, end_ptr, out_ptr, q_low, q_high, weights,
            ones, S, SP, HALVES, HEADS, KB, FRESH, KEPT, LIST, PAGES, E, COLUMNS,
        )  # fmt: skip
    else:
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (
                    _score_windows,
                    (
                        0, k, stop, windows, own, b, q_ptr, w_ptr, pool_ptr, pages, ids_ptr, end_ptr, out_ptr, q_low,
                        q_high, weights, ones, S, SP, HALVES, HEADS, KB, FRESH, KEPT, LIST, PAGES, E, COLUMNS,
                    ),
                ),
                (
                    _score_windows,
                    (
                        1, k, stop, windows, own, b, q_ptr, w_ptr, pool_ptr, pages, ids_ptr, end_ptr, out_ptr, q_low,
                        q_high, weights, ones, S, SP, HALVES, HEADS, KB, FRESH, KEPT, LIST, PAGES, E, COLUMNS,
                    ),
                ),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
