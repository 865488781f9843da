"""The candidate-only scorer on Hopper that decodes a key once for all rows of its request, in Gluon. Imports Triton:
import it only where a GPU kernel is wanted.

A program walks a range of a request's logical blocks in windows. It expands a window's keys to e4m3 into a ring in
shared memory (the arithmetic is hopper_kernel.py's), then scores each row's candidates that lie there: a thread reads
the bytes of its keys straight into the registers that the tensor core takes them from, so a tile may gather any blocks
of the ring. Candidates that do not fill a tile wait for the next window while their block stays in the ring.

Triton's shared memory can be addressed as whole buffers only, so the ring, the rows' lists of ring slots and what a row
does in a window lie in bytes of dynamic shared memory behind Triton's own (`ring_bytes`, gluon_call's extra_shared),
read and written by the inline assembly of hopper_ring.py. Two barriers a window separate its writers from its readers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.index_score.hopper_kernel import (
    expand_keys,
    fill,
    head_sums,
    key_layout,
    operand,
    prepare_queries,
    start_products,
    sums,
    tile_layout,
)
from pallas_kernels.index_score.hopper_ring import (
    meet,
    own_shared,
    read_factors,
    read_four,
    read_keys,
    read_word,
    write_factors,
    write_four,
    write_keys,
    write_word,
)

BLOCK = gl.constexpr(8)  # keys a block
NEVER = gl.constexpr(2**31 - 1)  # above every block id


def list_length(fresh: int) -> int:
    """Candidates of a row looked at in one window: the fresh ones and those that waited, as a power of two."""
    return max(64, 1 << (fresh + 6).bit_length())


def padded_rows(span: int, halves: int) -> int:
    """Rows of a group of warps as a power of two."""
    return max(4, 1 << (-(-span // halves) - 1).bit_length())


def ring_bytes(fresh: int, kept: int, span: int, halves: int) -> int:
    """Shared memory that the kernel addresses itself: ring and a block of zeros (bytes, factors), lists, rows' work."""
    ring = (fresh + kept + 1) * BLOCK.value * (128 + 4)
    return ring + halves * padded_rows(span, halves) * (4 * list_length(fresh) + 16)


@gluon.constexpr_function
def list_layout(rows, length):
    """[row of a group, listed candidate] over 4 warps: a row's candidates lie in one warp."""
    a_warp = max(1, rows // 4)
    return gl.BlockedLayout([1, length * a_warp // 32], [a_warp, 32 // a_warp], [4, 1], [1, 0])


@gluon.jit
def _over_bytes(address, L4: gl.constexpr):
    """i32[n] addresses of keys -> the same for every byte of a thread's piece of the key."""
    address = gl.expand_dims(gl.expand_dims(gl.expand_dims(address, 1), 2), 3)
    return address + gl.zeros([address.shape[0], 4, 4, 4], gl.int32, L4)


@gluon.jit
def _key_of_row(row):
    """Key of its tile that a row of the product stands for: the two rows of a thread are keys j and j + 4 of one block."""
    return row // 16 * 16 + row // 4 % 2 * 8 + row // 8 % 2 * 4 + row % 4


@gluon.jit
def _piece(row, L4: gl.constexpr):
    """i32[n, 4, 4, 4]: where in a block's KiB a thread's first 16 bytes lie."""
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L4))))
    at = gl.expand_dims(row % 4 * 64, 1) + gl.expand_dims(group * 16, 0)
    return gl.expand_dims(gl.expand_dims(at, 2), 3) + gl.zeros([row.shape[0], 4, 4, 4], gl.int32, L4)


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
def _gather(at, own, factors_at, piece, line_of):
    """A tile's keys by the ring slots listed at `at` (i32[n], their blocks' words) -> (low, high u8[n, 4, 4, 4], f32[n])."""
    slot_at = read_word(at)
    factor = read_factors(factors_at + (slot_at >> 5) + line_of % 4 * 8)
    low, high = read_keys(_over_bytes(own + slot_at, tile_layout(4)) + piece)
    return low, high, factor


@gluon.jit
def _store_row(score, line, stop):
    """Column 0 of bf16[n, 8] scores to line[0 .. min(n, stop)), row by row as `_key_of_row` says."""
    LAYOUT: gl.constexpr = score.type.layout
    c = gl.expand_dims(_key_of_row(gl.arange(0, score.shape[0], gl.SliceLayout(1, LAYOUT))), 1)
    alone = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LAYOUT)) == 0, 0)
    gl.store(line + c + gl.where(alone, 0, 0), score, mask=(c < stop) & alone)


@gluon.jit
def _score_rows(
    out, work_at, half, lists_at, own, factors_at, q_low, q_high, weights, ones, SP: gl.constexpr, HALVES: gl.constexpr,
    SHARE: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr, LIST: gl.constexpr,
):  # fmt: skip
    """Score what the lists of the SHARE rows from `out` on hold, a tile of every row in turn: the product of one row runs
    while another's is summed. Returns 1 if any row of the request has more candidates in this window, 0 if none has."""
    TILE: gl.constexpr = 64
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    line_of = gl.arange(0, TILE, key_layout(4))  # rows of the product
    block = line_of // 16 * 2 + line_of // 4 % 2  # of the tile
    piece = _piece(line_of, tile_layout(4))
    most = 0
    lines, stops, ws = (), (), ()
    for r in gl.static_range(SHARE):
        taken, pending, end, _ = read_four(work_at + (half * SP + r) * 16)
        stop = gl.minimum(taken * BLOCK, end - pending * BLOCK)
        lines = lines + (out + r * WIDTH + pending * BLOCK,)
        stops = stops + (stop,)
        ws = ws + (weights.index(half * SHARE + r).load(gl.SliceLayout(0, M)),)
        most = gl.maximum(most, stop)
    for c in range(0, most, TILE):
        at = lists_at + c // 2 + block * 4
        keys = (_gather(at, own, factors_at, piece, line_of),)
        if SHARE > 1:
            keys = keys + (_gather(at + LIST * 4, own, factors_at, piece, line_of),)
        s = half * SHARE
        ahead = start_products(
            operand(keys[0][0], M), operand(keys[0][1], M), q_low.index(s), q_high.index(s), HEADS, M
        )
        for r in gl.static_range(SHARE):
            products = ahead
            if r + 1 < SHARE:
                s = half * SHARE + (r + 1)
                ahead = start_products(
                    operand(keys[r + 1][0], M), operand(keys[r + 1][1], M), q_low.index(s), q_high.index(s), HEADS, M
                )  # fmt: skip
                products = warpgroup_mma_wait(2, deps=[products])
                if r + 2 < SHARE:
                    keys = keys + (_gather(at + (r + 2) * (LIST * 4), own, factors_at, piece, line_of),)
            else:
                products = warpgroup_mma_wait(0, deps=[products])
            _store_row(sums(products, ws[r], ones, keys[r][2]), lines[r] + c, stops[r] - c)
    again = 0
    for r in gl.static_range(SHARE):
        for h in gl.static_range(HALVES):
            again = again | read_four(work_at + (h * SP + r) * 16)[3]
    return again


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
    IL: gl.constexpr = list_layout(SP, LIST)
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
    line_of = gl.arange(0, TILE, key_layout(4))  # rows of the product
    key = _key_of_row(line_of)
    block = line_of // 16 * 2 + line_of // 4 % 2  # of the tile
    piece = _piece(line_of, L4)
    first_column = half * TILE
    page_ids = _pages_of(pages, k * (FRESH * BLOCK) + first_column, line_of % 4, HALVES * TILE, TILES, E, COLUMNS)
    share = gl.arange(0, SP, gl.SliceLayout(1, IL))
    row = b * S + half * SHARE + share
    i = gl.expand_dims(gl.arange(0, LIST, gl.SliceLayout(0, IL)), 0)
    end = gl.load(end_ptr + row, mask=share < rows, other=0)
    end = gl.minimum(gl.maximum(end, 0), WIDTH)
    counts = gl.expand_dims((end + (BLOCK - 1)) // BLOCK, 1)  # live blocks of every row
    ids = ids_ptr + gl.expand_dims(row * KB, 1)
    # candidates of a row before the first window: by a stride, then one by one
    STRIDE: gl.constexpr = (KB + LIST - 1) // LIST
    before = k * FRESH
    probe = gl.load(ids + i * STRIDE, mask=i * STRIDE < counts, other=NEVER)
    base = gl.maximum(gl.sum((probe < before).to(gl.int32), 1) - 1, 0) * STRIDE
    pending = base
    for f in gl.static_range((STRIDE + LIST - 1) // LIST):
        at = f * LIST + i
        probe = gl.load(ids + gl.expand_dims(base, 1) + at,
                        mask=(at < STRIDE) & (gl.expand_dims(base, 1) + at < counts), other=NEVER)  # fmt: skip
        pending += gl.sum((probe < before).to(gl.int32), 1)
    pending = gl.where(k > 0, pending, 0)  # ids below 0 go with the first window
    listed = gl.expand_dims(pending, 1) + i
    listed = gl.load(ids + listed, mask=listed < counts, other=NEVER)
    decoded = k - 1  # last window that the ring holds
    while k < stop:
        v = k * FRESH
        words, scales = _load_window(pool_ptr, page_ids, v * BLOCK + first_column, key, HALVES, TILES, PAGES, E)
        bound = gl.where(k + 1 == windows, NEVER, v + FRESH)
        n = gl.sum((listed < bound).to(gl.int32), 1)
        whole = n // PER * PER
        waiting = gl.sum(gl.where(i == gl.expand_dims(whole, 1), listed, 0), 1)
        flush = (k + 1 == stop) | (waiting < v + FRESH - KEPT)
        taken = gl.where(flush, n, whole)
        held = (listed >= gl.maximum(v - KEPT, 0)) & (listed < gl.minimum(v + FRESH, LIMIT))
        slot = gl.where(held, (listed.to(gl.uint32) % RING).to(gl.int32), RING)
        meet(HALVES)  # every warp has finished with the previous window
        place = half * SP + share
        write_word(lists_at + gl.expand_dims(place, 1) * (LIST * 4) + i * 4, slot * (BLOCK * 128))
        write_four(work_at + place * 16, taken, pending, end, (n == LIST).to(gl.int32))
        if decoded < k:
            for t in gl.static_range(TILES):
                low, high, factor = expand_keys(words[t], scales[t])
                to = v % RING + (t * HALVES + half) * PER + block
                to = gl.where(to >= RING, to - RING, to)
                write_keys(low, high, _over_bytes(own + to * (BLOCK * 128), L4) + piece)
                write_factors(factor.to(gl.int32, bitcast=True), factors_at + to * (BLOCK * 4) + line_of % 4 * 8)
        decoded = k
        meet(HALVES)
        pending += taken
        listed = gl.expand_dims(pending, 1) + i
        listed = gl.load(ids + listed, mask=listed < counts, other=NEVER)
        page_ids = _pages_of(
            pages, (k + 1) * (FRESH * BLOCK) + first_column, line_of % 4, HALVES * TILE, TILES, E, COLUMNS
        )
        k += 1 - _score_rows(
            out_ptr + (b * S + half * SHARE).to(gl.int64) * WIDTH, work_at, half, lists_at + half * SP * (LIST * 4), own,
            factors_at, q_low, q_high, weights, ones, SP, HALVES, SHARE, HEADS, WIDTH, LIST,
        )  # fmt: skip


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
    RL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gdc_wait()
    program, programs, b = gl.program_id(0), gl.num_programs(0), gl.program_id(1)
    row = gl.arange(0, 32, RL)
    end = gl.load(end_ptr + b * S + row, mask=row < S, other=0)
    count = (gl.minimum(gl.maximum(end, 0), WIDTH) + (BLOCK - 1)) // BLOCK
    newest = gl.load(ids_ptr + (b * S + row) * KB + count - 1, mask=count > 0, other=-1)
    newest = gl.minimum(gl.maximum(gl.max(newest, 0), 0), COLUMNS * E // BLOCK - 1)
    windows = gl.where(gl.max(count, 0) > 0, newest // FRESH + 1, 0)
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
    line_of = gl.arange(0, 64, key_layout(4))
    head_sums(ones, HEADS, HEADS)
    blank = own + (FRESH + KEPT) * (BLOCK * 128)
    write_keys(gl.zeros([64, 4, 4, 4], gl.uint8, tile_layout(4)), gl.zeros([64, 4, 4, 4], gl.uint8, tile_layout(4)),
                blank + _piece(line_of, tile_layout(4)))  # fmt: skip
    write_factors(
        line_of * 0, own + (FRESH + KEPT + 1) * (BLOCK * 128) + (FRESH + KEPT) * (BLOCK * 4) + line_of % 4 * 8
    )
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
