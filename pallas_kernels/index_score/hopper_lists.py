"""The candidates that rows have in a window of hopper_shared_kernel.py, in Gluon. Imports Triton.

A row's list holds the ring addresses of its next candidates, its work what the scorers need of it, both in shared
memory; a row's candidates are looked at by one warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pallas_kernels.index_score.hopper_ring import write_four, write_word
from pallas_kernels.index_score.hopper_rows import BLOCK

NEVER = gl.constexpr(2**31 - 1)  # above every block id


def list_length(fresh: int) -> int:
    """Candidates of a row looked at in one window: the fresh ones and those that waited, as a power of two."""
    return max(64, 1 << (fresh + 6).bit_length())


def padded_rows(span: int, halves: int) -> int:
    """Rows of a group of warps as a power of two."""
    return max(4, 1 << (-(-span // halves) - 1).bit_length())


@gluon.constexpr_function
def list_layout(rows, length):
    """[row of a group, listed candidate] over 4 warps: a row's candidates lie in one warp."""
    a_warp = max(1, rows // 4)
    return gl.BlockedLayout([1, length * a_warp // 32], [a_warp, 32 // a_warp], [4, 1], [1, 0])


@gluon.jit
def first_listed(
    ids_ptr, end_ptr, row, rows, k, KB: gl.constexpr, FRESH: gl.constexpr, SP: gl.constexpr, LIST: gl.constexpr
):  # fmt: skip
    """The lists of `rows` of SP rows from `row` on at window k -> (pointers to a row's ids [SP, 1], live blocks i32[SP, 1],
    live columns i32[SP], candidates before the window i32[SP], the next ones' blocks i32[SP, LIST])."""
    IL: gl.constexpr = list_layout(SP, LIST)
    share = gl.arange(0, SP, gl.SliceLayout(1, IL))
    i = gl.expand_dims(gl.arange(0, LIST, gl.SliceLayout(0, IL)), 0)
    end = gl.load(end_ptr + row + share, mask=share < rows, other=0)
    end = gl.minimum(gl.maximum(end, 0), KB * BLOCK)
    counts = gl.expand_dims((end + (BLOCK - 1)) // BLOCK, 1)
    ids = ids_ptr + gl.expand_dims((row + share) * KB, 1)
    # by a stride, then one by one
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
    return ids, counts, end, pending, next_listed(ids, counts, pending, LIST)


@gluon.jit
def next_listed(ids, counts, pending, LIST: gl.constexpr):
    """Blocks i32[SP, LIST] of the candidates from the pending-th on, NEVER past the last."""
    at = gl.expand_dims(pending, 1) + gl.expand_dims(gl.arange(0, LIST, gl.SliceLayout(0, counts.type.layout)), 0)
    return gl.load(ids + at, mask=at < counts, other=NEVER)


@gluon.jit
def window_slots(
    listed, k, stop, windows, FRESH: gl.constexpr, KEPT: gl.constexpr, RING: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """-> (ring slots i32[SP, LIST] of listed blocks, RING where the ring has none; candidates i32[SP] to score in window k;
    1 i32[SP] where the list ends inside the window). Candidates that fill no tile wait while their blocks stay."""
    TILE_BLOCKS: gl.constexpr = 64 // BLOCK
    v = k * FRESH
    i = gl.expand_dims(gl.arange(0, listed.shape[1], gl.SliceLayout(0, listed.type.layout)), 0)
    bound = gl.where(k + 1 == windows, NEVER, v + FRESH)
    n = gl.sum((listed < bound).to(gl.int32), 1)
    whole = n // TILE_BLOCKS * TILE_BLOCKS
    waiting = gl.sum(gl.where(i == gl.expand_dims(whole, 1), listed, 0), 1)
    flush = (k + 1 == stop) | (waiting < v + FRESH - KEPT)
    taken = gl.where(flush, n, whole)
    held = (listed >= gl.maximum(v - KEPT, 0)) & (listed < gl.minimum(v + FRESH, LIMIT))
    slot = gl.where(held, (listed.to(gl.uint32) % RING).to(gl.int32), RING)
    return slot, taken, (n == listed.shape[1]).to(gl.int32)


@gluon.jit
def write_lists(slot, taken, pending, end, more, lists_at, work_at):
    """A group's lists and work, for `hopper_rows`."""
    LIST: gl.constexpr = slot.shape[1]
    share = gl.arange(0, slot.shape[0], gl.SliceLayout(1, slot.type.layout))
    i = gl.expand_dims(gl.arange(0, LIST, gl.SliceLayout(0, slot.type.layout)), 0)
    write_word(lists_at + gl.expand_dims(share, 1) * (LIST * 4) + i * 4, slot * (BLOCK * 128))
    write_four(work_at + share * 16, taken, pending, end, more)
