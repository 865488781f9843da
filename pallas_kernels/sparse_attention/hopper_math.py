"""Two warp groups that multiply in turn, for hopper_kernel.py. Imports Triton.

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

TILE = gl.constexpr(64)  # keys a tile
SHIFT = gl.constexpr(2.0**32)  # the key planes hold keys / SHIFT
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def row_range(
    t, slots_ptr, pos_ptr, start_ptr, end_ptr, S: gl.constexpr, N_SLOTS: gl.constexpr, WINDOW: gl.constexpr,
    K: gl.constexpr, BOUNDS: gl.constexpr,
):  # fmt: skip
    """Of query row t: its ring's slot, the window's first position and end, its tiles of the window and of the selected
    entries, none for a row that is padding or of an invalid request."""
    slot = gl.load(slots_ptr + t // S)
    position = gl.load(pos_ptr + t)
    valid = (position >= 0) & (slot >= 0) & (slot < N_SLOTS)
    end = position + 1
    first = gl.maximum(end - WINDOW, 0)
    if BOUNDS:
        end = gl.load(end_ptr + t)
        first = gl.maximum(gl.maximum(gl.load(start_ptr + t), end - WINDOW), 0)
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
    re = (acc_e * inverse).to(gl.bfloat16).to(gl.float32)
    im = (acc_o * inverse).to(gl.bfloat16).to(gl.float32)
    channel = gl.arange(0, H // 2, gl.SliceLayout(0, A)) + SIDE * (H // 2)
    pair = channel - (H - PAIRS)
    cos = gl.expand_dims(gl.load(cos_ptr + t * PAIRS + pair, mask=pair >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + t * PAIRS + pair, mask=pair >= 0, other=0.0), 0)
    low = (re * cos + im * sin).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    high = (im * cos - re * sin).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    head = gl.arange(0, N, gl.SliceLayout(1, A))
    at = gl.expand_dims((t * N + head) * H, 1) + gl.expand_dims(channel, 0)
    gl.store(out_ptr.to(gl.pointer_type(gl.uint32)) + at, low | (high << 16))


@gluon.jit
def attend_half(
    rows, slots_ptr, pos_ptr, start_ptr, end_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    qe, qo, ke, ko, p_smem, peaks, counts, sums, asked, answered, ready, given, free, summed,
    scale_log2: gl.constexpr, S: gl.constexpr, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr,
    N_SLOTS: gl.constexpr, WINDOW: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr, BOUNDS: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Warp group SIDE: the logits of every other tile and channels SIDE * D/2 .. of every row's output. Tiles are counted
    through all rows, so that the warp groups take turns from row to row too.

    Barriers: `asked` the row's query lies there; `answered` no logit of it is left to compute; `ready` a tile is
    decoded; `given` its probabilities and peaks are published; `free` both warp groups are done with it; `summed` a
    side's sums of the row are published. One buffer of probabilities and peaks is enough: only the owner of the next
    tile reads it, before it writes its own.
    """
    H: gl.constexpr = D // 2
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    C: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    counts = counts.index(SIDE)
    base, query = 0, 0
    for t in range(gl.program_id(0), rows, gl.num_programs(0)):
        slot, first, end, ring_tiles, pick_tiles = row_range(
            t, slots_ptr, pos_ptr, start_ptr, end_ptr, S, N_SLOTS, WINDOW, K, BOUNDS
        )
        chosen = gslot_ptr + t * K
        tiles = ring_tiles + pick_tiles
        m = gl.full([N], -1e30, gl.float32, gl.SliceLayout(1, SL))
        total = gl.sum(gl.sum(gl.full([N, TILE], 0.0, gl.float32, SL).reshape([N, TILE // 8, 4, 2]), 3), 1)
        acc_e = gl.zeros([N, H // 2], gl.float32, A)
        acc_o = gl.zeros([N, H // 2], gl.float32, A)
        # one tile of this side ahead
        there = _counts((base + SIDE) & 1, first, end, ring_tiles, chosen, ENTRIES, K, C)
        if tiles > 0:
            mbarrier.wait(asked.index(0), query)
        for i in range(tiles):
            n = base + i
            ke_n, ko_n = ke.index(n & 1), ko.index(n & 1)
            ve, vo = ke_n.slice(SIDE * (H // 2), H // 2, 1), ko_n.slice(SIDE * (H // 2), H // 2, 1)
            if (n & 1) == SIDE:
                counts.store(there)
                there = _counts(i + 2, first, end, ring_tiles, chosen, ENTRIES, K, C)
                mbarrier.wait(ready.index(n & 1), (n >> 1) & 1)
                s = gl.zeros([N, TILE], gl.float32, SL)
                never = i >> 20  # 0, but not to the compiler: it would keep all 32 descriptors of the query in registers
                s = warpgroup_mma(qe.index(never), ke_n.permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma(qo.index(never), ko_n.permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                mask = counts.load(gl.SliceLayout(0, SL)) != 0
                p, m, total, shrink = _softmax(s, mask, m, total, scale_log2, N)
                p = p.to(gl.bfloat16)
                p_smem.store(p)
                peaks.store(m)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(given.index(n & 1), count=1)
                # the tile before was the other side's, and published: its logits are done too
                mbarrier.arrive(answered.index(0), count=1, pred=i + 1 == tiles)
                shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, A)), 1)
                p = gl.convert_layout(p, P)
                acc_e = warpgroup_mma(p, ve, acc_e * shrink, is_async=True)
                acc_o = warpgroup_mma(p, vo, acc_o * shrink, is_async=True)
                acc_e, acc_o, p = warpgroup_mma_wait(0, deps=[acc_e, acc_o, p])
            else:
                mbarrier.wait(given.index(n & 1), (n >> 1) & 1)
                mbarrier.wait(ready.index(n & 1), (n >> 1) & 1)
                peak = peaks.load(gl.SliceLayout(1, SL))
                shrink = gl.exp2((m - peak) * scale_log2)
                m = peak
                total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout)), 1)
                shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, A)), 1)
                acc_e = warpgroup_mma(p_smem, ve, acc_e * shrink, is_async=True)
                acc_o = warpgroup_mma(p_smem, vo, acc_o * shrink, is_async=True)
                acc_e, acc_o = warpgroup_mma_wait(0, deps=[acc_e, acc_o])
            gl.thread_barrier()  # every warp of this side has finished with the tile
            mbarrier.arrive(free.index(n & 1), count=1)
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SL))
        if tiles > 0:
            # two rows' sums apart: a side is at most one row ahead of the other's reading
            sums.index(2 * SIDE + query).store(total)
            gl.thread_barrier()
            mbarrier.arrive(summed.index(SIDE), count=1)
            mbarrier.wait(summed.index(1 - SIDE), query)
            total += sums.index(2 - 2 * SIDE + query).load(gl.SliceLayout(1, SL))
            query ^= 1
        base += tiles
        sink = gl.load(sink_ptr + gl.arange(0, N, gl.SliceLayout(1, SL))) * LOG2E
        inverse = gl.where(total > 0, SHIFT / (total + gl.exp2(sink - m * scale_log2)), 0.0)
        inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, A)), 1)
        _store_output(t, acc_e, acc_o, inverse, cos_ptr, sin_ptr, out_ptr, N, D, PAIRS, SIDE, A)
