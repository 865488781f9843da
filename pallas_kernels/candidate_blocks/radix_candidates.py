"""candidate_blocks for Hopper and Blackwell: the row is read once, eight scores (one block) per 16-byte load.

Each thread keeps one 16-bit rank per block; `radix.find_cut` finds the last rank that is kept, ballots give every kept
block its place in ascending order. Ranks 0 and 1, which no finite score has, stand for the newest block and for blocks
with a NaN.
"""

import dataclasses

from .. import radix, simt
from ..codecs import cdiv

ARCHES = ("sm_90", "sm_100", "sm_103")
THREADS = 256
MAX_VECTORS = 48  # blocks a thread ranks, two to a register
_SMS, _ROWS_PER_SM = 132, 3
_BLOCK = 8
_NEWEST, NAN = 0, 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static facts the kernel is specialised for."""

    width: int
    k_blocks: int
    threads: int

    @property
    def blocks(self) -> int:
        return self.width // _BLOCK

    @property
    def vectors(self) -> int:
        return cdiv(self.blocks, self.threads)

    @property
    def shared_words(self) -> int:
        return radix.shared_words(self.threads) + self.threads // 32


def kernel(shape: Shape, m, logits, visible, ids, count, *flags):
    space, sums = radix.allocate(m), m.shared(m.warps)
    length = m.load(visible, m.row).clamp(0, shape.width)
    first = m.warp * (32 * shape.vectors) + m.lane
    pairs = rank_blocks(m, logits, shape.width, length, first, shape.vectors)
    m.trigger_dependents()
    m.barrier()

    def each_pair(visit):
        for pair in pairs:
            visit(pair)

    cut, places, _ = radix.find_cut(m, space, each_pair, min(shape.k_blocks, shape.blocks))
    hidden = cut.equals(NAN) | cut.equals(radix.MINUS_INF) | cut.equals(radix.WORST)
    _publish(shape, m, pairs, first, cut, hidden.pick(0, places), sums, (ids, count, *flags))


def rank_blocks(m, logits, width: int, length, first, vectors: int):
    """Ranks of the thread's blocks first, first + 32, ..., two per word; blocks with nothing visible rank worst."""
    start, left = m.row * (width // 2) + first * 4, length - first * _BLOCK
    newest = (length - 1) >> 3  # length 0: no block has this index
    loaded = [m.load_many(logits, start, 4, where=left > 32 * _BLOCK * v, offset=128 * v) for v in range(vectors)]
    ranks = []
    for v, words in enumerate(loaded):
        best, highest = m.word(-1), m.word(0)
        for i, word in enumerate(words):
            column = 32 * _BLOCK * v + 2 * i
            outside = (left > column + 1).pick(0, (left > column).pick(0xFFFF0000, -1))
            highest = highest.half_max(word & 0x7FFF7FFF & (outside ^ -1))
            best = best.half_min(radix.rank_pair(word) | outside)
        low, high = radix.halves(highest)
        rank = ((low > 0x7F80) | (high > 0x7F80)).pick(NAN, (best & 0xFFFF).minimum(best >> 16))
        ranks.append((first + 32 * v).equals(newest).pick(_NEWEST, rank))
    if len(ranks) % 2:
        ranks.append(m.word(radix.WORST))
    return [low | (high << 16) for low, high in zip(ranks[0::2], ranks[1::2], strict=True)]


def _publish(shape: Shape, m, pairs, first, cut, places, sums, outputs):
    """Write the kept blocks in ascending order, their number, and the flags."""
    ids, count, *flags = outputs
    below_lane = (m.word(1) << m.lane) - 1

    def votes(v):
        rank = radix.halves(pairs[v // 2])[v % 2]
        hidden = rank.equals(NAN) | rank.equals(radix.MINUS_INF)
        return m.ballot(rank.below(cut) & ~hidden), m.ballot(rank.equals(cut))

    total = m.word(0)  # better than the cut, and equal to it in the upper half
    for v in range(shape.vectors):
        better, equal = votes(v)
        total = total + (better.ones() | (equal.ones() << 16))
    before, all_blocks = m.scan_warps(total, sums)
    kept_total = (all_blocks & 0xFFFF) + (all_blocks >> 16).minimum(places)
    for v in range(shape.vectors):
        better, equal = votes(v)
        ties = (before >> 16) + (equal & below_lane).ones()
        at = (before & 0xFFFF) + (better & below_lane).ones() + ties.minimum(places)
        mine_better, mine_equal = (better >> m.lane) & 1, (equal >> m.lane) & 1
        keep = mine_better.differs(0) | (mine_equal.differs(0) & (ties < places))
        m.store(ids, m.row * shape.k_blocks + at, first + 32 * v, where=keep)
        for flag in flags:
            block = first + 32 * v
            m.store_byte(flag, m.row * shape.blocks + block, keep.pick(1, 0), where=block < shape.blocks)
        before = before + (better.ones() | (equal.ones() << 16))
    end_row(shape, m, ids, count, kept_total)


def end_row(shape: Shape, m, ids, count, kept_total):
    """Write how many blocks a row keeps, and -1 behind them."""
    for i in range(cdiv(shape.k_blocks, m.threads)):
        j = m.tid + i * m.threads
        m.store(ids, m.row * shape.k_blocks + j, m.word(-1), where=(j >= kept_total) & (j < shape.k_blocks))
    m.store(count, m.row, kept_total, where=m.tid.equals(0))


def refuses(logits, visible, *, k_blocks=2048, block_size=8, flags=False) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    if Shape(logits.shape[1], k_blocks, THREADS).vectors > MAX_VECTORS:
        return f"width {logits.shape[1]} does not fit in registers (at most {THREADS * _BLOCK * MAX_VECTORS} columns)"
    return refuses_any(logits, block_size)


def refuses_any(logits, block_size) -> str | None:
    """Why these arguments are neither for this kernel nor for the one of wide rows, or None."""
    if logits.dtype != "bfloat16":
        return f"scores are {logits.dtype}, the ranks are 16 bits of bfloat16"
    if block_size != _BLOCK:
        return f"block_size {block_size} is not {_BLOCK}"
    if logits.shape[1] % _BLOCK:
        return f"width {logits.shape[1]} is not a multiple of {_BLOCK} (16-byte loads)"
    return None


def prepare(logits, visible, *, k_blocks=2048, block_size=8, flags=False, threads=THREADS, groups=None):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    shape = Shape(logits.shape[1], k_blocks, threads)
    launch = {"threads": threads, "shared_words": shape.shared_words}
    return (lambda m, *refs: kernel(shape, m, *refs)), *arguments(logits, visible, shape, flags, groups, launch)


def arguments(logits, visible, shape: Shape, flags: bool, groups, launch):
    """Inputs, outputs, and the completed launch arguments."""
    rows = logits.shape[0]
    outputs = [((rows, shape.k_blocks), "int32"), ((rows,), "int32")]
    if flags:
        outputs.append(((rows, shape.blocks), "uint8"))
    launch = {**launch, "rows": rows, "groups": groups or min(_ROWS_PER_SM, cdiv(rows, _SMS))}
    return [logits, visible], outputs, launch


def emulated(logits, visible, **kwargs):
    """The kernel in numpy, thread by thread (tests)."""
    body, inputs, outputs, launch = prepare(logits, visible, **kwargs)
    return tuple(simt.emulate(body, inputs, outputs, **launch))


def candidate_blocks(logits, visible, **kwargs):
    """The operator; see `api.candidate_blocks` for the contract."""
    from .. import simt_mosaic

    body, inputs, outputs, launch = prepare(logits, visible, **kwargs)
    return tuple(simt_mosaic.launch(body, inputs, outputs, name="candidate_blocks", **launch))
