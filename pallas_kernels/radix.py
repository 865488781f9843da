"""Exact top-k of 16-bit ranks inside one block of threads: the core of select_tokens and candidate_blocks on the GPU.

A rank is a bf16 pattern remapped so that a smaller rank is a better score (spec/decode.md section 3, "DeepSelect"):
positive patterns have their magnitude inverted, so rank 0x007F is +inf, 0x0080 the largest finite value, 0xFF80 -inf,
and the NaNs lie outside those two. Two passes over the ranks find the k-th: a shared-memory histogram of the upper 11
bits, then one of the lower 5 bits of those in the bucket where the k-th falls. Eleven bits first, because eight put
nearly all scores of a row into a handful of buckets. The work does not depend on how the scores are spread: shared
atomics on one address are combined by the hardware.
"""

import typing

PLUS_INF, MINUS_INF, WORST = 0x007F, 0xFF80, 0xFFFF
MINUS_INF_PAIR = 0xFF80FF80  # two scores of -inf; also two such ranks
FINE_BITS = 5
BUCKETS = 1 << (16 - FINE_BITS)
FINE = 1 << FINE_BITS
_OUTER = 4  # buckets at either end that can hold a NaN or an infinity


class Space(typing.NamedTuple):
    """Shared arrays of `find_cut`."""

    buckets: tuple
    fine: tuple
    sums: tuple
    cell: tuple  # the bucket, how many ranks are wanted out of it, whether an outermost bucket is in use


def per_thread(threads: int) -> int:
    """Buckets each thread scans, so that it reads pairs and the outermost lie with the first and the last thread."""
    if threads & (threads - 1) or not 128 <= threads <= BUCKETS // _OUTER:
        raise ValueError(f"radix: expected a power of two of threads in 128..{BUCKETS // _OUTER}, got {threads}")
    return BUCKETS // threads


def shared_words(threads: int) -> int:
    return per_thread(threads) * threads + FINE + threads // 32 + 3


def allocate(m) -> Space:
    """Take the shared arrays and clear them; a barrier must follow."""
    buckets = m.shared(per_thread(m.threads) * m.threads)
    space = Space(buckets, m.shared(FINE), m.shared(m.warps), m.shared(3))
    for i in range(per_thread(m.threads)):
        m.put(space.buckets, m.tid + i * m.threads, 0)
    m.put(space.fine, m.tid, 0, where=m.tid < FINE)
    m.put(space.cell, m.tid, 0, where=m.tid < 3)
    return space


def rank_pair(word):
    """Two bf16 patterns in a word -> their two ranks."""
    negative = (word >> 15) & 0x00010001
    return word ^ 0x7FFF7FFF ^ (negative * 0x7FFF)


def halves(pair):
    """The two ranks of a word, lower column first."""
    return pair & 0xFFFF, pair >> 16


def cap_ties(counts, places):
    """Ranks better than the cut, and in the upper half those equal to it: of these no more than there are places.

    Which ties get one stays the same, and sums of capped counts stay in their half.
    """
    return (counts & 0xFFFF) | ((counts >> 16).minimum(places) << 16)


def find_cut(m, space: Space, each_pair, k: int, on_outer=None):
    """The k-th best rank.

    each_pair(visit): calls visit(word) for every pair of ranks of the thread. on_outer(): run, before the last barrier,
    only if some rank lies near or beyond the infinities; finite scores of ordinary size never pay for the check.
    Returns (cut, places, outer): the k-th best rank, how many of the ranks equal to it belong to the k best, and
    whether on_outer ran. With fewer than k ranks in the block the first two are 0. Follows a barrier, holds four.
    """

    def count_buckets(pair):
        m.add(space.buckets, (pair >> FINE_BITS) & (BUCKETS - 1), 1)
        m.add(space.buckets, pair >> (16 + FINE_BITS), 1)

    each_pair(count_buckets)
    m.barrier()
    _find_bucket(m, space, k)
    m.barrier()
    bucket, wanted = m.get(space.cell, 0), m.get(space.cell, 1)
    both = bucket * (0x00010001 << FINE_BITS)

    def count_fine(pair):
        rest = pair ^ both  # only the fine bits are left of a rank inside the bucket
        m.add(space.fine, rest & (FINE - 1), 1, where=(rest & (0xFFFF - FINE + 1)).equals(0))
        m.add(space.fine, (rest >> 16) & (FINE - 1), 1, where=rest.below(FINE << 16))

    outer = m.get(space.cell, 2).differs(0)
    with m.when(wanted > 0):
        each_pair(count_fine)
    if on_outer:
        with m.when(outer):
            on_outer()
    m.barrier()
    count = m.get(space.fine, m.lane)
    running = m.scan_warp(count)
    reached = m.ballot((running >= wanted) & (wanted > 0))
    at = reached.differs(0).pick(reached.lowest_bit(), 0)
    before = m.shuffle(running - count, at)
    found = wanted > 0
    return found.pick((bucket << FINE_BITS) | at, 0), found.pick(wanted - before, 0), outer


def _find_bucket(m, space: Space, k: int):
    """Store the bucket of the k-th best rank and the number still wanted inside it. Holds one barrier."""
    own = per_thread(m.threads)
    counts = []
    for i in range(0, own, 2):
        counts += m.get_many(space.buckets, m.tid * own + i, 2)
    total = counts[0]
    for c in counts[1:]:
        total = total + c
    first, last = counts[0], counts[-1]
    for low, high in zip(counts[1:_OUTER], counts[-_OUTER:-1], strict=True):
        first, last = first + low, last + high
    outermost = (m.tid.equals(0) & (first > 0)) | (m.tid.equals(m.threads - 1) & (last > 0))
    m.set_bits(space.cell, 2, 1, where=outermost)
    running, _ = m.scan_block(total, space.sums)
    for i, c in enumerate(counts):
        after = running + c
        here = (running < k) & (after >= k)
        m.put(space.cell, 0, m.tid * own + i, where=here)
        m.put(space.cell, 1, k - running, where=here)
        running = after
