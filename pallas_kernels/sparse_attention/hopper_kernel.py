"""The Hopper kernel of sparse attention, in Gluon. Imports Triton: import it only where a GPU kernel is wanted.

Program p computes query rows p, p + programs, ...; all N heads of a row share its keys. One warp group loads, one
decodes and two multiply (hopper_math.py), and each goes on to the next row as soon as its own part of this one is
done. The loading one copies records, and the row's query, asynchronously into a ring of small parts, so that the
decoding one has no load in flight when it orders its stores before the tensor core's reads (that fence waits for every
load of the thread). The decoding one turns tiles of 64 keys from bytes into bf16, in two shared-memory buffers, each
tile being K and V at once.

Even and odd channels live in two planes, so that an FP4 byte, an FP8 pair and a rotary pair are each one element of
both planes, and decoding, inverse RoPE and the store need no shuffles. Bytes become bf16 by moving their bits into a
bf16 of tiny exponent and one packed multiplication with the group's scale (exact: such a product has at most 6
significant bits). Planes carry keys times 2**-32, which keeps that multiplier finite for every scale below 2**34;
logits and output take the factor back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.sparse_attention.hopper_math import TILE, attend_half, row_range

RINGS = gl.constexpr(8)  # ring rows a part
PICKS = gl.constexpr(16)  # selected entries a part: at 512 channels the same 4 KiB of codes
HEADS = gl.constexpr(8)  # heads of the query a part, half of their channels
PARTS = gl.constexpr(5)  # in the ring
LOADER_REGISTERS = gl.constexpr(32)


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
def _step(at, phase):
    """The next part of the ring and the parity of its round."""
    over = at + 1 == PARTS
    return gl.where(over, 0, at + 1), gl.where(over, phase ^ 1, phase)


@gluon.jit
def _load_parts(
    rows, slots_ptr, pos_ptr, start_ptr, end_ptr, q_ptr, win_ptr, glob_ptr, gslot_ptr, words, scales, picked,
    landed, taken,
    S: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, N_SLOTS: gl.constexpr, RING: gl.constexpr,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr, BOUNDS: gl.constexpr, PADDED: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """The loading warp group: of every row the query, the window, the selected entries, each part once its place is free."""
    H: gl.constexpr = D // 2
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    WS: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    G: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    GS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    WINDOW_RECORD: gl.constexpr = (D + D // 32) // 4
    RECORD: gl.constexpr = (D // 2 + D // 16) // 4
    OFFSET: gl.constexpr = gl.int64 if WIDE else gl.int32
    q_words = words._reinterpret(gl.int32, [PARTS, HEADS, H // 2], words.type.layout)
    ring_words = words._reinterpret(gl.int32, [PARTS, RINGS, D // 4], words.type.layout)
    ring_scales = scales._reinterpret(gl.int32, [PARTS, 4 * RINGS, D // 128], scales.type.layout)
    at, phase = 0, 1
    if PADDED:
        entry = gl.arange(0, PADDED, gl.BlockedLayout([4], [32], [4], [0]))
        ahead = gl.load(gslot_ptr + (gl.program_id(0) * K + entry), mask=entry < K, other=-1)
    for t in range(gl.program_id(0), rows, gl.num_programs(0)):
        slot, first, end, ring_tiles, pick_tiles = row_range(
            t, slots_ptr, pos_ptr, start_ptr, end_ptr, S, N_SLOTS, WINDOW, K, BOUNDS
        )
        if PADDED:
            picked.store(ahead)
            following = t + gl.num_programs(0)
            ahead = gl.load(gslot_ptr + (following * K + entry), mask=(entry < K) & (following < rows), other=-1)
        if ring_tiles + pick_tiles > 0:
            source = q_ptr.to(gl.pointer_type(gl.int32)) + (t * (FIRST // 2 + N * H) + FIRST // 2)
            head = gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(1, W)) * H, 1)
            word = gl.expand_dims(gl.arange(0, H // 2, gl.SliceLayout(0, W)), 0)
            for part in range(2 * N // HEADS):
                start = (part >> 1) * (HEADS * H) + (part & 1) * (H // 2)
                mbarrier.wait(taken.index(at), phase)
                async_copy.async_copy_global_to_shared(q_words.index(at), source + (start + (head + word)))
                async_copy.mbarrier_arrive(landed.index(at), increment_count=False)
                at, phase = _step(at, phase)
        source = (win_ptr + slot.to(gl.int64) * (RING * (D + D // 32))).to(gl.pointer_type(gl.int32))
        word = gl.expand_dims(gl.arange(0, D // 4, gl.SliceLayout(0, W)), 0)
        scale = gl.expand_dims(gl.arange(0, D // 128, gl.SliceLayout(0, WS)), 0) + D // 4
        for part in range(ring_tiles * (TILE // RINGS)):
            p = first + part * RINGS + gl.arange(0, RINGS, gl.SliceLayout(1, W))
            ps = first + part * RINGS + gl.arange(0, RINGS, gl.SliceLayout(1, WS))
            row, row_s = gl.expand_dims((p % RING) * WINDOW_RECORD, 1), gl.expand_dims((ps % RING) * WINDOW_RECORD, 1)
            mbarrier.wait(taken.index(at), phase)
            async_copy.async_copy_global_to_shared(
                ring_words.index(at), source + (row + word), mask=gl.expand_dims(p < end, 1)
            )
            async_copy.async_copy_global_to_shared(
                ring_scales.index(at).slice(0, RINGS), source + (row_s + scale), mask=gl.expand_dims(ps < end, 1)
            )
            async_copy.mbarrier_arrive(landed.index(at), increment_count=False)
            at, phase = _step(at, phase)
        if K > 0:
            source = glob_ptr.to(gl.pointer_type(gl.int32))
            word = gl.expand_dims(gl.arange(0, D // 8, gl.SliceLayout(0, G)), 0)
            scale = gl.expand_dims(gl.arange(0, D // 64, gl.SliceLayout(0, GS)), 0) + D // 8
            k, ks = gl.arange(0, PICKS, gl.SliceLayout(1, G)), gl.arange(0, PICKS, gl.SliceLayout(1, GS))
            if not PADDED:
                pick = gl.load(gslot_ptr + (t * K + k), mask=k < K, other=-1)
                pick_s = gl.load(gslot_ptr + (t * K + ks), mask=ks < K, other=-1)
            for part in range(pick_tiles * (TILE // PICKS)):
                if PADDED:
                    slots = picked._reinterpret(gl.int32, [PADDED // PICKS, PICKS], picked.type.layout).index(part)
                    pick, pick_s = slots.load(gl.SliceLayout(1, G)), slots.load(gl.SliceLayout(1, GS))
                k, ks = k + PICKS, ks + PICKS
                live, live_s = (pick >= 0) & (pick < ENTRIES), (pick_s >= 0) & (pick_s < ENTRIES)
                row = gl.expand_dims(gl.where(live, pick, 0).to(OFFSET) * RECORD, 1)
                row_s = gl.expand_dims(gl.where(live_s, pick_s, 0).to(OFFSET) * RECORD, 1)
                mbarrier.wait(taken.index(at), phase)
                async_copy.async_copy_global_to_shared(
                    words.index(at), source + (row + word), mask=gl.expand_dims(live, 1)
                )
                async_copy.async_copy_global_to_shared(
                    scales.index(at), source + (row_s + scale), mask=gl.expand_dims(live_s, 1)
                )
                async_copy.mbarrier_arrive(landed.index(at), increment_count=False)
                if not PADDED:
                    pick = gl.load(gslot_ptr + (t * K + k), mask=k < K, other=-1)
                    pick_s = gl.load(gslot_ptr + (t * K + ks), mask=ks < K, other=-1)
                at, phase = _step(at, phase)


@gluon.jit
def _decode_window(words, scale, even_plane, odd_plane, D: gl.constexpr, L3: gl.constexpr):
    """RINGS ring rows, i32[RINGS, D/4] and u8[RINGS, D/32] -> the rows of both planes."""
    # factor 2**(byte - 127 + 120 - 32): exponent field byte + 88, kept finite
    field = gl.minimum(scale.to(gl.int32) + 88, 254)
    factor = gl.expand_dims((field << 7) | (field << 23), 2)
    words = gl.convert_layout(words.reshape([RINGS, D // 32, 8]), L3, assert_trivial=True)
    even, odd = _split_fp8(words, factor)
    even_plane.store(even.reshape([RINGS, D // 4]))
    odd_plane.store(odd.reshape([RINGS, D // 4]))


@gluon.jit
def _decode_picks(words, scale, even_plane, odd_plane, D: gl.constexpr, L3: gl.constexpr):
    """PICKS entries, i32[PICKS, D/8] and u8[PICKS, D/16] -> the rows of both planes."""
    # an e4m3 scale's bits as f32 are scale * 2**-120; the factor is scale * 2**(126 - 32), exact in bf16
    tiny = (scale.to(gl.int32) << 20).to(gl.float32, bitcast=True)
    bits = (tiny * 1.329227995784916e36 * 1.9807040628566084e28).to(gl.int32, bitcast=True)
    factor = gl.expand_dims(bits | ((bits >> 16) & 0xFFFF), 2)
    words = gl.convert_layout(words.reshape([PICKS, D // 16, 2]), L3, assert_trivial=True)
    e0, e1, o0, o1 = _split_fp4(words, factor)
    even_plane.store(gl.join(e0, e1).reshape([PICKS, D // 4]))
    odd_plane.store(gl.join(o0, o1).reshape([PICKS, D // 4]))


@gluon.jit
def _rotate_query(t, cos_ptr, sin_ptr, qe, qo, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr):
    """Rotate the last PAIRS columns of the two query planes where they lie, 64 columns at a time."""
    H: gl.constexpr = D // 2
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for c in gl.static_range((H - PAIRS) // 64 * 64, H, 64):
        pair = c + gl.arange(0, 64, gl.SliceLayout(0, R)) - (H - PAIRS)
        cos = gl.expand_dims(gl.load(cos_ptr + t * PAIRS + pair, mask=pair >= 0, other=1.0), 0)
        sin = gl.expand_dims(gl.load(sin_ptr + t * PAIRS + pair, mask=pair >= 0, other=0.0), 0)
        for head in gl.static_range(0, N, 16):
            even, odd = qe.slice(head, 16).slice(c, 64, 1), qo.slice(head, 16).slice(c, 64, 1)
            re, im = even.load(R).to(gl.float32), odd.load(R).to(gl.float32)
            even.store((re * cos - im * sin).to(gl.bfloat16))
            odd.store((im * cos + re * sin).to(gl.bfloat16))


@gluon.jit
def _take(words, scales, landed, taken, at, phase, W: gl.constexpr, SL: gl.constexpr, ROWS: gl.constexpr):
    """A landed part -> (its words in layout W, the scales of its ROWS rows in layout SL), and its place is free again."""
    mbarrier.wait(landed.index(at), phase)
    x = words.index(at).load(W)
    scale = scales.index(at).slice(0, ROWS).load(SL)
    gl.thread_barrier()
    mbarrier.arrive(taken.index(at), count=1)
    at, phase = _step(at, phase)
    return x, scale, at, phase


@gluon.jit
def _decode_parts(
    rows, slots_ptr, pos_ptr, start_ptr, end_ptr, cos_ptr, sin_ptr, words, scales, landed, taken, qe, qo, we, wo,
    asked, answered, ready, free,
    S: gl.constexpr, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, N_SLOTS: gl.constexpr,
    WINDOW: gl.constexpr, K: gl.constexpr, BOUNDS: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """The decoding warp group: of every row the query, once the row before is `answered`, and its tiles, each into buffer
    n % 2 as soon as that is free. Tiles are counted through all rows."""
    H: gl.constexpr = D // 2
    WORDS: gl.constexpr = we.type.layout
    Q2: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    W2: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    W3: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [4, 1, 1], [2, 1, 0])
    # 8 bytes of codes a thread: they give 16 bytes of each plane, and neighbours' lie side by side
    G2: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    G3: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    WS: gl.constexpr = gl.SliceLayout(2, W3)
    GS: gl.constexpr = gl.SliceLayout(2, G3)
    q_words = words._reinterpret(gl.int32, [PARTS, HEADS, H // 2], words.type.layout)
    ring_words = words._reinterpret(gl.int32, [PARTS, RINGS, D // 4], words.type.layout)
    ring_scales = scales._reinterpret(gl.uint8, [PARTS, 4 * RINGS, D // 32], scales.type.layout)
    pick_scales = scales._reinterpret(gl.uint8, [PARTS, PICKS, D // 16], scales.type.layout)
    even_words = qe._reinterpret(gl.int32, [1, N, H // 2], WORDS).index(0)
    odd_words = qo._reinterpret(gl.int32, [1, N, H // 2], WORDS).index(0)
    at, phase, n, query = 0, 0, 0, 0
    for t in range(gl.program_id(0), rows, gl.num_programs(0)):
        slot, first, end, ring_tiles, pick_tiles = row_range(
            t, slots_ptr, pos_ptr, start_ptr, end_ptr, S, N_SLOTS, WINDOW, K, BOUNDS
        )
        if ring_tiles + pick_tiles > 0:
            mbarrier.wait(answered.index(0), query ^ 1)
            for part in gl.static_range(2 * N // HEADS):
                mbarrier.wait(landed.index(at), phase)
                x = q_words.index(at).load(Q2)
                gl.thread_barrier()
                mbarrier.arrive(taken.index(at), count=1)
                low, high = gl.split(x.reshape([HEADS, H // 4, 2]))
                even = even_words.slice(part // 2 * HEADS, HEADS).slice(part % 2 * (H // 4), H // 4, 1)
                odd = odd_words.slice(part // 2 * HEADS, HEADS).slice(part % 2 * (H // 4), H // 4, 1)
                even.store((low & 0xFFFF) | (high << 16))
                odd.store(((low >> 16) & 0xFFFF) | (high & -65536))
                at, phase = _step(at, phase)
            if ROTATE:
                gl.thread_barrier()
                _rotate_query(t, cos_ptr, sin_ptr, qe.index(0), qo.index(0), N, D, PAIRS)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(asked.index(0), count=1)
            query ^= 1
        for _ in range(ring_tiles):
            even, odd = we.index(n & 1), wo.index(n & 1)
            x, scale, at, phase = _take(ring_words, ring_scales, landed, taken, at, phase, W2, WS, RINGS)
            mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
            for part in gl.static_range(0, TILE, RINGS):
                now, its_scale = x, scale
                if part + RINGS < TILE:  # on its way while this one is decoded
                    x, scale, at, phase = _take(ring_words, ring_scales, landed, taken, at, phase, W2, WS, RINGS)
                _decode_window(now, its_scale, even.slice(part, RINGS), odd.slice(part, RINGS), D, W3)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(n & 1), count=1)
            n += 1
        if K > 0:
            for _ in range(pick_tiles):
                even, odd = we.index(n & 1), wo.index(n & 1)
                x, scale, at, phase = _take(words, pick_scales, landed, taken, at, phase, G2, GS, PICKS)
                mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
                for part in gl.static_range(0, TILE, PICKS):
                    now, its_scale = x, scale
                    if part + PICKS < TILE:
                        x, scale, at, phase = _take(words, pick_scales, landed, taken, at, phase, G2, GS, PICKS)
                    _decode_picks(now, its_scale, even.slice(part, PICKS), odd.slice(part, PICKS), D, G3)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(ready.index(n & 1), count=1)
                n += 1


@gluon.jit
def attention(
    q_ptr, win_ptr, slots_ptr, pos_ptr, start_ptr, end_ptr, glob_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    scale_log2: gl.constexpr, S: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, PAIRS: gl.constexpr,
    N_SLOTS: gl.constexpr, RING: gl.constexpr, WINDOW: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr,
    BOUNDS: gl.constexpr, ROTATE: gl.constexpr, ROWS: gl.constexpr, PADDED: gl.constexpr, WIDE: gl.constexpr,
    DECODER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """ROWS query rows, which lie behind FIRST other columns, in any number of programs of 4 + 12 warps. start_ptr and end_ptr
    are read if BOUNDS; the query is rotated if ROTATE; ENTRIES = P * E; K = selected slots, loaded a row ahead of their
    records if PADDED, a power of two from 64 and K on, and else a part ahead; their records' offsets in words take 64 bits
    if WIDE. The second multiplying warp group gets
    OTHER_REGISTERS registers a thread, the first what is left."""
    H: gl.constexpr = D // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)  # the same bytes in 32-bit elements, for the decoder
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qe = gl.allocate_shared_memory(gl.bfloat16, [1, N, H], SHARED)
    qo = gl.allocate_shared_memory(gl.bfloat16, [1, N, H], SHARED)
    ke = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, H], SHARED)
    ko = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, H], SHARED)
    we = ke._reinterpret(gl.int32, [2, TILE, H // 2], WORDS)
    wo = ko._reinterpret(gl.int32, [2, TILE, H // 2], WORDS)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SHARED)
    words = gl.allocate_shared_memory(gl.int32, [PARTS, PICKS, D // 8], PLAIN)
    scales = gl.allocate_shared_memory(gl.int32, [PARTS, PICKS, D // 64], PLAIN)
    picked = gl.allocate_shared_memory(gl.int32, [PADDED], LINE) if PADDED else words  # a row's slots, -1 behind them
    peaks = gl.allocate_shared_memory(gl.float32, [N], LINE)
    counts = gl.allocate_shared_memory(gl.int32, [2, TILE], LINE)
    sums = gl.allocate_shared_memory(gl.float32, [4, N], LINE)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    answered = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked.index(0), count=1)
    mbarrier.init(answered.index(0), count=1)
    for b in gl.static_range(2):
        mbarrier.init(ready.index(b), count=1)
        mbarrier.init(free.index(b), count=2)
        mbarrier.init(given.index(b), count=1)
        mbarrier.init(summed.index(b), count=1)
    for b in gl.static_range(PARTS):
        mbarrier.init(landed.index(b), count=128)  # every loading thread, when its copies have landed
        mbarrier.init(taken.index(b), count=1)
    gl.thread_barrier()
    gdc_wait()
    LEFT: gl.constexpr = 0
    RIGHT: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                attend_half,
                (
                    ROWS, slots_ptr, pos_ptr, start_ptr, end_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
                    qe, qo, ke, ko, p_smem, peaks, counts, sums, asked, answered, ready, given, free, summed,
                    scale_log2, S, N, D, PAIRS, N_SLOTS, WINDOW, ENTRIES, K, BOUNDS, LEFT,
                ),
            ),
            (
                attend_half,
                (
                    ROWS, slots_ptr, pos_ptr, start_ptr, end_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
                    qe, qo, ke, ko, p_smem, peaks, counts, sums, asked, answered, ready, given, free, summed,
                    scale_log2, S, N, D, PAIRS, N_SLOTS, WINDOW, ENTRIES, K, BOUNDS, RIGHT,
                ),
            ),
            (
                _decode_parts,
                (
                    ROWS, slots_ptr, pos_ptr, start_ptr, end_ptr, cos_ptr, sin_ptr, words, scales, landed, taken,
                    qe, qo, we, wo, asked, answered, ready, free, S, N, D, PAIRS, N_SLOTS, WINDOW, K, BOUNDS, ROTATE,
                ),
            ),
            (
                _load_parts,
                (
                    ROWS, slots_ptr, pos_ptr, start_ptr, end_ptr, q_ptr, win_ptr, glob_ptr, gslot_ptr, words, scales,
                    picked, landed, taken, S, N, D, FIRST, N_SLOTS, RING, WINDOW, ENTRIES, K, BOUNDS, PADDED, WIDE,
                ),
            ),
        ],
        [4, 4, 4],
        [OTHER_REGISTERS, DECODER_REGISTERS, LOADER_REGISTERS],
    )
