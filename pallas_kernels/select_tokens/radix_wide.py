"""select_tokens for rows too wide for registers: the ranks stay in shared memory, and what does not fit is read again.

Same selection as `radix_select`, in loops over the live columns only, so a row costs what its visible length costs
whatever the capacity behind it. A thread reads back only what it stored itself.
"""

import dataclasses

from .. import radix
from . import radix_select
from .radix_select import Refs, Shape, counts, masks, place, ranks_of

ARCHES = radix_select.ARCHES
THREADS = 256
KEPT = 16  # vectors of a thread that stay in shared memory: 64 KiB a row at 256 threads, three rows on an SM
_STEP, _COLUMNS, _UNROLL = 256, 8, 4


@dataclasses.dataclass(frozen=True)
class _Row:
    """A thread's part of the row."""

    shape: Shape
    m: object
    logits: object
    kept: tuple  # shared array: KEPT vectors of 4 words per thread
    first: object  # its first vector
    left: object  # columns from there to the end of the warp's share
    rounds: object  # loops of _UNROLL vectors that cover the share

    def slot(self, i):
        return (i * self.m.threads + self.m.tid) * 4

    def read(self, i, highest):
        """Vector i from global memory -> (rank pairs, highest magnitude so far)."""
        left = self.left - i * _STEP
        start = self.m.row * (self.shape.width // 2) + (self.first + (i << 5)) * 4
        return ranks_of(self.m, self.m.load_many(self.logits, start, 4, where=left > 0), left, highest)

    def inside(self, i):
        return self.left > i * _STEP

    def fold(self, carry, kept, beyond):
        """Carry a word through kept(i, carry) for the vectors in shared memory, then beyond(i, carry) for the rest."""
        m, near = self.m, KEPT // _UNROLL

        def unrolled(body, base):
            def step(g, carry):
                for u in range(_UNROLL):
                    carry = body((g + base) * _UNROLL + u, carry)
                return carry

            return step

        carry = m.fold(self.rounds.minimum(near), carry, unrolled(kept, 0))
        if self.shape.vectors > KEPT:
            carry = m.fold((self.rounds - near).maximum(0), carry, unrolled(beyond, near))
        return carry

    def each_pair(self, visit):
        """visit(word) for every pair of ranks."""
        m = self.m

        def visit_all(i, words):
            with m.when(self.inside(i)):
                for word in words:
                    visit(word)

        def kept(i, carry):
            visit_all(i, m.get_many(self.kept, self.slot(i), 4))
            return carry

        def beyond(i, carry):
            visit_all(i, self.read(i, m.word(0))[0])
            return carry

        self.fold(m.word(0), kept, beyond)


def kernel(shape: Shape, m, *arrays):
    kept = m.shared(4 * KEPT * m.threads)
    refs = Refs(shape, m, *arrays)
    scan = radix_select.begin(shape, m, refs)
    first, left = radix_select.warp_share(m, scan)
    per_round = m.threads * _COLUMNS * _UNROLL
    rounds = (scan + (per_round - 1)) >> (per_round.bit_length() - 1)
    row = _Row(shape, m, refs.logits, kept, first, left, rounds)

    def keep(i, highest):
        words, highest = row.read(i, highest)
        m.put_many(kept, row.slot(i), words)
        return highest

    highest = row.fold(m.word(0), keep, lambda i, highest: row.read(i, highest)[1])
    m.trigger_dependents()
    m.barrier()
    m.set_bits(refs.poison, 0, 1, where=radix_select.has_nan(highest))
    cut, places = radix_select.settle(m, refs, *radix.find_cut(m, refs.space, row.each_pair, shape.k))
    _emit(row, cut, places, refs)
    m.barrier()
    radix_select.finish(shape, m, refs)


def _emit(row: _Row, cut, places, refs: Refs):
    """Put the selected columns into `refs.chosen`. The masks of kept vectors replace their ranks. Holds one barrier."""
    m = row.m

    def reread(i):
        return masks(m, row.read(i, m.word(0))[0], cut)

    def count_kept(i, total):
        mask = masks(m, m.get_many(row.kept, row.slot(i), 4), cut)
        m.put(row.kept, row.slot(i), mask)
        return total + counts(mask)

    total = m.scan_warp(row.fold(m.word(0), count_kept, lambda i, total: total + counts(reread(i))))
    before, _ = m.scan_warps(m.shuffle(total, 31), refs.sums)

    def emit(i, mask, before):
        count = counts(mask)
        running = m.scan_warp(count)
        column = (row.first + (i << 5)) * _COLUMNS
        place(m, mask, before + running - count, column, places, refs.chosen)
        return before + m.shuffle(running, 31)

    row.fold(before, lambda i, b: emit(i, m.get(row.kept, row.slot(i)), b), lambda i, b: emit(i, reread(i), b))


def refuses(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    if k > 1024:
        return f"k = {k} is more than the 1024 that fit beside three rows of ranks"
    return radix_select.refuses_any(logits, k, block_ids, block_size, slot_map)


def prepare(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None, threads=THREADS, groups=None):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    shape = radix_select.shape_of(logits, k, block_ids, slot_map, threads)
    launch = {"threads": threads, "shared_words": shape.shared_words + 4 * KEPT * threads}
    rest = radix_select.arguments(logits, end, shape, block_ids, causal, slot_map, groups, launch)
    return (lambda m, *refs: kernel(shape, m, *refs)), *rest


def emulated(logits, end, **kwargs):
    """The kernel in numpy, thread by thread (tests)."""
    return radix_select.run_emulated(prepare(logits, end, **kwargs))


def select_tokens(logits, end, **kwargs):
    """The operator; see `api.select_tokens` for the contract."""
    return radix_select.run_compiled(prepare(logits, end, **kwargs), "select_tokens_wide")
