"""A Hopper kernel of sparse attention whose keys are loaded, decoded and multiplied by different warp groups, in Gluon.
Imports Triton: import it only where a GPU kernel is wanted.

The tiles, planes and number formats are those of hopper_kernel.py. A loading warp group copies records asynchronously
into a ring of small parts, so that the decoding one has no load in flight when it orders its stores before the tensor
core's reads (that fence waits for every load of the thread). With ALTERNATE, two multiplying warp groups take tiles in
turn: the one whose tile it is computes all 64 logits of a head and their softmax without a word to the other, then
each adds the tile to its half of the channels, the owner with the probabilities in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from pallas_kernels.sparse_attention.hopper_alternate import attend_half
from pallas_kernels.sparse_attention.hopper_kernel import TILE, _attend, _split_fp4, _split_fp8

RINGS = gl.constexpr(8)  # ring rows a part
PICKS = gl.constexpr(16)  # selected entries a part: at 512 channels the same 4 KiB of codes
PARTS = gl.constexpr(5)  # in the ring
LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _step(at, phase):
    """The next part of the ring and the parity of its round."""
    over = at + 1 == PARTS
    return gl.where(over, 0, at + 1), gl.where(over, phase ^ 1, phase)


@gluon.jit
def _load_parts(
    ring, first, end, ring_tiles, glob_ptr, chosen, pick_tiles, words, scales, landed, taken,
    RING: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The loading warp group: parts of the window, then of the selected entries, each once its place is free."""
    at, phase = 0, 1
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    WS: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    WINDOW_RECORD: gl.constexpr = (D + D // 32) // 4
    source = ring.to(gl.pointer_type(gl.int32))
    word = gl.expand_dims(gl.arange(0, D // 4, gl.SliceLayout(0, W)), 0)
    scale = gl.expand_dims(gl.arange(0, D // 128, gl.SliceLayout(0, WS)), 0) + D // 4
    ring_words = words._reinterpret(gl.int32, [PARTS, RINGS, D // 4], words.type.layout)
    ring_scales = scales._reinterpret(gl.int32, [PARTS, 4 * RINGS, D // 128], scales.type.layout)
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
        G: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
        GS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
        RECORD: gl.constexpr = (D // 2 + D // 16) // 4
        source = glob_ptr.to(gl.pointer_type(gl.int32))
        word = gl.expand_dims(gl.arange(0, D // 8, gl.SliceLayout(0, G)), 0)
        scale = gl.expand_dims(gl.arange(0, D // 64, gl.SliceLayout(0, GS)), 0) + D // 8
        k, ks = gl.arange(0, PICKS, gl.SliceLayout(1, G)), gl.arange(0, PICKS, gl.SliceLayout(1, GS))
        slot = gl.load(chosen + k, mask=k < K, other=-1)
        slot_s = gl.load(chosen + ks, mask=ks < K, other=-1)
        for part in range(pick_tiles * (TILE // PICKS)):
            k, ks = k + PICKS, ks + PICKS
            live, live_s = (slot >= 0) & (slot < ENTRIES), (slot_s >= 0) & (slot_s < ENTRIES)
            row = gl.expand_dims(gl.where(live, slot, 0) * RECORD, 1)
            row_s = gl.expand_dims(gl.where(live_s, slot_s, 0) * RECORD, 1)
            mbarrier.wait(taken.index(at), phase)
            async_copy.async_copy_global_to_shared(
                words.index(at), source + (row + word), mask=gl.expand_dims(live, 1)
            )
            async_copy.async_copy_global_to_shared(
                scales.index(at), source + (row_s + scale), mask=gl.expand_dims(live_s, 1)
            )
            async_copy.mbarrier_arrive(landed.index(at), increment_count=False)
            slot = gl.load(chosen + k, mask=k < K, other=-1)
            slot_s = gl.load(chosen + ks, mask=ks < K, other=-1)
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
def _decode_parts(
    ring_tiles, pick_tiles, words, scales, landed, taken, we, wo, ready, free,
    K: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The decoding warps: fill buffer n % 2 with tile n as soon as it is free and its parts have landed."""
    at, phase = 0, 0
    W2: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    W3: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [WARPS, 1, 1], [2, 1, 0])
    ring_words = words._reinterpret(gl.int32, [PARTS, RINGS, D // 4], words.type.layout)
    ring_scales = scales._reinterpret(gl.uint8, [PARTS, 4 * RINGS, D // 32], scales.type.layout)
    for n in range(ring_tiles):
        even, odd = we.index(n & 1), wo.index(n & 1)
        mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
        for part in gl.static_range(0, TILE, RINGS):
            mbarrier.wait(landed.index(at), phase)
            x = ring_words.index(at).load(W2)
            scale = ring_scales.index(at).slice(0, RINGS).load(gl.SliceLayout(2, W3))
            gl.thread_barrier()
            mbarrier.arrive(taken.index(at), count=1)
            _decode_window(x, scale, even.slice(part, RINGS), odd.slice(part, RINGS), D, W3)
            at, phase = _step(at, phase)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready.index(n & 1), count=1)
    if K > 0:
        # 8 bytes of codes a thread: they give 16 bytes of each plane, and neighbours' lie side by side
        G2: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
        G3: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
        pick_scales = scales._reinterpret(gl.uint8, [PARTS, PICKS, D // 16], scales.type.layout)
        for j in range(pick_tiles):
            n = ring_tiles + j
            even, odd = we.index(n & 1), wo.index(n & 1)
            mbarrier.wait(free.index(n & 1), ((n >> 1) & 1) ^ 1)
            for part in gl.static_range(0, TILE, PICKS):
                mbarrier.wait(landed.index(at), phase)
                x = words.index(at).load(G2)
                scale = pick_scales.index(at).load(gl.SliceLayout(2, G3))
                gl.thread_barrier()
                mbarrier.arrive(taken.index(at), count=1)
                _decode_picks(x, scale, even.slice(part, PICKS), odd.slice(part, PICKS), D, G3)
                at, phase = _step(at, phase)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(n & 1), count=1)


@gluon.jit
def attention(
    q_ptr, win_ptr, slots_ptr, pos_ptr, start_ptr, end_ptr, glob_ptr, gslot_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    scale_log2: gl.constexpr, S: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, PAIRS: gl.constexpr,
    N_SLOTS: gl.constexpr, RING: gl.constexpr, WINDOW: gl.constexpr, ENTRIES: gl.constexpr, K: gl.constexpr,
    BOUNDS: gl.constexpr, ROTATE: gl.constexpr, ALTERNATE: gl.constexpr, DECODERS: gl.constexpr,
    DECODER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """hopper_kernel.attention with a loading warp group and DECODERS decoding warps. ALTERNATE: launched with 4 warps
    instead of 8, the second multiplying warp group has OTHER_REGISTERS registers a thread."""
    H: gl.constexpr = D // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)  # the same bytes in 32-bit elements, for the decoder
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gdc_wait()
    t = gl.program_id(0)
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

    qe = gl.allocate_shared_memory(gl.bfloat16, [1, N, H], SHARED)
    qo = gl.allocate_shared_memory(gl.bfloat16, [1, N, H], SHARED)
    ke = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, H], SHARED)
    ko = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, H], SHARED)
    we = ke._reinterpret(gl.int32, [2, TILE, H // 2], WORDS)
    wo = ko._reinterpret(gl.int32, [2, TILE, H // 2], WORDS)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SHARED)
    words = gl.allocate_shared_memory(gl.int32, [PARTS, PICKS, D // 8], PLAIN)
    scales = gl.allocate_shared_memory(gl.int32, [PARTS, PICKS, D // 64], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(free.index(n), count=2 if ALTERNATE else 1)
    for n in gl.static_range(PARTS):
        mbarrier.init(landed.index(n), count=128)  # every loading thread, when its copies have landed
        mbarrier.init(taken.index(n), count=1)
    if ALTERNATE:
        peaks = gl.allocate_shared_memory(gl.float32, [N], LINE)
        counts = gl.allocate_shared_memory(gl.int32, [2, TILE], LINE)
        sums = gl.allocate_shared_memory(gl.float32, [2, N], LINE)
        loaded = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(loaded.index(0), count=2)
        for n in gl.static_range(2):
            mbarrier.init(given.index(n), count=1)
            mbarrier.init(summed.index(n), count=1)
        gl.thread_barrier()
        LEFT: gl.constexpr = 0
        RIGHT: gl.constexpr = 1
        gl.warp_specialize(
            [
            (
                attend_half,
                (
                    t, valid, first, end, ring_tiles, chosen, pick_tiles, q_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
                    qe, qo, ke, ko, p_smem, peaks, counts, sums, loaded, ready, given, free, summed,
                    scale_log2, N, D, FIRST, PAIRS, ENTRIES, K, ROTATE, LEFT,
                ),
            ),
            (
                attend_half,
                (
                    t, valid, first, end, ring_tiles, chosen, pick_tiles, q_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
                    qe, qo, ke, ko, p_smem, peaks, counts, sums, loaded, ready, given, free, summed,
                    scale_log2, N, D, FIRST, PAIRS, ENTRIES, K, ROTATE, RIGHT,
                ),
            ),
            (
                _decode_parts,
                (ring_tiles, pick_tiles, words, scales, landed, taken, we, wo, ready, free, K, D, DECODERS),
            ),
            (
                _load_parts,
                (
                    ring, first, end, ring_tiles, glob_ptr, chosen, pick_tiles, words, scales, landed, taken,
                    RING, ENTRIES, K, D,
                ),
            ),
            ],
            [4, DECODERS, 4],
            [OTHER_REGISTERS, DECODER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        QL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
        head, channel = gl.arange(0, N, gl.SliceLayout(1, QL)), gl.arange(0, H, gl.SliceLayout(0, QL))
        at = gl.expand_dims(t * (FIRST // 2 + N * H) + FIRST // 2 + head * H, 1) + gl.expand_dims(channel, 0)
        q = gl.load(q_ptr.to(gl.pointer_type(gl.int32)) + at)
        gl.thread_barrier()
        gl.warp_specialize(
            [
            (
                _attend,
                (
                    t, valid, first, end, ring_tiles, chosen, pick_tiles, q, sink_ptr, cos_ptr, sin_ptr, out_ptr,
                    qe.index(0), qo.index(0), ke, ko, p_smem, ready, free, scale_log2, N, D, PAIRS, ENTRIES, K, ROTATE,
                ),
            ),
            (
                _decode_parts,
                (ring_tiles, pick_tiles, words, scales, landed, taken, we, wo, ready, free, K, D, DECODERS),
            ),
            (
                _load_parts,
                (
                    ring, first, end, ring_tiles, glob_ptr, chosen, pick_tiles, words, scales, landed, taken,
                    RING, ENTRIES, K, D,
                ),
            ),
            ],
            [DECODERS, 4],
            [DECODER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
