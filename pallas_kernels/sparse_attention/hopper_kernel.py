"""The Hopper kernel of sparse attention, in Gluon. Imports Triton: import it only where a GPU kernel is wanted.

One program per query row: all N heads of the row share its keys. A warp group turns tiles of 64 keys from bytes into
bf16, in two shared-memory buffers; two other warp groups multiply them, each tile being K and V at once. Even and odd
channels live in two planes, so that an FP4 byte, an FP8 pair and a rotary pair are each one element of both planes, and
decoding, inverse RoPE and the store need no shuffles. The query (64 KiB at 64 x 512) stays in shared memory, the
accumulators in registers.

Bytes become bf16 by moving their bits into a bf16 of tiny exponent and one packed multiplication with the group's scale
(exact: such a product has at most 6 significant bits). Planes carry keys times 2**-32, which keeps that multiplier
finite for every scale below 2**34; logits and output take the factor back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

TILE = gl.constexpr(64)  # keys a tile
RINGS = gl.constexpr(16)  # ring rows decoded at once: bounds the decoder's registers
PICKS = gl.constexpr(32)  # selected entries decoded at once
DECODER_REGISTERS = gl.constexpr(112)
SHIFT = gl.constexpr(2.0**32)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _split_fp8(x, factor):
    """i32[...] of four e4m3, i32[...] factors (a bf16 twice) -> (even, odd) bf16 pairs, value * 2**-120 * factor."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        shl.b32 a, $2, 4; shl.b32 b, $2, 8;
        and.b32 a, a, 0x07F007F0; and.b32 b, b, 0x80008000; or.b32 a, a, b;
        mul.rn.bf16x2 $0, a, $3;
        shr.b32 a, $2, 4; and.b32 b, $2, 0x80008000;
        and.b32 a, a, 0x07F007F0; or.b32 a, a, b;
        mul.rn.bf16x2 $1, a, $3;
        }""",
        "=&r,=&r,r,r", [x, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _split_fp4(x, factor):
    """i32[...] of eight e2m1, i32[...] factors (a bf16 twice) -> four i32[...] bf16 pairs, value * 2**-126 * factor:
    even channels 0 2, even channels 4 6, odd channels 1 3, odd channels 5 7."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 p, a, b;
        prmt.b32 p, $4, 0, 0x1404;
        shr.b32 a, p, 2; shl.b32 b, p, 4;
        and.b32 a, a, 0x01C001C0; and.b32 b, b, 0x80008000; or.b32 a, a, b;
        mul.rn.bf16x2 $0, a, $5;
        shr.b32 a, p, 6; and.b32 b, p, 0x80008000;
        and.b32 a, a, 0x01C001C0; or.b32 a, a, b;
        mul.rn.bf16x2 $2, a, $5;
        prmt.b32 p, $4, 0, 0x3424;
        shr.b32 a, p, 2; shl.b32 b, p, 4;
        and.b32 a, a, 0x01C001C0; and.b32 b, b, 0x80008000; or.b32 a, a, b;
        mul.rn.bf16x2 $1, a, $5;
        shr.b32 a, p, 6; and.b32 b, p, 0x80008000;
        and.b32 a, a, 0x01C001C0; or.b32 a, a, b;
        mul.rn.bf16x2 $3, a, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r", [x, factor], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_window(base, position, end, RING: gl.constexpr, D: gl.constexpr, L2: gl.constexpr, L3: gl.constexpr):
    """RINGS ring rows from `position` on -> (i32[RINGS, D/4] words, u8[RINGS, D/32] scales)."""
    RECORD: gl.constexpr = D + D // 32
    p = position + gl.arange(0, RINGS, gl.SliceLayout(1, L2))
    word = gl.arange(0, D // 4, gl.SliceLayout(0, L2))
    at = gl.expand_dims((p % RING) * (RECORD // 4), 1) + gl.expand_dims(word, 0)
    words = gl.load(base.to(gl.pointer_type(gl.int32)) + at, mask=gl.expand_dims(p < end, 1), other=0)
    p = position + gl.arange(0, RINGS, gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    group = gl.arange(0, D // 32, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    at = gl.expand_dims((p % RING) * RECORD + D, 1) + gl.expand_dims(group, 0)
    return words, gl.load(base + at, mask=gl.expand_dims(p < end, 1), other=0)


@gluon.jit
def _store_window(words, scale, even_plane, odd_plane, D: gl.constexpr, L3: gl.constexpr):
    # factor 2**(byte - 127 + 120 - 32): exponent field byte + 88, kept finite
    field = gl.minimum(scale.to(gl.int32) + 88, 254)
    factor = gl.expand_dims((field << 7) | (field << 23), 2)
    words = gl.convert_layout(words.reshape([RINGS, D // 32, 8]), L3, assert_trivial=True)
    even, odd = _split_fp8(words, factor)
    even_plane.store(even.reshape([RINGS, D // 4]))
    odd_plane.store(odd.reshape([RINGS, D // 4]))


@gluon.jit
def _load_slots(base, first, K: gl.constexpr, L2: gl.constexpr):
    k = first + gl.arange(0, PICKS, gl.SliceLayout(1, L2))
    return gl.load(base + k, mask=k < K, other=-1)


@gluon.jit
def _load_global(base, slot, ENTRIES: gl.constexpr, D: gl.constexpr, L2: gl.constexpr, L3: gl.constexpr):
    """PICKS entries -> (i32[PICKS, D/8] words, u8[PICKS, D/16] scales); a slot outside the pool gives zeros."""
    RECORD: gl.constexpr = D // 2 + D // 16
    mask = (slot >= 0) & (slot < ENTRIES)
    row = gl.where(mask, slot, 0)
    word = gl.arange(0, D // 8, gl.SliceLayout(0, L2))
    at = gl.expand_dims(row * (RECORD // 4), 1) + gl.expand_dims(word, 0)
    words = gl.load(base.to(gl.pointer_type(gl.int32)) + at, mask=gl.expand_dims(mask, 1), other=0)
    S2: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    row, mask = gl.convert_layout(row, S2), gl.convert_layout(mask, S2)
    group = gl.arange(0, D // 16, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    at = gl.expand_dims(row.to(gl.int64) * RECORD + D // 2, 1) + gl.expand_dims(group, 0)
    return words, gl.load(base + at, mask=gl.expand_dims(mask, 1), other=0)


@gluon.jit
def _store_global(words, scale, even_plane, odd_plane, D: gl.constexpr, L3: gl.constexpr):
    # an e4m3 scale's bits as f32 are scale * 2**-120; the factor is scale * 2**(126 - 32), exact in bf16
    tiny = (scale.to(gl.int32) << 20).to(gl.float32, bitcast=True)
    bits = (tiny * 1.329227995784916e36 * 1.9807040628566084e28).to(gl.int32, bitcast=True)
    factor = gl.expand_dims(bits | ((bits >> 16) & 0xFFFF), 2)
    words = gl.convert_layout(words.reshape([PICKS, D // 16, 2]), L3, assert_trivial=True)
    e0, e1, o0, o1 = _split_fp4(words, factor)
    even_plane.store(gl.join(e0, e1).reshape([PICKS, D // 4]))
    odd_plane.store(gl.join(o0, o1).reshape([PICKS, D // 4]))


@gluon.jit
def _decode_tiles(
    ring, first, end, ring_tiles, glob_ptr, chosen, pick_tiles, we, wo, ready, free,
    RING: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The decoding warp group: fill buffer n % 2 with tile n as soon as it is free, window tiles first."""
    W2: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    W3: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [4, 1, 1], [2, 1, 0])
    G2: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    G3: gl.constexpr = gl.BlockedLayout([1, 2, 2], [2, 16, 1], [4, 1, 1], [2, 1, 0])
    a, a_scale = _load_window(ring, first, end, RING, D, W2, W3)
    b, b_scale = _load_window(ring, first + RINGS, end, RING, D, W2, W3)
    for n in range(ring_tiles):
        even, odd = we.index(n & 1), wo.index(n & 1)
        mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
        for part in gl.static_range(0, TILE, 2 * RINGS):
            ahead = first + n * TILE + part + 2 * RINGS
            _store_window(a, a_scale, even.slice(part, RINGS), odd.slice(part, RINGS), D, W3)
            a, a_scale = _load_window(ring, ahead, end, RING, D, W2, W3)
            _store_window(b, b_scale, even.slice(part + RINGS, RINGS), odd.slice(part + RINGS, RINGS), D, W3)
            b, b_scale = _load_window(ring, ahead + RINGS, end, RING, D, W2, W3)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready.index(n & 1), count=1)
    if K > 0:
        c, c_scale = _load_global(glob_ptr, _load_slots(chosen, 0, K, G2), ENTRIES, D, G2, G3)
        d, d_scale = _load_global(glob_ptr, _load_slots(chosen, PICKS, K, G2), ENTRIES, D, G2, G3)
        c_slot, d_slot = _load_slots(chosen, TILE, K, G2), _load_slots(chosen, TILE + PICKS, K, G2)
        for j in range(pick_tiles):
            n = ring_tiles + j
            even, odd = we.index(n & 1), wo.index(n & 1)
            mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
            _store_global(c, c_scale, even.slice(0, PICKS), odd.slice(0, PICKS), D, G3)
            c, c_scale = _load_global(glob_ptr, c_slot, ENTRIES, D, G2, G3)
            c_slot = _load_slots(chosen, (j + 2) * TILE, K, G2)
            _store_global(d, d_scale, even.slice(PICKS, PICKS), odd.slice(PICKS, PICKS), D, G3)
            d, d_scale = _load_global(glob_ptr, d_slot, ENTRIES, D, G2, G3)
            d_slot = _load_slots(chosen, (j + 2) * TILE + PICKS, K, G2)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(n & 1), count=1)


@gluon.jit
def _attend_tile(
    n, mask, m, total, acc_e, acc_o, qe, qo, ke_all, ko_all, p_smem, ready, free,
    scale_log2: gl.constexpr, N: gl.constexpr, SL: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Online softmax over tile n, whose columns count where `mask` is true."""
    ke, ko = ke_all.index(n & 1), ko_all.index(n & 1)
    mbarrier.wait(ready.index(n & 1), (n >> 1) & 1)
    s = gl.zeros([N, TILE], gl.float32, SL)
    s = warpgroup_mma(qe, ke.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(qo, ko.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    s = gl.where(gl.expand_dims(mask, 0), s * scale_log2, float("-inf"))
    peak = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s - gl.expand_dims(peak, 1))
    shrink = gl.exp2(m - peak)
    # a thread's own columns only; warps and lanes are added up once, at the end
    part = gl.sum(gl.sum(p.reshape([N, 2, 4, 4, 2]), 4), 2)
    PART: gl.constexpr = part.type.layout
    shrunk = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(2, PART)))
    total = total * gl.expand_dims(gl.expand_dims(shrunk, 1), 2) + part
    p_smem.store(p.to(gl.bfloat16))
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, A)), 1)
    fence_async_shared()
    gl.thread_barrier()
    acc_e = warpgroup_mma(p_smem, ke, acc_e * shrink, is_async=True)
    acc_o = warpgroup_mma(p_smem, ko, acc_o * shrink, is_async=True)
    acc_e, acc_o = warpgroup_mma_wait(0, deps=[acc_e, acc_o])
    gl.thread_barrier()  # both warp groups have finished with the buffer and the probabilities
    mbarrier.arrive(free.index(n & 1), count=1)
    return peak, total, acc_e, acc_o


@gluon.jit
def _attend(
    t, valid, first, end, ring_tiles, chosen, pick_tiles, q, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    qe, qo, ke, ko, p_smem, ready, free,
    scale_log2: gl.constexpr, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, ENTRIES: gl.constexpr,
    K: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """The two multiplying warp groups: query in, tiles as they get ready, result out."""
    H: gl.constexpr = D // 2
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    even = (q & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    odd = ((q >> 16) & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    if ROTATE:
        pair = gl.arange(0, H, gl.SliceLayout(0, q.type.layout)) - (H - PAIRS)
        cos = gl.expand_dims(gl.load(cos_ptr + t * PAIRS + pair, mask=pair >= 0, other=1.0), 0)
        sin = gl.expand_dims(gl.load(sin_ptr + t * PAIRS + pair, mask=pair >= 0, other=0.0), 0)
        re, im = even.to(gl.float32), odd.to(gl.float32)
        even, odd = (re * cos - im * sin).to(gl.bfloat16), (im * cos + re * sin).to(gl.bfloat16)
    qe.store(even)
    qo.store(odd)
    fence_async_shared()
    gl.thread_barrier()
    m = gl.full([N], -1e30, gl.float32, gl.SliceLayout(1, SL))
    total = gl.sum(gl.sum(gl.full([N, TILE], 0.0, gl.float32, SL).reshape([N, 2, 4, 4, 2]), 4), 2)
    acc_e = gl.zeros([N, H], gl.float32, A)
    acc_o = gl.zeros([N, H], gl.float32, A)
    column = gl.arange(0, TILE, gl.SliceLayout(0, SL))
    for n in range(ring_tiles + pick_tiles):
        mask = first + n * TILE + column < end
        if K > 0:
            k = (n - ring_tiles) * TILE + column
            index = gl.load(chosen + k, mask=(k >= 0) & (k < K), other=-1)
            mask = gl.where(n < ring_tiles, mask, (index >= 0) & (index < ENTRIES))
        m, total, acc_e, acc_o = _attend_tile(
            n, mask, m, total, acc_e, acc_o, qe, qo, ke, ko, p_smem, ready, free, scale_log2, N, SL, A
        )
    head = gl.arange(0, N, gl.SliceLayout(1, SL))
    sink = gl.load(sink_ptr + head) * LOG2E
    total = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), gl.SliceLayout(1, SL))
    inverse = gl.where(total > 0, SHIFT / (total + gl.exp2(sink - m)), 0.0)
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, A)), 1)
    re = (acc_e * inverse).to(gl.bfloat16).to(gl.float32)
    im = (acc_o * inverse).to(gl.bfloat16).to(gl.float32)
    channel = gl.arange(0, H, gl.SliceLayout(0, A))
    pair = channel - (H - PAIRS)
    cos = gl.expand_dims(gl.load(cos_ptr + t * PAIRS + pair, mask=pair >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + t * PAIRS + pair, mask=pair >= 0, other=0.0), 0)
    low = (re * cos + im * sin).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    high = (im * cos - re * sin).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    head = gl.arange(0, N, gl.SliceLayout(1, A))
    at = gl.expand_dims((t * N + head) * H, 1) + gl.expand_dims(channel, 0)
    gl.store(out_ptr.to(gl.pointer_type(gl.uint32)) + at, gl.where(valid, low | (high << 16), 0))


@gluon.jit
def attention(
    q_ptr, win_ptr, slots_ptr, pos_ptr, start_ptr, end_ptr, glob_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    scale_log2: gl.constexpr, S: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, PAIRS: gl.constexpr,
    N_SLOTS: gl.constexpr, RING: gl.constexpr, WINDOW: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr,
    BOUNDS: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Program t computes query row t, which lies behind FIRST other columns. start_ptr and end_ptr are read if BOUNDS; the
    query is rotated if ROTATE; ENTRIES = P * E; K = selected slots."""
    H: gl.constexpr = D // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)  # the same bytes in 32-bit elements, for the decoder
    gdc_wait()
    t = gl.program_id(0)
    QL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    head, channel = gl.arange(0, N, gl.SliceLayout(1, QL)), gl.arange(0, H, gl.SliceLayout(0, QL))
    at = gl.expand_dims(t * (FIRST // 2 + N * H) + FIRST // 2 + head * H, 1) + gl.expand_dims(channel, 0)
    q = gl.load(q_ptr.to(gl.pointer_type(gl.int32)) + at)
    slot = gl.load(slots_ptr + t // S)
    position = gl.load(pos_ptr + t)
    valid = (position >= 0) & (slot >= 0) & (slot < N_SLOTS)
    end = position + 1
    first = gl.maximum(end - WINDOW, 0)
    if BOUNDS:
        end = gl.load(end_ptr + t)
        first = gl.maximum(gl.maximum(gl.load(start_ptr + t), end - WINDOW), 0)
    ring = win_ptr + gl.where(valid, slot, 0).to(gl.int64) * (RING * (D + D // 32))
    ring_tiles = gl.where(valid, (gl.maximum(end - first, 0) + TILE - 1) // TILE, 0)
    pick_tiles = gl.where(valid, (K + TILE - 1) // TILE, 0)
    chosen = gslot_ptr + t * K

    qe = gl.allocate_shared_memory(gl.bfloat16, [N, H], SHARED)
    qo = gl.allocate_shared_memory(gl.bfloat16, [N, H], SHARED)
    ke = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, H], SHARED)
    ko = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, H], SHARED)
    we = ke._reinterpret(gl.int32, [2, TILE, H // 2], WORDS)
    wo = ko._reinterpret(gl.int32, [2, TILE, H // 2], WORDS)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(free.index(n), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    t, valid, first, end, ring_tiles, chosen, pick_tiles, q, sink_ptr, cos_ptr, sin_ptr, out_ptr,
                    qe, qo, ke, ko, p_smem, ready, free, scale_log2, N, D, PAIRS, ENTRIES, K, ROTATE,
                ),
            ),
            (
                _decode_tiles,
                (
                    ring, first, end, ring_tiles, glob_ptr, chosen, pick_tiles, we, wo, ready, free,
                    RING, ENTRIES, K, D,
                ),
            ),
        ],
        [4],
        [DECODER_REGISTERS],
    )  # fmt: skip
