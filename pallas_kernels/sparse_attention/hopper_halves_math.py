"""Two warp groups that multiply in turn, for hopper_halves_kernel.py. Imports Triton.

Tile n belongs to warp group n % 2. It computes the tile's logits and softmax, publishes the probabilities and the new
peaks, and both warp groups add the tile's values, each to its half of the channels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pallas_kernels.sparse_attention.hopper_kernel import LOG2E, SHIFT, TILE


@gluon.jit
def load_row(
    t, rows: gl.constexpr, slots_ptr, pos_ptr, start_ptr, end_ptr, S: gl.constexpr, BOUNDS: gl.constexpr
):  # fmt: skip
    """Of query row t: its ring's slot, its position, and the window's bounds if BOUNDS; t may lie behind the last row."""
    t = gl.minimum(t, rows - 1)
    slot, position = gl.load(slots_ptr + t // S), gl.load(pos_ptr + t)
    start, end = 0, position + 1
    if BOUNDS:
        start, end = gl.load(start_ptr + t), gl.load(end_ptr + t)
    return slot, position, start, end


@gluon.jit
def row_range(slot, position, start, end, N_SLOTS: gl.constexpr, WINDOW: gl.constexpr, K: gl.constexpr):
    """Of a loaded row: its ring's slot, the window's first position and end, its tiles of the window and of the selected
    entries, none for a row that is padding or of an invalid request."""
    valid = (position >= 0) & (slot >= 0) & (slot < N_SLOTS)
    first = gl.maximum(gl.maximum(start, end - WINDOW), 0)
    ring_tiles = gl.where(valid, (gl.maximum(end - first, 0) + TILE - 1) // TILE, 0)
    return gl.where(valid, slot, 0), first, end, ring_tiles, gl.where(valid, (K + TILE - 1) // TILE, 0)


@gluon.jit
def _counts(n, first, end, ring_tiles, chosen, ENTRIES: gl.constexpr, K: gl.constexpr, L: gl.constexpr):
    """Which keys of tile n there are, i32[TILE]."""
    column = n * TILE + gl.arange(0, TILE, L)
    there = first + column < end
    if K > 0:
        k = column - ring_tiles * TILE
        index = gl.load(chosen + k, mask=(k >= 0) & (k < K), other=-1)
        there = gl.where(n < ring_tiles, there, (index >= 0) & (index < ENTRIES))
    return there.to(gl.int32)


@gluon.jit
def _softmax(s, mask, m, total, scale_log2: gl.constexpr, N: gl.constexpr):
    """-> probabilities f32[N, TILE] relative to the new peaks, those peaks, a thread's sums, what the old ones shrink by.
    Peaks are of the products, before the scale."""
    s = gl.where(gl.expand_dims(mask, 0), s, float("-inf"))
    peak = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s * scale_log2 - gl.expand_dims(peak * scale_log2, 1))
    shrink = gl.exp2((m - peak) * scale_log2)
    # a thread's own columns only; lanes are added up once, at the end
    part = gl.sum(gl.sum(p.reshape([N, TILE // 8, 4, 2]), 3), 1)
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    total = total * gl.expand_dims(gl.convert_layout(shrink, rows), 1) + part
    return p, peak, total, shrink


@gluon.jit
def _store_output(
    t, acc_e, acc_o, inverse, cos_ptr, sin_ptr, out_ptr, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr,
    SIDE: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Round, rotate back and store this side's half of the channel pairs."""
    H: gl.constexpr = D // 2
    even, odd = (acc_e * inverse).to(gl.bfloat16), (acc_o * inverse).to(gl.bfloat16)
    channel = gl.arange(0, H // 2, gl.SliceLayout(0, A)) + SIDE * (H // 2)
    if (SIDE + 1) * (H // 2) > H - PAIRS:
        pair = channel - (H - PAIRS)
        cos = gl.expand_dims(gl.load(cos_ptr + t * PAIRS + pair, mask=pair >= 0, other=1.0), 0)
        sin = gl.expand_dims(gl.load(sin_ptr + t * PAIRS + pair, mask=pair >= 0, other=0.0), 0)
        re, im = even.to(gl.float32), odd.to(gl.float32)
        even, odd = (re * cos + im * sin).to(gl.bfloat16), (im * cos - re * sin).to(gl.bfloat16)
    low = even.to(gl.uint16, bitcast=True).to(gl.uint32)
    high = odd.to(gl.uint16, bitcast=True).to(gl.uint32)
    head = gl.arange(0, N, gl.SliceLayout(1, A))
    at = gl.expand_dims((t * N + head) * H, 1) + gl.expand_dims(channel, 0)
    gl.store(out_ptr.to(gl.pointer_type(gl.uint32)) + at, low | (high << 16))


@gluon.jit
def _add_other(
    n, ke, ko, p_smem, peaks, given, ready, m, total, acc_e, acc_o,
    scale_log2: gl.constexpr, N: gl.constexpr, SIDE: gl.constexpr, SL: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Begin to add tile n, the other side's, once its probabilities are published."""
    mbarrier.wait(given.index(1 - SIDE), (n >> 1) & 1)
    mbarrier.wait(ready.index(2 - SIDE), (n >> 1) & 1)
    peak = peaks.index(1 - SIDE).load(gl.SliceLayout(1, SL))
    shrink = gl.exp2((m - peak) * scale_log2)
    total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout)), 1)
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, A)), 1)
    acc_e, acc_o = acc_e * shrink, acc_o * shrink
    acc_e = warpgroup_mma(p_smem.index(1 - SIDE), ke.index(2 - SIDE), acc_e, is_async=True)
    acc_o = warpgroup_mma(p_smem.index(1 - SIDE), ko.index(2 - SIDE), acc_o, is_async=True)
    return acc_e, acc_o, peak, total


@gluon.jit
def _add_own(
    n, there, m, total, acc_e, acc_o, qe, qo, ke, ko, p_smem, peaks, counts, ready, given, free,
    scale_log2: gl.constexpr, N: gl.constexpr, SIDE: gl.constexpr, FIRST: gl.constexpr, SL: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """The logits and the softmax of tile n, this side's, then both tiles' values: those of the tile before (unless it is
    the row's FIRST) while the softmax is computed."""
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    counts.store(there)
    s = gl.zeros([N, TILE], gl.float32, SL)
    never = n >> 20  # 0, but not to the compiler: it would keep all 32 descriptors of the query in registers
    mbarrier.wait(ready.index(3 * SIDE), (n >> 1) & 1)
    ke_n, ko_n = ke.index(3 * SIDE + never), ko.index(3 * SIDE + never)
    s = warpgroup_mma(qe.index(SIDE + never), ke_n.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(qo.index(SIDE + never), ko_n.permute((1, 0)), s, is_async=True)
    mbarrier.wait(ready.index(1 + SIDE), (n >> 1) & 1)
    ke_m, ko_m = ke.index(1 + SIDE + never), ko.index(1 + SIDE + never)
    s = warpgroup_mma(qe.index(1 - SIDE + never), ke_m.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(qo.index(1 - SIDE + never), ko_m.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if not FIRST:
        acc_e, acc_o, m, total = _add_other(
            n - 1, ke, ko, p_smem, peaks, given, ready, m, total, acc_e, acc_o, scale_log2, N, SIDE, SL, A
        )
        gl.thread_barrier()  # the mask is read behind it, so that the softmax is not moved before those products
    mask = counts.load(gl.SliceLayout(0, SL)) != 0
    p, m, total, shrink = _softmax(s, mask, m, total, scale_log2, N)
    p = p.to(gl.bfloat16)
    p_smem.index(SIDE).store(p)
    peaks.index(SIDE).store(m)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(given.index(SIDE), count=1)
    if not FIRST:
        acc_e, acc_o = warpgroup_mma_wait(0, deps=[acc_e, acc_o])
        gl.thread_barrier()  # every warp of this side has finished with the tile before
        mbarrier.arrive(free.index(2 - SIDE), count=1)
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, A)), 1)
    p = gl.convert_layout(p, P)
    acc_e, acc_o = acc_e * shrink, acc_o * shrink
    acc_e = warpgroup_mma(p, ke_n, acc_e, is_async=True)
    acc_o = warpgroup_mma(p, ko_n, acc_o, is_async=True)
    acc_e, acc_o, p = warpgroup_mma_wait(0, deps=[acc_e, acc_o, p])
    gl.thread_barrier()
    mbarrier.arrive(free.index(3 * SIDE), count=1)
    return m, total, acc_e, acc_o


@gluon.jit
def attend_half(
    slots_ptr, pos_ptr, start_ptr, end_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    qe, qo, ke, ko, p_smem, peaks, counts, sums, asked, ready, given, free, summed,
    rows: gl.constexpr, programs: gl.constexpr, scale_log2: gl.constexpr, S: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, PAIRS: gl.constexpr, N_SLOTS: gl.constexpr, WINDOW: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr, BOUNDS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Warp group SIDE: the logits of every other tile and channels SIDE * D/2 .. of every row's output. Tiles are counted
    through all rows, so that the warp groups take turns from row to row too.

    Barriers: `asked` the row's query lies there; `ready` a tile is
    decoded; `given` its probabilities and peaks are published; `free` both warp groups are done with it; `summed` a
    side's sums of the row are published. Probabilities and peaks have a buffer a side: it is free again with the
    tile's keys, whose buffer its owner waits for.
    """
    H: gl.constexpr = D // 2
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    C: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FIRST_TILE: gl.constexpr = True
    LATER_TILE: gl.constexpr = False
    counts = counts.index(SIDE)
    base, query = 0, 0
    row = load_row(gl.program_id(0), rows, slots_ptr, pos_ptr, start_ptr, end_ptr, S, BOUNDS)
    for t in range(gl.program_id(0), rows, programs):
        slot, first, end, ring_tiles, pick_tiles = row_range(row[0], row[1], row[2], row[3], N_SLOTS, WINDOW, K)
        row = load_row(t + programs, rows, slots_ptr, pos_ptr, start_ptr, end_ptr, S, BOUNDS)
        chosen = gslot_ptr + t * K
        tiles = ring_tiles + pick_tiles
        m = gl.full([N], -1e30, gl.float32, gl.SliceLayout(1, SL))
        total = gl.sum(gl.sum(gl.full([N, TILE], 0.0, gl.float32, SL).reshape([N, TILE // 8, 4, 2]), 3), 1)
        acc_e = gl.zeros([N, H // 2], gl.float32, A)
        acc_o = gl.zeros([N, H // 2], gl.float32, A)
        mine = (base + SIDE) & 1
        there = _counts(mine, first, end, ring_tiles, chosen, ENTRIES, K, C)  # one tile of this side ahead
        if tiles > 0:
            mbarrier.wait(asked.index(0), query)
        start = mine
        if (mine == 0) & (tiles > 0):  # there is no tile before
            m, total, acc_e, acc_o = _add_own(
                base, there, m, total, acc_e, acc_o, qe, qo, ke, ko, p_smem, peaks, counts,
                ready, given, free, scale_log2, N, SIDE, FIRST_TILE, SL, A,
            )
            there = _counts(2, first, end, ring_tiles, chosen, ENTRIES, K, C)
            start = 2
        for i in range(start, tiles, 2):
            ahead = _counts(i + 2, first, end, ring_tiles, chosen, ENTRIES, K, C)
            m, total, acc_e, acc_o = _add_own(
                base + i, there, m, total, acc_e, acc_o, qe, qo, ke, ko, p_smem, peaks, counts,
                ready, given, free, scale_log2, N, SIDE, LATER_TILE, SL, A,
            )
            there = ahead
        base += tiles
        if (tiles > 0) & ((base & 1) == SIDE):  # the last tile was the other side's
            sum_e, sum_o, m, total = _add_other(
                base - 1, ke, ko, p_smem, peaks, given, ready, m, total, acc_e, acc_o, scale_log2, N, SIDE, SL, A
            )
            acc_e, acc_o = warpgroup_mma_wait(0, deps=[sum_e, sum_o])
            gl.thread_barrier()
            mbarrier.arrive(free.index(2 - SIDE), count=1)
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SL))
        if tiles > 0:
            # two rows' sums apart: a side is at most one row ahead of the other's reading
            sums.index(2 * SIDE + query).store(total)
            gl.thread_barrier()
            mbarrier.arrive(summed.index(SIDE), count=1)
            mbarrier.wait(summed.index(1 - SIDE), query)
            total += sums.index(2 - 2 * SIDE + query).load(gl.SliceLayout(1, SL))
            query ^= 1
        sink = gl.load(sink_ptr + gl.arange(0, N, gl.SliceLayout(1, SL))) * LOG2E
        inverse = gl.where(total > 0, SHIFT / (total + gl.exp2(sink - m * scale_log2)), 0.0)
        inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, A)), 1)
        _store_output(t, acc_e, acc_o, inverse, cos_ptr, sin_ptr, out_ptr, N, D, PAIRS, SIDE, A)
