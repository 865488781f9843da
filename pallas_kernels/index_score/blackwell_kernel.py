"""The index scores as Triton kernels for Blackwell's block-scaled FP4 product. Imports Triton: import it only where a GPU
kernel is wanted.

Both kernels multiply tiles of keys (the M operand) with the heads of one to four query rows (N): packed e2m1 times packed
e2m1, each with its e8m0 scale per 32 channels as it is stored, so nothing is decoded. Triton 3.6 makes it tcgen05.mma of
kind mxf4 for sm_100 and sm_103; for sm_90 it decodes both to bf16 and uses wgmma, good for checking, not for speed. A
lane of tensor memory is a key, so a thread finds all heads of its key in registers and the sum over heads needs no
shuffle. The dense kernel loads a tile of keys once for up to three such products.

Three forms are there for Triton 3.6, which fails on the plain ones: the accumulator of a product inside a loop is
carried by the loop and cleared under a condition that the compiler cannot decide (a constant zero breaks it; so nothing
is written to tensor memory, the clearing becomes a flag of the instruction), the scales of a tile pass through `_again`
before a second product reads them, and through `_published` before the first.
"""

import triton
import triton.language as tl


@triton.jit
def _after_predecessor(x):
    """i32 -> the same, once the kernels this one depends on have finished (programmatic dependent launch)."""
    return tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)


@triton.jit
def _key_tile(pool, page, entry, live, E: tl.constexpr, DIM: tl.constexpr):
    """Keys `entry` of pages `page`, u32[TILE] each -> packed u8[TILE, DIM/2], scales u8[TILE, DIM/32]; 0 unless live."""
    page = page.to(tl.int64) * (E * (DIM // 2 + DIM // 32))
    half, group = tl.arange(0, DIM // 2)[None, :], tl.arange(0, DIM // 32)[None, :]
    keys = tl.load(pool + ((page + entry * (DIM // 2))[:, None] + half), mask=live[:, None], other=0)
    at = (page + (entry * (DIM // 32) + E * (DIM // 2)))[:, None] + group
    return keys, tl.load(pool + at, mask=live[:, None], other=0)


@triton.jit
def _query_tile(q, scales, weights, first_row, HEADS: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr):
    """N / HEADS rows from `first_row` on -> packed u8[N, DIM/2], scales u8[N, DIM/32], head weights bf16[N]."""
    line = first_row * HEADS + tl.arange(0, N)
    packed = tl.load(q + line[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :])
    scale = tl.load(scales + line[:, None] * (DIM // 32) + tl.arange(0, DIM // 32)[None, :])
    return packed, scale, tl.load(weights + line)


@triton.jit
def _again(scales):
    """u8 -> the same, in registers that common-subexpression elimination does not know to be the same."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scales], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _published(scales):
    """u8 -> the same, when the tensor core may read the keys that came with them. They are copied to shared memory
    asynchronously and waited for, which orders them for threads only; Triton 3.6 has the fence for the tensor core once,
    before the loop (triton-lang/triton pull request 9610)."""
    return tl.inline_asm_elementwise(
        """{
        fence.proxy.async.shared::cta;
        mov.b32 $0, $4;
        mov.b32 $1, $5;
        mov.b32 $2, $6;
        mov.b32 $3, $7;
        }""",
        "=&r,=&r,=&r,=r,r,r,r,r", [scales], dtype=tl.uint8, is_pure=False, pack=16,
    )  # fmt: skip


@triton.jit
def _terms(dots, weights):
    """f32 dots, bf16 weights of one shape -> f32, values bf16(w * relu(bf16(dot))): two heads travel in one register."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        cvt.rn.relu.bf16x2.f32 t, $3, $2;
        mul.rn.bf16x2 t, t, $4;
        shl.b32 $0, t, 16;
        and.b32 $1, t, 0xFFFF0000;
        }""",
        "=&r,=r,r,r,r", [dots, weights], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _scores(dots, weights, PER: tl.constexpr, HEADS: tl.constexpr):
    """f32[TILE, PER * HEADS] dots, bf16[PER * HEADS] weights -> f32[TILE, PER] with bf16 values, no -0."""
    TILE: tl.constexpr = dots.shape[0]
    terms = _terms(dots, tl.broadcast_to(weights[None, :], (TILE, PER * HEADS)))
    score = tl.sum(terms.reshape(TILE, PER, HEADS), 2).to(tl.bfloat16).to(tl.float32)
    return tl.where(score == 0, 0.0, score)


@triton.jit
def _store_rows(score, visible, out, row, column, CAPACITY: tl.constexpr):
    """score f32[TILE, PER]: columns `column` of rows `row`.. of out; those a row does not see become -inf."""
    r = row + tl.arange(0, score.shape[1])
    seen = column[:, None] < tl.load(visible + r)[None, :]
    line = out + r.to(tl.int64)[None, :] * CAPACITY + column[:, None]
    tl.store(line, tl.where(seen, score, float("-inf")).to(tl.bfloat16), mask=(column < CAPACITY)[:, None])


@triton.jit
def _fill(line, done, stop):
    """line bf16[stop]: -inf from `done` on."""
    lane = tl.arange(0, 1024)
    empty = tl.full((1024,), float("-inf"), tl.float32).to(tl.bfloat16)
    for column in range(done // 1024 * 1024, stop, 1024):
        c = column + lane
        tl.store(line + c, empty, mask=(c >= done) & (c < stop))


@triton.jit
def index_score_dense(
    q, q_scales, weights, pool, table, visible, out,
    B: tl.constexpr, BP: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGES: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, FILL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Program (p, g) scores GROUPS * PER rows of every request over the p-th equal share of all live tiles.

    PER query rows share one product; COLUMNS table columns of E entries; BP is B rounded up to a power of two.
    """
    CAPACITY: tl.constexpr = COLUMNS * E
    ROWS: tl.constexpr = GROUPS * PER
    N: tl.constexpr = PER * HEADS
    program, programs = _after_predecessor(tl.program_id(0)), tl.num_programs(0)
    group = tl.program_id(1) * ROWS
    request = tl.arange(0, BP)
    longest = tl.zeros((BP,), tl.int32)
    for s in tl.static_range(ROWS):
        longest = tl.maximum(longest, tl.load(visible + request * S + group + s, mask=request < B, other=0))
    tiles = tl.cdiv(tl.minimum(longest, CAPACITY), TILE)
    until = tl.cumsum(tiles, 0)
    live_tiles = tl.sum(tiles, 0)
    at = (live_tiles.to(tl.int64) * program // programs).to(tl.int32)
    stop = (live_tiles.to(tl.int64) * (program + 1) // programs).to(tl.int32)
    while at < stop:
        b = tl.sum((until <= at).to(tl.int32), 0)
        base = tl.sum(tl.where(request < b, tiles, 0), 0)
        last = tl.minimum(stop, tl.sum(tl.where(request == b, until, 0), 0))
        row = b * S + group
        q0, s0, w0 = _query_tile(q, q_scales, weights, row, HEADS, N, DIM)
        dots0 = tl.zeros((TILE, N), tl.float32)
        if GROUPS > 1:
            q1, s1, w1 = _query_tile(q, q_scales, weights, row + PER, HEADS, N, DIM)
            dots1 = tl.zeros((TILE, N), tl.float32)
        if GROUPS > 2:
            q2, s2, w2 = _query_tile(q, q_scales, weights, row + 2 * PER, HEADS, N, DIM)
            dots2 = tl.zeros((TILE, N), tl.float32)
        for tile in tl.range(at - base, last - base):
            column = tile * TILE + tl.arange(0, TILE)
            of_page = column.to(tl.uint32)
            page = tl.load(table + b * COLUMNS + of_page // E, mask=column < CAPACITY, other=0)
            live = (page > 0) & (page < PAGES)
            keys, scales = _key_tile(pool, page, of_page % E, live, E, DIM)
            scales = _published(scales)
            if live_tiles > 0:
                dots0 = tl.zeros((TILE, N), tl.float32)
            dots0 = tl.dot_scaled(keys, scales, "e2m1", q0.T, s0, "e2m1", dots0)
            _store_rows(_scores(dots0, w0, PER, HEADS), visible, out, row, column, CAPACITY)
            if GROUPS > 1:
                scales = _again(scales)
                if live_tiles > 0:
                    dots1 = tl.zeros((TILE, N), tl.float32)
                dots1 = tl.dot_scaled(keys, scales, "e2m1", q1.T, s1, "e2m1", dots1)
                _store_rows(_scores(dots1, w1, PER, HEADS), visible, out, row + PER, column, CAPACITY)
            if GROUPS > 2:
                scales = _again(scales)
                if live_tiles > 0:
                    dots2 = tl.zeros((TILE, N), tl.float32)
                dots2 = tl.dot_scaled(keys, scales, "e2m1", q2.T, s2, "e2m1", dots2)
                _store_rows(_scores(dots2, w2, PER, HEADS), visible, out, row + 2 * PER, column, CAPACITY)
        at = last
    if FILL:
        for r in range(program, B * ROWS, programs):
            done = tl.sum(tl.where(request == r // ROWS, tiles, 0), 0) * TILE
            _fill(out + (r // ROWS * S + group + r % ROWS).to(tl.int64) * CAPACITY, done, CAPACITY)


@triton.jit
def index_score_candidates(
    q, q_scales, weights, pool, slots, end, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (t, c) scores compact columns c*CHUNK.. of query row t; slots i32[T, BLOCKS]: a block's first entry, or -1."""
    WIDTH: tl.constexpr = BLOCKS * BLOCK
    t, first = _after_predecessor(tl.program_id(0)), tl.program_id(1) * CHUNK
    stop = tl.minimum(first + CHUNK, WIDTH)
    live_end = tl.minimum(tl.maximum(tl.load(end + t), 0), stop)  # first of all: -2**31 - first would wrap round
    tiles = tl.cdiv(tl.maximum(live_end - first, 0), TILE)
    line = out + t.to(tl.int64) * WIDTH
    packed, scale, w = _query_tile(q, q_scales, weights, t, HEADS, HEADS, DIM)
    dots = tl.zeros((TILE, HEADS), tl.float32)
    for tile in tl.range(0, tiles):
        column = first + tile * TILE + tl.arange(0, TILE)
        compact = column.to(tl.uint32)
        slot = tl.load(slots + t * BLOCKS + compact // BLOCK, mask=column < stop, other=-1)
        entry = slot.to(tl.uint32)
        keys, scales = _key_tile(pool, entry // E, entry % E + compact % BLOCK, slot >= 0, E, DIM)
        scales = _published(scales)
        if tiles > 0:
            dots = tl.zeros((TILE, HEADS), tl.float32)
        dots = tl.dot_scaled(keys, scales, "e2m1", packed.T, scale, "e2m1", dots)
        score = _scores(dots, w, 1, HEADS)
        score = tl.where(column[:, None] < live_end, score, float("-inf")).to(tl.bfloat16)
        tl.store(line + column[:, None], score, mask=(column < stop)[:, None])
    _fill(line, first + tiles * TILE, stop)
