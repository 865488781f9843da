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


def kernel(shape: Shape, m, logits, end, *rest):
    """rest: block_ids, causal if sparse; table, request if slots are wanted; then the outputs."""
    rest = list(rest)
    block_ids, causal = (rest.pop(0), rest.pop(0)) if shape.blocks else (None, None)
    table, request = (rest.pop(0), rest.pop(0)) if shape.table else (None, None)
    space = radix.allocate(m)
    chosen, sums, sums2, poison = m.shared(shape.k), m.shared(m.warps), m.shared(m.warps), m.shared(1)
    scan = m.load(end, m.row).clamp(0, shape.width)
    short = scan <= shape.k
    for i in range(cdiv(shape.k, m.threads)):
        j = m.tid + i * m.threads
        m.put(chosen, j, (short & (j < scan)).pick(j, -1), where=j < shape.k)
    m.put(poison, 0, 0, where=m.tid.equals(0))
    ranks, column, left, nan = _load_ranks(shape, m, logits, short.pick(0, scan))
    m.trigger_dependents()
    m.barrier()
    m.set_bits(poison, 0, 1, where=nan)

    def each_pair(visit):
        for v, words in enumerate(ranks):
            with m.when(left > v * _STEP):
                for word in words:
                    visit(m.opaque(word))

    cut, places = radix.find_cut(m, space, each_pair, shape.k)
    dead = m.get(poison, 0).differs(0)
    cut = dead.pick(0, cut)
    infinite = cut.equals(radix.PLUS_INF) | cut.equals(radix.MINUS_INF) | dead
    _emit(m, ranks, column, cut, infinite.pick(0, places), chosen, sums)
    m.barrier()
    if block_ids is None:
        _write_dense(shape, m, chosen, rest, table, request)
    else:
        _write_sparse(shape, m, chosen, rest, block_ids, causal, table, request, sums2)


def _load_ranks(shape: Shape, m, logits, scan):
    """Read columns [0, scan), per thread `vectors` times eight, 256 columns apart.

    Returns per vector four words of rank pairs (columns beyond `scan` get the worst rank), the thread's first column,
    how many columns lie from there to `scan`, and whether the thread saw a NaN inside."""
    first = m.warp * (32 * shape.vectors) + m.lane
    start, left = m.row * (shape.width // 2) + first * 4, scan - first * _COLUMNS
    loaded, ranks, highest = [], [], m.word(0)
    for v in range(shape.vectors):
        loaded.append(m.load_many(logits, start, 4, where=left > v * _STEP, offset=128 * v))
    for v, words in enumerate(loaded):
        out = []
        for i, word in enumerate(words):
            column = v * _STEP + 2 * i
            outside = (left > column + 1).pick(0, (left > column).pick(0xFFFF0000, -1))
            highest = highest.half_max(word & 0x7FFF7FFF & (outside ^ -1))
            out.append(radix.rank_pair(word) | outside)
        ranks.append(out)
    low, high = radix.halves(highest)
    return ranks, first * _COLUMNS, left, (low > 0x7F80) | (high > 0x7F80)


def _masks(m, words, cut):
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
    masks, before, total = [], [], m.word(0)
    for words in ranks:
        mask = _masks(m, [m.opaque(w) for w in words], cut)
        count = (mask & 0xFF).ones() | ((mask >> 16).ones() << 16)
        running = m.scan_warp(count)
        masks.append(mask)
        before.append(total + running - count)
        total = total + m.shuffle(running, 31)
    warp_before, _ = m.scan_warps(total, sums)
    for v, (mask, start) in enumerate(zip(masks, before, strict=True)):
        start = start + warp_before
        better_before, equal_before = start & 0xFFFF, start >> 16
        better, equal = mask & 0xFF, mask >> 16

        def visit(bit, better=better, equal=equal, lt=better_before, eq=equal_before, v=v):
            lower = (m.word(1) << bit) - 1
            ties = eq + (equal & lower).ones()
            keep = ((better >> bit) & 1).differs(0) | (ties < places)
            m.put(chosen, lt + (better & lower).ones() + ties.minimum(places), column + v * _STEP + bit, where=keep)

        # Ties past the last place need no visit.
        first_ties = (equal_before < places).pick(equal, 0)
        m.each_bit(better | first_ties, visit)


def _slot(shape: Shape, m, index, table, request):
    """Logical position (or -1) -> physical slot (or -1)."""
    requests, pages = shape.table
    row = m.load(request, m.row)
    page = _divide(m, index.maximum(0), shape.entries)
    known = (row >= 0) & (row < requests) & (index >= 0) & (page < pages)
    page_id = m.load(table, known.pick(row * pages + page, 0), where=known)
    return (page_id > 0).pick(page_id * shape.entries + (index - page * shape.entries), -1)


def _divide(m, index, entries: int):
    if entries & (entries - 1):
        raise ValueError(f"select_tokens: radix_select expects a power of two of entries per page, got {entries}")
    return index >> (entries.bit_length() - 1)


def _write_dense(shape: Shape, m, chosen, outputs, table, request):
    for i in range(cdiv(shape.k, m.threads)):
        j = m.tid + i * m.threads
        with m.when(j < shape.k):
            index = m.get(chosen, j)
            m.store(outputs[0], m.row * shape.k + j, index)
            if table is not None:
                m.store(outputs[1], m.row * shape.k + j, _slot(shape, m, index, table, request))


def _write_sparse(shape: Shape, m, chosen, outputs, block_ids, causal, table, request, sums):
    """Map columns to positions, drop those outside the causal length, close the gaps."""
    own, limit = cdiv(shape.k, m.threads), m.load(causal, m.row)
    positions, kept = [], m.word(0)
    for i in range(own):
        j = m.tid * own + i
        column = (j < shape.k).pick(m.get(chosen, j.minimum(shape.k - 1)), -1)
        there = column >= 0
        where = m.row * shape.blocks + (column.maximum(0) >> 3)
        block = m.load(block_ids, where, where=there)
        position = (block << 3) + (column & 7)
        good = there & (block >= 0) & (position < limit)
        positions.append(good.pick(position, -1))
        kept = kept + good.pick(1, 0)
    at, total = m.scan_block(kept, sums)
    for i, position in enumerate(positions):
        good, tail = position >= 0, m.tid * own + i
        _store_position(shape, m, outputs, at, position, good, table, request)
        _store_position(shape, m, outputs, tail, m.word(-1), (tail >= total) & (tail < shape.k), None, None)
        at = at + good.pick(1, 0)


def _store_position(shape: Shape, m, outputs, at, position, where, table, request):
    with m.when(where):
        m.store(outputs[0], m.row * shape.k + at, position)
        if shape.table:
            slot = m.word(-1) if table is None else _slot(shape, m, position, table, request)
            m.store(outputs[1], m.row * shape.k + at, slot)


def refuses(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    width = logits.shape[1]
    if logits.dtype != "bfloat16":
        return f"scores are {logits.dtype}, the ranks are 16 bits of bfloat16"
    if width % _COLUMNS:
        return f"width {width} is not a multiple of {_COLUMNS} (16-byte loads)"
    if Shape(width, k, THREADS).vectors > MAX_VECTORS:
        return f"width {width} does not fit in registers (at most {THREADS * _COLUMNS * MAX_VECTORS} columns)"
    if k > 4096:
        return f"k = {k} is more than the 4096 a row gathers in shared memory"
    if block_ids is not None and block_size != 8:
        return f"block_size {block_size} is not 8"
    if slot_map is not None and slot_map.entries & (slot_map.entries - 1):
        return f"{slot_map.entries} entries per page is not a power of two"
    return None


def prepare(logits, end, *, k, block_ids=None, causal=None, block_size=8, slot_map=None, threads=None, groups=None):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    rows, width = logits.shape
    inputs, outputs = [logits, end], [((rows, k), "int32")]
    shape = Shape(
        width, k, threads or THREADS,
        None if block_ids is None else block_ids.shape[1],
        None if slot_map is None else slot_map.table.shape,
        0 if slot_map is None else slot_map.entries,
    )  # fmt: skip
    if block_ids is not None:
        inputs += [block_ids, causal]
    if slot_map is not None:
        inputs += [slot_map.table, slot_map.request]
        outputs.append(((rows, k), "int32"))
    launch = {"rows": rows, "threads": shape.threads, "shared_words": shape.shared_words,
              "groups": groups or min(_ROWS_PER_SM, cdiv(rows, _SMS))}  # fmt: skip
    return (lambda m, *refs: kernel(shape, m, *refs)), inputs, outputs, launch


def emulated(logits, end, **kwargs):
    """The kernel in numpy, thread by thread (tests)."""
    body, inputs, outputs, launch = prepare(logits, end, **kwargs)
    out = simt.emulate(body, inputs, outputs, **launch)
    return out[0] if len(out) == 1 else tuple(out)


def select_tokens(logits, end, **kwargs):
    """The operator; see `api.select_tokens` for the contract."""
    from .. import simt_mosaic

    body, inputs, outputs, launch = prepare(logits, end, **kwargs)
    out = simt_mosaic.launch(body, inputs, outputs, name="select_tokens", **launch)
    return out[0] if len(out) == 1 else tuple(out)
