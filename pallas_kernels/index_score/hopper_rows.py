"""How four warps of hopper_shared_kernel.py score the candidates that their rows' lists hold, in Gluon. Imports Triton.

A tile is 64 candidate keys of one row, gathered from the ring in shared memory into the registers that the tensor core
takes them from.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from pallas_kernels.index_score.hopper_ring import read_factors, read_four, read_keys, read_word
from pallas_kernels.index_score.hopper_tiles import (
    key_layout,
    operand,
    start_products,
    sums,
    tile_layout,
)

BLOCK = gl.constexpr(8)  # keys a block


@gluon.jit
def over_bytes(address, L4: gl.constexpr):
    """i32[n] addresses of keys -> the same for every byte of a thread's piece of the key."""
    address = gl.expand_dims(gl.expand_dims(gl.expand_dims(address, 1), 2), 3)
    return address + gl.zeros([address.shape[0], 4, 4, 4], gl.int32, L4)


@gluon.jit
def key_of_row(row):
    """Key of its tile that a row of the product stands for: the two rows of a thread are keys j and j + 4 of one block."""
    return row // 16 * 16 + row // 4 % 2 * 8 + row // 8 % 2 * 4 + row % 4


@gluon.jit
def piece_of(row, L4: gl.constexpr):
    """i32[n, 4, 4, 4]: where in a block's KiB a thread's first 16 bytes lie."""
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L4))))
    at = gl.expand_dims(row % 4 * 64, 1) + gl.expand_dims(group * 16, 0)
    return gl.expand_dims(gl.expand_dims(at, 2), 3) + gl.zeros([row.shape[0], 4, 4, 4], gl.int32, L4)


@gluon.jit
def _gather(at, own, factors_at, piece, line_of):
    """A tile's keys by the ring slots listed at `at` (i32[n], their blocks' words) -> (low, high u8[n, 4, 4, 4], f32[n])."""
    slot_at = read_word(at)
    factor = read_factors(factors_at + (slot_at >> 5) + line_of % 4 * 8)
    low, high = read_keys(over_bytes(own + slot_at, tile_layout(4)) + piece)
    return low, high, factor


@gluon.jit
def unfinished(work_at, SP: gl.constexpr, HALVES: gl.constexpr, SHARE: gl.constexpr):
    """1 if any of the SHARE rows of HALVES groups has more candidates in this window than its list held, else 0."""
    again = 0
    for r in gl.static_range(SHARE):
        for h in gl.static_range(HALVES):
            again = again | read_four(work_at + (h * SP + r) * 16)[3]
    return again


@gluon.jit
def _store_row(score, line, stop):
    """Column 0 of bf16[n, 8] scores to line[0 .. min(n, stop)), row by row as `key_of_row` says."""
    LAYOUT: gl.constexpr = score.type.layout
    c = gl.expand_dims(key_of_row(gl.arange(0, score.shape[0], gl.SliceLayout(1, LAYOUT))), 1)
    alone = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LAYOUT)) == 0, 0)
    gl.store(line + c + gl.where(alone, 0, 0), score, mask=(c < stop) & alone)


@gluon.jit
def score_in_turn(
    out, work_at, first, lists_at, own, factors_at, q_low, q_high, weights, ones, SHARE: gl.constexpr, HEADS: gl.constexpr,
    WIDTH: gl.constexpr, LIST: gl.constexpr,
):  # fmt: skip
    """Score what the lists of the SHARE rows from `out` on hold, a tile of every row in turn: the product of one row runs
    while another's is summed. first: the first row's place among those of the request."""
    TILE: gl.constexpr = 64
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    line_of = gl.arange(0, TILE, key_layout(4))  # rows of the product
    block = line_of // 16 * 2 + line_of // 4 % 2  # of the tile
    piece = piece_of(line_of, tile_layout(4))
    most = 0
    lines, stops, ws = (), (), ()
    for r in gl.static_range(SHARE):
        taken, pending, end, _ = read_four(work_at + r * 16)
        stop = gl.minimum(taken * BLOCK, end - pending * BLOCK)
        lines = lines + (out + r * WIDTH + pending * BLOCK,)
        stops = stops + (stop,)
        ws = ws + (weights.index(first + r).load(gl.SliceLayout(0, M)),)
        most = gl.maximum(most, stop)
    for c in range(0, most, TILE):
        at = lists_at + c // 2 + block * 4
        keys = (_gather(at, own, factors_at, piece, line_of),)
        if SHARE > 1:
            keys = keys + (_gather(at + LIST * 4, own, factors_at, piece, line_of),)
        s = first
        ahead = start_products(
            operand(keys[0][0], M), operand(keys[0][1], M), q_low.index(s), q_high.index(s), HEADS, M
        )
        for r in gl.static_range(SHARE):
            products = ahead
            if r + 1 < SHARE:
                s = first + (r + 1)
                ahead = start_products(
                    operand(keys[r + 1][0], M), operand(keys[r + 1][1], M), q_low.index(s), q_high.index(s), HEADS, M
                )  # fmt: skip
                products = warpgroup_mma_wait(2, deps=[products])
                if r + 2 < SHARE:
                    keys = keys + (_gather(at + (r + 2) * (LIST * 4), own, factors_at, piece, line_of),)
            else:
                products = warpgroup_mma_wait(0, deps=[products])
            _store_row(sums(products, ws[r], ones, keys[r][2]), lines[r] + c, stops[r] - c)
