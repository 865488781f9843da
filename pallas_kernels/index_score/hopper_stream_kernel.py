"""The candidate-only scorer on Hopper whose keys are decoded by warps of their own, in Gluon. Imports Triton: import it
only where a GPU kernel is wanted.

What hopper_shared_kernel.py computes, with its windows, ring and lists. One program fills a multiprocessor: 4 warps decode
the next window into the ring while GROUPS times 4 score the present one, a share of the request's rows each, so neither
the keys' way from memory nor their expansion is waited for. `full` and `free` (one mbarrier for even windows, one for odd
ones) hand windows over; the ring holds two of them and KEPT older blocks, so what the decoder overwrites no row may ask
for any more. A group meets by itself; groups may be a window apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.index_score.hopper_lists import first_listed, next_listed, window_slots, write_lists
from pallas_kernels.index_score.hopper_ring import own_shared, write_factors, write_keys
from pallas_kernels.index_score.hopper_rows import BLOCK, key_of_row, over_bytes, piece_of, score_abreast, unfinished
from pallas_kernels.index_score.hopper_shared_kernel import windows_of, write_blank
from pallas_kernels.index_score.hopper_tiles import (
    expand_keys,
    fill,
    key_layout,
    load_keys,
    prepare_planes,
    tile_layout,
)

TILES = gl.constexpr(4)  # of 64 keys, on their way from memory while as many are decoded


@gluon.jit
def page_at(pages, column, lane, PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr):
    """Page i32[64] of a tile of keys from `column` (u32) on, 0 where there is none; asked for by lane (u32[64], below E),
    as a scalar would be waited for at once, and once for the two keys of a thread."""
    lane, _other = gl.split(lane.reshape([4, 2, 8]).permute((0, 2, 1)))
    at = column + lane
    page = gl.load(pages + at // E, mask=at < COLUMNS * E, other=0)
    page = gl.where(page.to(gl.uint32) < PAGES, page, 0)
    page = gl.join(page, page).permute((0, 2, 1)).reshape([64])
    return gl.convert_layout(page, key_layout(4), assert_trivial=True)


@gluon.jit
def _decode(
    k, stop, own, pool_ptr, pages, full, free, FRESH: gl.constexpr, RING: gl.constexpr, PAGES: gl.constexpr,
    E: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Four warps: decode the windows from k to stop into the ring."""
    TILE: gl.constexpr = 64
    PER: gl.constexpr = TILE // BLOCK
    BATCHES: gl.constexpr = FRESH // PER // TILES
    gl.static_assert(FRESH % (PER * TILES) == 0 and RING % PER == 0)
    L4: gl.constexpr = tile_layout(4)
    line_of = gl.arange(0, TILE, key_layout(4))
    key = key_of_row(line_of)
    block = line_of // 16 * 2 + line_of // 4 % 2  # of the tile
    piece = piece_of(line_of, L4)
    factors_at = own + (RING + 1) * (BLOCK * 128)
    column = (k * (FRESH * BLOCK)).to(gl.uint32)
    place = k * FRESH % RING
    lane = (line_of % 4).to(gl.uint32)
    words, scales, ids = (), (), ()
    for t in gl.static_range(TILES):
        page = page_at(pages, column + t * TILE, lane, PAGES, E, COLUMNS)
        w, s = load_keys(pool_ptr, page, ((column + t * TILE) % E).to(gl.int32) + key, page > 0, E)
        words, scales = words + (w,), scales + (s,)
        ids = ids + (page_at(pages, column + (TILES + t) * TILE, lane, PAGES, E, COLUMNS),)
    for step in range(0, (stop - k) * BATCHES):
        n = step // BATCHES
        if step % BATCHES == 0:
            mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
        column += TILES * TILE
        new_words, new_scales, new_ids = (), (), ()
        for t in gl.static_range(TILES):
            low, high, factor = expand_keys(words[t], scales[t])
            to = place + block
            place = gl.where(place + PER == RING, 0, place + PER)
            write_keys(low, high, over_bytes(own + to * (BLOCK * 128), L4) + piece)
            write_factors(factor.to(gl.int32, bitcast=True), factors_at + to * (BLOCK * 4) + line_of % 4 * 8)
            w, s = load_keys(pool_ptr, ids[t], ((column + t * TILE) % E).to(gl.int32) + key, ids[t] > 0, E)
            new_words, new_scales = new_words + (w,), new_scales + (s,)
            new_ids = new_ids + (page_at(pages, column + (TILES + t) * TILE, lane, PAGES, E, COLUMNS),)
        words, scales, ids = new_words, new_scales, new_ids
        if step % BATCHES == BATCHES - 1:
            gl.thread_barrier()
            mbarrier.arrive(full.index(n & 1), count=1)


@gluon.jit
def _score(
    group, k, stop, windows, own, b, q_ptr, w_ptr, ids_ptr, end_ptr, out_ptr, planes, weights, full, free,
    S: gl.constexpr, SP: gl.constexpr, GROUPS: gl.constexpr, HEADS: gl.constexpr, KB: gl.constexpr,
    FRESH: gl.constexpr, KEPT: gl.constexpr, LIST: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Four warps: score the group-th share of the rows in the windows from k to stop."""
    RING: gl.constexpr = 2 * FRESH + KEPT
    SHARE: gl.constexpr = (S + GROUPS - 1) // GROUPS
    WIDTH: gl.constexpr = KB * BLOCK
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    first = group * SHARE
    rows = gl.maximum(gl.minimum(SHARE, S - first), 0)
    for r in range(rows):
        s = first + r
        w = prepare_planes(q_ptr, w_ptr, b * S + s, planes, s, HEADS, HEADS, M)
        weights.index(s).store(w)
    fence_async_shared()
    gl.thread_barrier()
    factors_at = own + (RING + 1) * (BLOCK * 128)
    lists_at = factors_at + (RING + 1) * (BLOCK * 4) + group * SP * (LIST * 4)
    work_at = factors_at + (RING + 1) * (BLOCK * 4) + GROUPS * SP * (LIST * 4) + group * SP * 16
    ids, counts, end, pending, listed = first_listed(ids_ptr, end_ptr, b * S + first, rows, k, KB, FRESH, SP, LIST)
    n = 0
    while k < stop:
        slot, taken, more = window_slots(listed, k, stop, windows, FRESH, KEPT, RING, LIMIT)
        write_lists(slot, taken, pending, end, more, lists_at, work_at)
        pending += taken
        listed = next_listed(ids, counts, pending, LIST)
        gl.thread_barrier()
        mbarrier.wait(full.index(n & 1), (n >> 1) & 1)
        score_abreast(
            out_ptr + (b * S + first).to(gl.int64) * WIDTH, work_at, first, lists_at, own, factors_at, planes, weights,
            SHARE, HEADS, WIDTH, LIST,
        )  # fmt: skip
        again = unfinished(work_at, SP, 1, SHARE)
        gl.thread_barrier()  # every warp of the group has finished with the lists and the window
        mbarrier.arrive(free.index(n & 1), count=1, pred=again == 0)
        n += 1 - again
        k += 1 - again


@gluon.jit
def stream_blocks(
    q_ptr, w_ptr, pool_ptr, table_ptr, ids_ptr, end_ptr, out_ptr,
    S: gl.constexpr, SP: gl.constexpr, GROUPS: gl.constexpr, HEADS: gl.constexpr, KB: gl.constexpr,
    FRESH: gl.constexpr, KEPT: gl.constexpr, LIST: gl.constexpr, BYTES: gl.constexpr, REGISTERS: gl.constexpr,
    PAGES: gl.constexpr, E: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Program (p, b) scores the candidates of request b in the p-th equal share of the windows that its rows reach.

    GROUPS: of 4 warps (2 or 3) that share the rows, SP a group's rows, rounded up to a power of two. REGISTERS: a thread of
    them.
    """
    WIDTH: gl.constexpr = KB * BLOCK
    RING: gl.constexpr = 2 * FRESH + KEPT
    LIMIT: gl.constexpr = COLUMNS * E // BLOCK
    ROWS: gl.constexpr = (S + GROUPS - 1) // GROUPS * GROUPS
    gl.static_assert(GROUPS == 2 or GROUPS == 3)
    gdc_wait()
    program, programs, b = gl.program_id(0), gl.num_programs(0), gl.program_id(1)
    windows = windows_of(ids_ptr, end_ptr, b, S, KB, FRESH, LIMIT)
    k = windows * program // programs
    stop = windows * (program + 1) // programs
    for s in range(program, S, programs):
        live = gl.minimum(gl.maximum(gl.load(end_ptr + b * S + s), 0), WIDTH)
        fill(out_ptr + (b * S + s).to(gl.int64) * WIDTH, live, WIDTH)
    own = own_shared(BYTES)
    planes = gl.allocate_shared_memory(gl.float8e4nv, [4 * ROWS, HEADS, 32], gl.NVMMASharedLayout(32, 8, 2))
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for parity in gl.static_range(2):
        mbarrier.init(full.index(parity), count=1)
        mbarrier.init(free.index(parity), count=GROUPS)
    write_blank(own, RING)
    gl.thread_barrier()
    pages = table_ptr + b * COLUMNS
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_decode, (k, stop, own, pool_ptr, pages, full, free, FRESH, RING, PAGES, E, COLUMNS)),
                (
                    _score,
                    (
                        0, k, stop, windows, own, b, q_ptr, w_ptr, ids_ptr, end_ptr, out_ptr, planes, weights, full, free, S, SP,
                        GROUPS, HEADS, KB, FRESH, KEPT, LIST, LIMIT,
                    ),
                ),
                (
                    _score,
                    (
                        1, k, stop, windows, own, b, q_ptr, w_ptr, ids_ptr, end_ptr, out_ptr, planes, weights, full, free, S, SP,
                        GROUPS, HEADS, KB, FRESH, KEPT, LIST, LIMIT,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_decode, (k, stop, own, pool_ptr, pages, full, free, FRESH, RING, PAGES, E, COLUMNS)),
                (
                    _score,
                    (
                        0, k, stop, windows, own, b, q_ptr, w_ptr, ids_ptr, end_ptr, out_ptr, planes, weights, full, free, S, SP,
                        GROUPS, HEADS, KB, FRESH, KEPT, LIST, LIMIT,
                    ),
                ),
                (
                    _score,
                    (
                        1, k, stop, windows, own, b, q_ptr, w_ptr, ids_ptr, end_ptr, out_ptr, planes, weights, full, free, S, SP,
                        GROUPS, HEADS, KB, FRESH, KEPT, LIST, LIMIT,
                    ),
                ),
                (
                    _score,
                    (
                        2, k, stop, windows, own, b, q_ptr, w_ptr, ids_ptr, end_ptr, out_ptr, planes, weights, full, free, S, SP,
                        GROUPS, HEADS, KB, FRESH, KEPT, LIST, LIMIT,
                    ),
                ),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
