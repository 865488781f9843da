"""select_tokens for Hopper and Blackwell: one block of threads per row, two-pass radix selection (`pallas_kernels.radix`).

The row is read once and stays in registers as packed 16-bit ranks. A warp owns consecutive columns, so that output
positions in column order need one prefix sum per eight columns and warp. Selected columns are few: each thread turns
its eight ranks into bit masks and visits only the set bits. The row's k columns gather in shared memory and leave in
one coalesced store, after the optional mapping to logical positions (sparse rows) and to physical slots.
"""

import dataclasses

from .. import radix, simt
from ..codecs import cdiv

ARCHES = ("sm_90", "sm_100", "sm_103")
MAX_VECTORS = 8  # 8-column vectors a thread keeps: 32 registers
MAX_K = 4096
THREADS = 256
_SMS, _ROWS_PER_SM = 132, 3  # 3 x 256 threads leave 80 registers each: 384 rows in one wave of 128 blocks
_COLUMNS = 8  # in a 16-byte load
_STEP = 32 * _COLUMNS  # columns of one load of a warp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static facts the kernel is specialised for. table: (B, P) of the slot map, entries per page."""

    width: int
    k: int
    threads: int
    blocks: int | None = None
    table: tuple[int, int] | None = None
    entries: int = 0

    @property
    def vectors(self) -> int:
        return cdiv(self.width, _COLUMNS * self.threads)

    @property
    def shared_words(self) -> int:
        return radix.shared_words(self.threads) + self.k + 2 * (self.threads // 32) + 1


class Refs:
    """The kernel's arrays by name, and the shared arrays that both versions use."""

    def __init__(self, shape: Shape, m, logits, end, *rest):
        rest = list(rest)
        self.logits, self.end = logits, end
        self.block_ids, self.causal = (rest.pop(0), rest.pop(0)) if shape.blocks else (None, None)
        self.table, self.request = (rest.pop(0), rest.pop(0)) if shape.table else (None, None)
        self.outputs = rest
        self.space = radix.allocate(m)
        self.chosen, self.poison = m.shared(shape.k), m.shared(1)
        self.sums, self.sums2 = m.shared(m.warps), m.shared(m.warps)


def begin(shape: Shape, m, refs: Refs):
    """Fill in short rows and clear the NaN mark; returns how many columns to scan (0 for a short row)."""
    scan = m.load(refs.end, m.row).clamp(0, shape.width)
    short = scan <= shape.k
    for i in range(cdiv(shape.k, m.threads)):
        j = m.tid + i * m.threads
        m.put(refs.chosen, j, (short & (j < scan)).pick(j, -1), where=j < shape.k)
    m.put(refs.poison, 0, 0, where=m.tid.equals(0))
    return short.pick(0, scan)


def settle(m, refs: Refs, cut, places):
    """A row with a NaN selects nothing, and of an infinite cut nothing is kept."""
    dead = m.get(refs.poison, 0).differs(0)
    cut = dead.pick(0, cut)
    nothing = cut.equals(radix.PLUS_INF) | cut.equals(radix.MINUS_INF) | dead
    return cut, nothing.pick(0, places)


def finish(shape: Shape, m, refs: Refs):
    """Write the gathered columns out. Follows a barrier."""
    if shape.blocks:
        _write_sparse(shape, m, refs)
    else:
        _write_dense(shape, m, refs)


def kernel(shape: Shape, m, *arrays):
    refs = Refs(shape, m, *arrays)
    scan = begin(shape, m, refs)
    ranks, column, left, nan = _load_ranks(shape, m, refs.logits, scan)
    m.trigger_dependents()
    m.barrier()
    m.set_bits(refs.poison, 0, 1, where=nan)

    def each_pair(visit):
        for v, words in enumerate(ranks):
            with m.when(left > v * _STEP):
                for word in words:
                    visit(m.opaque(word))

    cut, places = settle(m, refs, *radix.find_cut(m, refs.space, each_pair, shape.k))
    _emit(m, ranks, column, cut, places, refs.chosen, refs.sums)
    m.barrier()
    finish(shape, m, refs)


def _load_ranks(shape: Shape, m, logits, scan):
    """Read columns [0, scan), per thread `vectors` times eight, 256 columns apart.

    Returns per vector four words of rank pairs (columns out of the warp's share get the worst rank), the thread's first
    column, how many columns lie from there to the end of the share, and whether the thread saw a NaN inside."""
    first, left = warp_share(m, scan)
    start = m.row * (shape.width // 2) + first * 4
    loaded, ranks, highest = [], [], m.word(0)
    for v in range(shape.vectors):
        loaded.append(m.load_many(logits, start, 4, where=left > v * _STEP, offset=128 * v))
    for v, words in enumerate(loaded):
        out, highest = ranks_of(m, words, left - v * _STEP, highest)
        ranks.append(out)
    return ranks, first * _COLUMNS, left, has_nan(highest)


def warp_share(m, scan):
    """Deal columns [0, scan) to the warps in order, in equal numbers of 256-column steps.

    Returns the thread's first vector and the number of columns from its start to the end of the warp's share.
    """
    steps = (scan + (m.threads * _COLUMNS - 1)) >> (m.threads * _COLUMNS).bit_length() - 1
    first = m.warp * (steps << 5) + m.lane
    return first, scan.minimum((m.warp + 1) * (steps * _STEP)) - first * _COLUMNS


def ranks_of(m, words, left, highest):
    """Four words of scores, of which the first `left` count -> (their rank pairs, highest magnitude seen so far)."""
    out = []
    for i, word in enumerate(words):
        outside = (left > 2 * i + 1).pick(0, (left > 2 * i).pick(0xFFFF0000, -1))
        highest = highest.half_max(word & 0x7FFF7FFF & (outside ^ -1))
        out.append(radix.rank_pair(word) | outside)
    return out, highest


def has_nan(highest):
    low, high = radix.halves(highest)
    return (low > 0x7F80) | (high > 0x7F80)


def masks(m, words, cut):
    """Eight ranks -> bits 0..7: better than the cut and finite; bits 16..23: equal to the cut."""
    zero = radix.LAST_FINITE_BEFORE << 16
    bar = (cut << 16) - zero
    mask = m.word(0)
    for i, word in enumerate(words):
        for j, aligned in enumerate((word << 16, word & 0xFFFF0000)):
            bit = 1 << (2 * i + j)
            # Shifting the origin to the first finite rank sends the infinity and NaN ranks to the far end.
            better = (aligned - zero).below(bar) & (cut > radix.PLUS_INF)
            equal = aligned.equals(cut << 16)
            mask = mask | better.pick(bit, equal.pick(bit << 16, 0))
    return mask


def _emit(m, ranks, column, cut, places, chosen, sums):
    """Put the selected columns into `chosen` at their ranks in column order. Holds one barrier."""
    all_masks, before, total = [], [], m.word(0)
    for words in ranks:
        mask = masks(m, [m.opaque(w) for w in words], cut)
        count = counts(mask)
        running = m.scan_warp(count)
        all_masks.append(mask)
        before.append(total + running - count)
        total = total + m.shuffle(running, 31)
    warp_before, _ = m.scan_warps(total, sums)
    for v, (mask, start) in enumerate(zip(all_masks, before, strict=True)):
        place(m, mask, start + warp_before, column + v * _STEP, places, chosen)


def counts(mask):
    """Bit masks -> how many are better than the cut, and in the upper half how many equal it."""
    return (mask & 0xFF).ones() | ((mask >> 16).ones() << 16)


def place(m, mask, before, column, places, chosen):
    """Put the selected ones of eight columns into `chosen`; `before` counts those in front of them, as `counts`."""
    better_before, ties_before = before & 0xFFFF, before >> 16
    better, equal = mask & 0xFF, mask >> 16

    def visit(bit):
        lower = (m.word(1) << bit) - 1
        ties = ties_before + (equal & lower).ones()
        keep = ((better >> bit) & 1).differs(0) | (ties < places)
        m.put(chosen, better_before + (better & lower).ones() + ties.minimum(places), column + bit, where=keep)

    # Ties past the last place need no visit.
    m.each_bit(better | (ties_before < places).pick(equal, 0), visit)


def _write_dense(shape: Shape, m, refs: Refs):
    for i in range(cdiv(shape.k, m.threads)):
        j = m.tid + i * m.threads
        with m.when(j < shape.k):
            index = m.get(refs.chosen, j)
            _store(shape, m, refs, j, index, _slot(shape, m, index, refs))


def _write_sparse(shape: Shape, m, refs: Refs):
    """Map columns to positions, drop those outside the causal length, close the gaps. Holds one barrier."""
    own, limit = cdiv(shape.k, m.threads), m.load(refs.causal, m.row)
    positions, kept = [], m.word(0)
    for i in range(own):
        j = m.tid * own + i
        column = (j < shape.k).pick(m.get(refs.chosen, j.minimum(shape.k - 1)), -1)
        there = column >= 0
        block = m.load(refs.block_ids, m.row * shape.blocks + (column.maximum(0) >> 3), where=there)
        position = (block << 3) + (column & 7)
        good = there & (block >= 0) & (position < limit)
        positions.append(good.pick(position, -1))
        kept = kept + good.pick(1, 0)
    at, total = m.scan_block(kept, refs.sums2)
    for i, position in enumerate(positions):
        good, tail = position >= 0, m.tid * own + i
        with m.when(good):
            _store(shape, m, refs, at, position, _slot(shape, m, position, refs))
        with m.when((tail >= total) & (tail < shape.k)):
            _store(shape, m, refs, tail, m.word(-1), m.word(-1))
        at = at + good.pick(1, 0)


def _slot(shape: Shape, m, index, refs: Refs):
    """Logical position (or -1) -> physical slot (or -1); None where no slots are wanted."""
    if not shape.table:
        return None
    requests, pages = shape.table
    row = m.load(refs.request, m.row)
    page = index.maximum(0) >> (shape.entries.bit_length() - 1)
    known = (row >= 0) & (row < requests) & (index >= 0) & (page < pages)
    page_id = m.load(refs.table, known.pick(row * pages + page, 0), where=known)
    return (page_id > 0).pick(page_id * shape.entries + (index - page * shape.entries), -1)


def _store(shape: Shape, m, refs: Refs, at, index, slot):
    m.store(refs.outputs[0], m.row * shape.k + at, index)
    if slot is not None and shape.table:
        m.store(refs.outputs[1], m.row * shape.k + at, slot)


def refuses_any(logits, k, block_ids, block_size, slot_map) -> str | None:
    """Why these arguments are for neither version, or None."""
    if logits.dtype != "bfloat16":
        return f"scores are {logits.dtype}, the ranks are 16 bits of bfloat16"
    if logits.shape[1] % _COLUMNS:
        return f"width {logits.shape[1]} is not a multiple of {_COLUMNS} (16-byte loads)"
    if k > MAX_K:
        return f"k = {k} is more than the {MAX_K} a row gathers in shared memory"
    if block_ids is not None and block_size != _COLUMNS:
        return f"block_size {block_size} is not {_COLUMNS}"
    if slot_map is not None and slot_map.entries & (slot_map.entries - 1):
        return f"{slot_map.entries} entries per page is not a power of two"
    return None


def refuses(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    if Shape(logits.shape[1], k, THREADS).vectors > MAX_VECTORS:
        return f"width {logits.shape[1]} does not fit in registers (at most {THREADS * _COLUMNS * MAX_VECTORS} columns)"
    return refuses_any(logits, k, block_ids, block_size, slot_map)


def shape_of(logits, k, block_ids, slot_map, threads) -> Shape:
    blocks = None if block_ids is None else block_ids.shape[1]
    table, entries = (None, 0) if slot_map is None else (slot_map.table.shape, slot_map.entries)
    return Shape(logits.shape[1], k, threads, blocks, table, entries)


def prepare(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None, threads=THREADS, groups=None):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    shape = shape_of(logits, k, block_ids, slot_map, threads)
    launch = {"threads": threads, "shared_words": shape.shared_words}
    rest = arguments(logits, end, shape, block_ids, causal, slot_map, groups, launch)
    return (lambda m, *refs: kernel(shape, m, *refs)), *rest


def arguments(logits, end, shape: Shape, block_ids, causal, slot_map, groups, launch):
    """Inputs in the order `Refs` takes them, outputs, and the completed launch arguments."""
    rows = logits.shape[0]
    inputs, outputs = [logits, end], [((rows, shape.k), "int32")]
    if block_ids is not None:
        inputs += [block_ids, causal]
    if slot_map is not None:
        inputs += [slot_map.table, slot_map.request]
        outputs.append(((rows, shape.k), "int32"))
    return inputs, outputs, {**launch, "rows": rows, "groups": groups or min(_ROWS_PER_SM, cdiv(rows, _SMS))}


def run_emulated(prepared):
    body, inputs, outputs, launch = prepared
    out = simt.emulate(body, inputs, outputs, **launch)
    return out[0] if len(out) == 1 else tuple(out)


def run_compiled(prepared, name: str):
    from .. import simt_mosaic

    body, inputs, outputs, launch = prepared
    out = simt_mosaic.launch(body, inputs, outputs, name=name, **launch)
    return out[0] if len(out) == 1 else tuple(out)


def emulated(logits, end, **kwargs):
    """The kernel in numpy, thread by thread (tests)."""
    return run_emulated(prepare(logits, end, **kwargs))


def select_tokens(logits, end, **kwargs):
    """The operator; see `api.select_tokens` for the contract."""
    return run_compiled(prepare(logits, end, **kwargs), "select_tokens")
