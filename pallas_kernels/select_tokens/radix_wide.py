"""select_tokens for rows too wide for registers: the ranks stay in shared memory, and what does not fit is read again.

Same selection as `radix_select`, in loops over the live columns only, so a row costs what its visible length costs
whatever the capacity behind it. A thread reads back only what it stored itself.
"""

import dataclasses

from .. import radix
from . import radix_select
from .radix_select import CHUNK, STEP, Refs, Shape, counts, masks

ARCHES = radix_select.ARCHES
THREADS = 256
KEPT = 4  # chunks of a thread that stay in shared memory: 64 KiB a row at 256 threads, three rows on an SM


@dataclasses.dataclass(frozen=True)
class _Row:
    """A thread's part of the row."""

    shape: Shape
    m: object
    logits: object
    kept: tuple  # shared array: KEPT chunks of 16 words per thread
    scan: object  # live columns of the row
    column: object  # the thread's first
    left: object  # columns from there to the end of the warp's share
    steps: object  # chunks that cover the share

    def slot(self, c, v):
        return ((c * 4 + v) * self.m.threads + self.m.tid) * 4

    def kept_words(self, c):
        return [w for v in range(4) for w in self.m.get_many(self.kept, self.slot(c, v), 4)]

    def read(self, c):
        """Rank pairs of chunk c from global memory."""
        at = self.column + c * STEP
        left = self.left - c * STEP
        words = radix_select.load_chunk(self.shape, self.m, self.logits, at, left, 0)
        return radix_select.ranks_of(self.m, words, left, self.scan)

    def fold(self, carry, kept, beyond):
        """Carry a word through kept(c, carry) for the chunks in shared memory, then beyond(c, carry) for the rest."""
        m = self.m
        carry = m.fold(self.steps.minimum(KEPT), carry, kept)
        if self.shape.chunks > KEPT:
            carry = m.fold((self.steps - KEPT).maximum(0), carry, lambda c, x: beyond(c + KEPT, x))
        return carry

    def each(self, visit):
        """visit(c, rank pairs) for every chunk."""

        def with_words(words_of):
            def body(c, carry):
                visit(c, words_of(c))
                return carry

            return body

        self.fold(self.m.word(0), with_words(self.kept_words), with_words(self.read))


def kernel(shape: Shape, m, *arrays):
    kept = m.shared(4 * 4 * KEPT * m.threads)
    refs = Refs(shape, m, *arrays)
    scan = radix_select.begin(shape, m, refs)
    column, left = radix_select.warp_share(m, scan)
    steps = (scan + (m.threads * CHUNK - 1)) >> ((m.threads * CHUNK).bit_length() - 1)
    row = _Row(shape, m, refs.logits, kept, scan, column, left, steps)

    def keep(c, carry):
        words = row.read(c)
        for v in range(4):
            m.put_many(kept, row.slot(c, v), words[4 * v : 4 * v + 4])
        return carry

    row.fold(m.word(0), keep, lambda c, carry: carry)
    m.trigger_dependents()
    m.barrier()

    def each_pair(visit):
        row.each(lambda c, words: radix_select.visit_chunk(m, words, left - c * STEP, visit))

    def check():
        row.each(lambda c, words: radix_select.mark_nan(m, refs, words))

    cut, places, outer = radix.find_cut(m, refs.space, each_pair, shape.k, check)
    cut, places = radix_select.settle(m, refs, cut, places)
    _emit(row, cut, places, outer, refs)
    m.barrier()
    radix_select.finish(shape, m, refs)


def _emit(row: _Row, cut, places, outer, refs: Refs):
    """Put the selected columns into `refs.chosen`. The masks of kept chunks replace their ranks. Holds one barrier."""
    m = row.m

    def count_kept(c, total):
        better, equal = masks(m, row.kept_words(c), cut, outer)
        m.put(row.kept, row.slot(c, 0), better)
        m.put(row.kept, row.slot(c, 1), equal)
        return total + counts(better, equal)

    def reread(c):
        return masks(m, row.read(c), cut, outer)

    own = row.fold(m.word(0), count_kept, lambda c, total: total + counts(*reread(c)))
    total = m.sum_warp(radix.cap_ties(own, places))
    before, _ = m.scan_warps(radix.cap_ties(total, places), refs.sums)

    def emit(c, found, before):
        count = counts(*found)
        running = m.scan_warp(count)
        column = row.column + c * STEP
        radix_select.place(m, *found, before + running - count, column, places, refs.chosen)
        return radix.cap_ties(before + m.shuffle(running, 31), places)

    def emit_kept(c, before):
        return emit(c, (m.get(row.kept, row.slot(c, 0)), m.get(row.kept, row.slot(c, 1))), before)

    row.fold(before, emit_kept, lambda c, before: emit(c, reread(c), before))


def refuses(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    if k > 1024:
        return f"k = {k} is more than the 1024 that fit beside three rows of ranks"
    return radix_select.refuses_any(logits, k, block_ids, block_size, slot_map)


def prepare(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None, threads=THREADS, groups=None):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    shape = radix_select.shape_of(logits, k, block_ids, slot_map, threads)
    launch = {"threads": threads, "shared_words": shape.shared_words + 16 * KEPT * threads}
    rest = radix_select.arguments(logits, end, shape, block_ids, causal, slot_map, groups, launch)
    return (lambda m, *refs: kernel(shape, m, *refs)), *rest


def emulated(logits, end, **kwargs):
    """The kernel in numpy, thread by thread (tests)."""
    return radix_select.run_emulated(prepare(logits, end, **kwargs))


def select_tokens(logits, end, **kwargs):
    """The operator; see `api.select_tokens` for the contract."""
    return radix_select.run_compiled(prepare(logits, end, **kwargs), "select_tokens_wide")
