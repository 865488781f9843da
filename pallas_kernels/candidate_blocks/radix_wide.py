"""candidate_blocks for rows too wide for registers: a row is read once, its ranks stay in shared memory or in a scratch.

Same publication as `radix_candidates`, in loops over the visible blocks only, so a row costs what its visible length costs
whatever the capacity behind it (only `flags` cost by the width: that many bytes are the output). A warp owns consecutive
blocks. The passes of the selection read 2 bytes a block: the first steps of a thread from shared memory, what lies beyond
them from a scratch in global memory, an eighth of the scores. A thread reads back only what it stored itself.
"""

import dataclasses

from .. import radix, simt
from ..codecs import cdiv
from . import radix_candidates
from .radix_candidates import NAN, THREADS, end_row, rank_blocks

ARCHES = radix_candidates.ARCHES
VECTORS = 8  # blocks that a thread ranks in one step: as many 16-byte loads in flight, four words of ranks
WORDS = VECTORS // 2
STEP = 32 * VECTORS  # blocks of a warp's step
KEPT = 16  # steps that stay in shared memory: 64 KiB a row at 256 threads, three rows on an SM
MAX_WIDTH = 1 << 21  # blocks of a warp are counted in 16 bits, beside the ties before it
MAX_K = 4096


@dataclasses.dataclass(frozen=True)
class Shape(radix_candidates.Shape):
    """Static facts the kernel is specialised for. kept: steps that may stay in shared memory."""

    kept: int = KEPT

    @property
    def steps(self) -> int:
        return cdiv(self.blocks, VECTORS * self.threads)

    @property
    def resident(self) -> int:
        return min(self.kept, self.steps)

    @property
    def scratch_words(self) -> int:
        """Of a row: the ranks of the steps that do not stay in shared memory."""
        return (self.steps - self.resident) * WORDS * self.threads

    @property
    def shared_words(self) -> int:
        return self.resident * WORDS * self.threads + super().shared_words


@dataclasses.dataclass(frozen=True)
class _Row:
    """A thread's part of the row."""

    shape: Shape
    m: object
    kept: tuple  # shared array: WORDS words of ranks per thread and resident step
    scratch: object  # global array of the other steps' words, or None
    first: object  # the thread's first block
    steps: object  # that cover the visible blocks, the same for all threads of the row

    def _slot(self, c):
        return (c * self.m.threads + self.m.tid) * WORDS

    def _places(self, c):
        """Where the words of a step beyond the resident ones lie: neighbouring threads beside each other."""
        step = self.m.row * self.shape.scratch_words + (c - self.shape.resident) * (WORDS * self.m.threads)
        return [step + (i * self.m.threads) + self.m.tid for i in range(WORDS)]

    def fold(self, carry, kept, beyond):
        """Carry a word through kept(c, carry) for the resident steps, then beyond(c, carry) for the rest."""
        m, resident = self.m, self.shape.resident
        carry = m.fold(self.steps.minimum(resident), carry, kept)
        if self.scratch is not None:
            carry = m.fold((self.steps - resident).maximum(0), carry, lambda c, x: beyond(c + resident, x))
        return carry

    def fill(self, ranks_of):
        """Store ranks_of(c) for every step."""

        def keep(c, carry):
            self.m.put_many(self.kept, self._slot(c), ranks_of(c))
            return carry

        def spill(c, carry):
            for at, word in zip(self._places(c), ranks_of(c), strict=True):
                self.m.store(self.scratch, at, word)
            return carry

        self.fold(self.m.word(0), keep, spill)

    def each(self, carry, visit):
        """Carry a word through visit(c, rank pairs, carry) for every step."""
        kept = lambda c, x: visit(c, self.m.get_many(self.kept, self._slot(c), WORDS), x)
        beyond = lambda c, x: visit(c, [self.m.load(self.scratch, at) for at in self._places(c)], x)
        return self.fold(carry, kept, beyond)


def kernel(shape: Shape, m, logits, visible, ids, count, *rest):
    kept = m.shared(shape.resident * WORDS * m.threads)
    space, sums = radix.allocate(m), m.shared(m.warps)
    scratch, flags = (rest[-1], rest[:-1]) if shape.scratch_words else (None, rest)
    length = m.load(visible, m.row).clamp(0, shape.width)
    step = VECTORS * m.threads
    steps = (((length + 7) >> 3) + (step - 1)) >> (step.bit_length() - 1)
    row = _Row(shape, m, kept, scratch, m.warp * (steps * STEP) + m.lane, steps)
    row.fill(lambda c: rank_blocks(m, logits, shape.width, length, row.first + c * STEP, VECTORS))
    m.trigger_dependents()
    m.barrier()

    def each_pair(visit):
        def step(c, words, carry):
            for word in words:
                visit(word)
            return carry

        row.each(m.word(0), step)

    cut, places, _ = radix.find_cut(m, space, each_pair, min(shape.k_blocks, shape.blocks))
    # No place is taken by a tie where the places are more than the blocks, or reach down to -inf or to nothing visible.
    roomy = places.equals(0) | ~cut.below(radix.MINUS_INF)
    places = (roomy | cut.equals(NAN)).pick(0, places)
    cut = roomy.pick(radix.MINUS_INF, cut)
    _publish(row, cut, places, sums, ids, count, flags)


def _publish(row: _Row, cut, places, sums, ids, count, flags):
    """Write the kept blocks in ascending order, their number, and the flags. Holds one barrier."""
    shape, m = row.shape, row.m
    below_lane = (m.word(1) << m.lane) - 1

    def better_and_equal(words):
        for word in words:
            for rank in radix.halves(word):
                yield rank.below(cut) & rank.differs(NAN), rank.equals(cut)

    def count_own(c, words, total):
        for better, equal in better_and_equal(words):
            total = total + (better.pick(1, 0) | equal.pick(1 << 16, 0))
        return total

    total = m.sum_warp(row.each(m.word(0), count_own))  # better than the cut, and equal to it in the upper half
    before, all_blocks = m.scan_warps(radix.cap_ties(total, places), sums)
    kept_total = (all_blocks & 0xFFFF) + (all_blocks >> 16).minimum(places)

    def emit(c, words, before):
        for v, (better, equal) in enumerate(better_and_equal(words)):
            block = row.first + c * STEP + 32 * v
            all_better, all_equal = m.ballot(better), m.ballot(equal)
            ties = (before >> 16) + (all_equal & below_lane).ones()
            at = (before & 0xFFFF) + (all_better & below_lane).ones() + ties.minimum(places)
            keep = better | (equal & (ties < places))
            m.store(ids, m.row * shape.k_blocks + at, block, where=keep)
            for flag in flags:
                m.store_byte(flag, m.row * shape.blocks + block, keep.pick(1, 0), where=block < shape.blocks)
            before = before + (all_better.ones() | (all_equal.ones() << 16))
        return before

    row.each(before, emit)
    end_row(shape, m, ids, count, kept_total)
    for flag in flags:
        _clear_flags(row, flag)


def _clear_flags(row: _Row, flag):
    """Write 0 behind the steps."""
    shape, m = row.shape, row.m
    covered = row.steps * (VECTORS * m.threads)

    def clear(i, carry):
        block = covered + i * m.threads + m.tid
        m.store_byte(flag, m.row * shape.blocks + block, m.word(0), where=block < shape.blocks)
        return carry

    left = (shape.blocks - covered).maximum(0)
    m.fold((left + (m.threads - 1)) >> (m.threads.bit_length() - 1), m.word(0), clear)


def refuses(logits, visible, *, k_blocks=2048, block_size=8, flags=False) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    rows, width = logits.shape
    if k_blocks > MAX_K:
        return f"k_blocks = {k_blocks} is more than {MAX_K}, ties are counted in 16 bits"
    if width > MAX_WIDTH:
        return f"width {width} is more than {MAX_WIDTH}, a warp's blocks are counted in 16 bits"
    if rows * width >= 1 << 33:
        return f"{rows} rows of {width} scores, words are addressed with 32 bits"
    return radix_candidates.refuses_any(logits, block_size)


def prepare(logits, visible, *, k_blocks=2048, block_size=8, flags=False, threads=THREADS, groups=None, kept=KEPT):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`. kept: at least 1."""
    shape = Shape(logits.shape[1], k_blocks, threads, kept)
    launch = {"threads": threads, "shared_words": shape.shared_words}
    inputs, outputs, launch = radix_candidates.arguments(logits, visible, shape, flags, groups, launch)
    if shape.scratch_words:
        outputs.append(((logits.shape[0], shape.scratch_words), "int32"))
    return (lambda m, *refs: kernel(shape, m, *refs)), inputs, outputs, launch


def emulated(logits, visible, *, flags=False, **kwargs):
    """The kernel in numpy, thread by thread (tests)."""
    body, inputs, outputs, launch = prepare(logits, visible, flags=flags, **kwargs)
    return tuple(simt.emulate(body, inputs, outputs, **launch)[: 3 if flags else 2])


def candidate_blocks(logits, visible, *, flags=False, **kwargs):
    """The operator; see `api.candidate_blocks` for the contract."""
    from .. import simt_mosaic

    body, inputs, outputs, launch = prepare(logits, visible, flags=flags, **kwargs)
    return simt_mosaic.launch(body, inputs, outputs, name="candidate_blocks_wide", **launch)[: 3 if flags else 2]
