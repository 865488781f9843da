"""What the Hopper kernels of the index scores share, in Gluon. Imports Triton: import it only where a GPU kernel is wanted.

They multiply tiles of 64 keys (the M operand, straight from registers) with the heads of one or two query rows
(the N operand, in shared memory) on the FP8 tensor cores: an e2m1 value times a power of two is an e4m3 value.

Keys: 8 FP4 codes of a word become 8 e4m3 bytes by table lookup (`prmt`); the table is built once per group of 32
channels with the group's scale inside, relative to the largest scale of the key: exact for groups up to 11 octaves
below it, smaller ones count as 0. Which channel stands at which position of the product is free as long as q agrees:
a thread keeps the 16 bytes of one scale group that it loads, and nothing passes through shared memory.
Queries: the same per row and head, by one power of two; their factor moves into the head weight, the key's to the end
of the sum. All these powers of two commute with the roundings of the definition.

Between the products and the sum over heads, two heads travel in one register: convert with relu to bf16, multiply by
the weights in bf16. The fp32 sum is one more product, with a matrix of ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

TILE = gl.constexpr(64)  # keys a tile of 4 warps


@gluon.constexpr_function
def tile_layout(warps):
    """[key, scale group, word of the group, channel of a half word] of 16 * warps keys: one thread holds the 4 words of
    a group for 2 keys, laid out over lanes and warps as the M operand of an FP8 product wants its rows."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [16 * warps, 4, 4, 4],
    )


@gluon.constexpr_function
def key_layout(warps):
    """The keys alone, [16 * warps], of `tile_layout`."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, tile_layout(warps))))


LK = gl.constexpr(key_layout(4))


@gluon.jit
def _expand(words, low, high):
    """FP4 word, lookup tables (4 + 4 bytes) -> two times four e4m3: channels 0..3 and 4..7 of the word.

    All tensors have the shape of the result; its last axis, the four bytes, repeats the inputs. The signs come from a
    mode of prmt that spreads a byte's top bit.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 m, s, y, z;
        and.b32 m, $2, 0x77777777;
        shl.b32 s, $2, 4;
        prmt.b32 y, $6, $10, m;
        prmt.b32 z, s, $2, 0xD9C8;
        lop3.b32 $0, y, z, 0x80808080, 0xF8;
        shr.b32 m, m, 16;
        prmt.b32 y, $6, $10, m;
        prmt.b32 z, s, $2, 0xFBEA;
        lop3.b32 $1, y, z, 0x80808080, 0xF8;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r", [words, low, high], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _terms(products, weights):
    """f32 products, bf16 weights -> bf16(w * relu(bf16(product))), two heads at a time."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        cvt.rn.relu.bf16x2.f32 t, $2, $1;
        mul.rn.bf16x2 $0, t, $3;
        }""",
        "=r,r,r,r", [products, weights], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def load_keys(pool, page, entry, mask, E: gl.constexpr, WIDE: gl.constexpr):
    """Keys `entry` of pages `page` (both i32[n] over `key_layout`) -> (i32[n, 4, 4] words, u8[n, 4] scales). Offsets in words
    take 64 bits if WIDE."""
    OFFSET: gl.constexpr = gl.int64 if WIDE else gl.int32
    LG: gl.constexpr = entry.type.layout.parent  # scales
    L3: gl.constexpr = LG.parent  # words
    group = gl.arange(0, 4, gl.SliceLayout(0, LG))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L3)))
    at = gl.expand_dims(gl.expand_dims(page.to(OFFSET) * (E * 17) + entry * 16, 1) + gl.expand_dims(group * 4, 0), 2)
    at = at + gl.expand_dims(gl.expand_dims(word, 0), 0)
    seen = gl.expand_dims(mask, 1)
    words = gl.load(pool.to(gl.pointer_type(gl.int32)) + at, mask=gl.expand_dims(seen, 2), other=0)
    at = gl.expand_dims(page.to(gl.int64) * (E * 68) + E * 64 + entry * 4, 1) + gl.expand_dims(group, 0)
    return words, gl.load(pool + at, mask=seen, other=0)


@gluon.jit
def expand_keys(words, scales):
    """-> (first, second half of every word's channels as e4m3 bytes u8[n, 4, 4, 4], f32[n] factor of every key)."""
    L4: gl.constexpr = words.type.layout.parent
    scale = scales.to(gl.int32)
    top = gl.max(scale, 1)
    t = scale - gl.expand_dims(top, 1) + 6  # e4m3 holds e2m1 * 2**t for t = -5..6
    live = t >= -5
    low = gl.where(live, 0x3C383000 + t * 0x08080800, 0)
    high = gl.where(live, 0x4C484440 + t * 0x08080808, 0)
    words = gl.expand_dims(words, 3)
    low = gl.expand_dims(gl.expand_dims(low, 2), 3)
    high = gl.expand_dims(gl.expand_dims(high, 2), 3)
    spread = gl.zeros([words.shape[0], 4, 4, 4], gl.int32, L4)
    a, b = _expand(words + spread, low + spread, high + spread)
    return a, b, (gl.maximum(top - 6, 0) << 23).to(gl.float32, bitcast=True)  # 2**(top - 127 - 6)


@gluon.jit
def operand(plane, M: gl.constexpr):
    """u8[n, 4, 4, 4] of `expand_keys` -> M operand e4m3[n, 64]."""
    plane = gl.permute(plane, (0, 2, 1, 3)).reshape([plane.shape[0], 64]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(plane, gl.DotOperandLayout(0, M, 4), assert_trivial=True)


@gluon.jit
def decode(words, scales, M: gl.constexpr):
    """-> (first, second half of the channels as M operands e4m3[TILE, 64], f32[TILE] factor of every key)."""
    a, b, factor = expand_keys(words, scales)
    return operand(a, M), operand(b, M), factor


@gluon.jit
def prepare_queries(q_ptr, w_ptr, first_row, q_low, q_high, HEADS: gl.constexpr, N: gl.constexpr, M: gl.constexpr):
    """N / HEADS query rows -> e4m3 planes in shared memory [N, 64] each, and weights bf16[N] along M's columns."""
    QL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    n, channel = gl.arange(0, N, gl.SliceLayout(1, QL)), gl.arange(0, 128, gl.SliceLayout(0, QL))
    q = gl.load(q_ptr + gl.expand_dims((first_row * HEADS + n) * 128, 1) + gl.expand_dims(channel, 0)).to(gl.float32)
    bits = gl.max(q.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
    lift = (gl.minimum(261 - bits, 254) << 23).to(gl.float32, bitcast=True)  # brings the largest into [2**7, 2**8)
    q = (q * gl.expand_dims(lift, 1)).to(gl.float8e4nv)
    q = gl.permute(q.reshape([N, 4, 4, 2, 4]), (0, 2, 1, 4, 3))
    low, high = gl.split(q)
    q_low.store(low.reshape([N, 64]))
    q_high.store(high.reshape([N, 64]))
    w = gl.load(w_ptr + first_row * HEADS + n).to(gl.float32)
    w = w * (gl.maximum(bits - 7, 0) << 23).to(gl.float32, bitcast=True)  # 2**(bits - 127 - 7)
    return gl.convert_layout(w.to(gl.bfloat16), gl.SliceLayout(0, M))


@gluon.jit
def head_sums(ones, HEADS: gl.constexpr, N: gl.constexpr):
    """Fill ones bf16[8, N]: row r adds up the heads of query row r."""
    OL: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    r, n = gl.arange(0, 8, gl.SliceLayout(1, OL)), gl.arange(0, N, gl.SliceLayout(0, OL))
    ones.store(gl.where(gl.expand_dims(r, 1) == gl.expand_dims(n // HEADS, 0), 1.0, 0.0).to(gl.bfloat16))


@gluon.jit
def start_products(a, b, q_low, q_high, N: gl.constexpr, M: gl.constexpr):
    """Start keys x queries, f32[n, N], and leave it in flight."""
    acc = gl.zeros([a.shape[0], N], gl.float32, M)
    acc = warpgroup_mma(a, q_low.permute((1, 0)), acc, use_acc=False, is_async=True)
    return warpgroup_mma(b, q_high.permute((1, 0)), acc, is_async=True)


@gluon.jit
def sums(products, weights, ones, factor):
    """f32[n, N] products -> bf16[n, 8] scores; column r belongs to query row r, the rest is 0.

    The fp32 sum over heads is a product with ones, so that no thread unpacks or shuffles anything.
    """
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8, 16])
    terms = _terms(products, gl.expand_dims(weights, 0))
    terms = gl.convert_layout(terms, gl.DotOperandLayout(0, R, 2), assert_trivial=True)
    total = gl.zeros([products.shape[0], 8], gl.float32, R)
    total = warpgroup_mma(terms, ones.permute((1, 0)), total, use_acc=False, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    score = (total * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, R)), 1)).to(gl.bfloat16)
    return score + 0.0  # turns -0 into +0


@gluon.jit
def register_sums(products, weights, HEADS: gl.constexpr):
    """The sums of `sums` before their factor, f32[n, 8], by mma.sync with ones in registers: nothing to wait for, so that
    later products stay in flight. Column c belongs to query row c modulo the rows of the product."""
    N: gl.constexpr = products.shape[1]
    R: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    B: gl.constexpr = gl.DotOperandLayout(1, R, 2)
    terms = _terms(products, gl.expand_dims(weights, 0))
    terms = gl.convert_layout(terms, gl.DotOperandLayout(0, R, 2), assert_trivial=True)
    ones = gl.full([N, 8], 1.0, gl.bfloat16, B)
    if N > HEADS:
        head = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(1, B)) // HEADS, 1)
        row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, B)) % (N // HEADS), 0)
        ones = gl.where(head == row, ones, gl.zeros([N, 8], gl.bfloat16, B))
    return mma_v2(terms, ones, gl.zeros([products.shape[0], 8], gl.float32, R))


@gluon.jit
def fill(line, done, stop):
    """line bf16[stop]: -inf from `done` on."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 256 * gl.num_warps(), LANES)
    empty = gl.full([256 * gl.num_warps()], float("-inf"), gl.bfloat16, LANES)
    for column in range(done // 1024 * 1024, stop, 256 * gl.num_warps()):
        c = column + lane
        gl.store(line + c, empty, mask=(c >= done) & (c < stop))
