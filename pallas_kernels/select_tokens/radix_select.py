"""select_tokens for Hopper and Blackwell: one block of threads per row, two-pass radix selection (`pallas_kernels.radix`).

The row is read once and stays in registers as packed 16-bit ranks, in chunks of 32 columns a thread. A warp owns
consecutive chunks, so that output positions in column order need one prefix sum per chunk. Selected columns are few:
each thread turns a chunk into two 32-bit masks and visits only the set bits. The row's k columns gather in shared memory
and leave in one coalesced store, after the optional mapping to logical positions (sparse rows) and to physical slots.
"""

import dataclasses

from .. import radix, simt
from ..codecs import cdiv

ARCHES = ("sm_90", "sm_100", "sm_103")
CHUNK = 32  # consecutive columns of a thread: four 16-byte loads, one bit each in a mask
STEP = 32 * CHUNK  # columns of a warp's chunk
MAX_CHUNKS = 2  # that a thread keeps: 32 registers
MAX_K = 4096
THREADS = 256
_SMS, _ROWS_PER_SM = 132, 3  # 3 x 256 threads leave 80 registers each: 384 rows in one wave of 128 blocks
_COLUMNS = 8  # of a 16-byte load


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
    def chunks(self) -> int:
        return cdiv(self.width, CHUNK * self.threads)

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
    nothing = cut.equals(radix.PLUS_INF) | cut.equals(radix.MINUS_INF) | dead
    return dead.pick(0, cut), nothing.pick(0, places)


def finish(shape: Shape, m, refs: Refs):
    """Write the gathered columns out. Follows a barrier."""
    if shape.blocks:
        _write_sparse(shape, m, refs)
    else:
        _write_dense(shape, m, refs)


def kernel(shape: Shape, m, *arrays):
    refs = Refs(shape, m, *arrays)
    scan = begin(shape, m, refs)
    column, left = warp_share(m, scan)
    loaded = [load_chunk(shape, m, refs.logits, column, left, c) for c in range(shape.chunks)]
    m.trigger_dependents()
    chunks = [ranks_of(m, words, left - c * STEP, scan) for c, words in enumerate(loaded)]
    m.barrier()

    def each_pair(visit):
        for c, words in enumerate(chunks):
            visit_chunk(m, words, left - c * STEP, visit)

    def check():
        for words in chunks:
            mark_nan(m, refs, words)

    cut, places, outer = radix.find_cut(m, refs.space, each_pair, shape.k, check)
    cut, places = settle(m, refs, cut, places)
    _emit(m, refs, chunks, column, cut, places, outer)
    m.barrier()
    finish(shape, m, refs)


def warp_share(m, scan):
    """Deal columns [0, scan) to the warps in order, in equal numbers of chunks.

    Returns the thread's first column and how many columns there are from it to the end of the warp's share; its chunk c
    starts c * STEP columns further.
    """
    steps = (scan + (m.threads * CHUNK - 1)) >> ((m.threads * CHUNK).bit_length() - 1)
    first = m.warp * (steps * STEP) + m.lane * CHUNK
    return first, scan.minimum((m.warp + 1) * (steps * STEP)) - first


def load_chunk(shape: Shape, m, logits, column, left, c):
    """Sixteen words of scores from `column` + c * STEP (c a Python number); -inf where nothing is left."""
    start, words = m.row * (shape.width // 2) + (column >> 1), []
    for v in range(CHUNK // _COLUMNS):
        at = c * STEP + v * _COLUMNS
        words += m.load_many(logits, start, 4, where=left > at, other=radix.MINUS_INF_PAIR, offset=at // 2)
    return words


def ranks_of(m, words, left, scan):
    """Words of scores, of which the first `left` count -> rank pairs. Only a scan that ends inside a load is masked."""

    def mask():
        out = []
        for i, word in enumerate(words):
            end = left - 2 * i
            one = (word & 0xFFFF) | (radix.MINUS_INF << 16)
            out.append((end > 1).pick(word, (end > 0).pick(one, radix.MINUS_INF_PAIR)))
        return out

    return [radix.rank_pair(w) for w in m.amend((scan & (_COLUMNS - 1)).differs(0), words, mask)]


def visit_chunk(m, words, left, visit):
    """visit(word) for the rank pairs of the loads in which any column is left."""
    for v in range(CHUNK // _COLUMNS):
        with m.when(left > v * _COLUMNS):
            for word in words[4 * v : 4 * v + 4]:
                visit(m.opaque(word))


def mark_nan(m, refs: Refs, words):
    nan = m.word(0)
    for word in words:
        for rank in radix.halves(word):
            nan = nan | ((rank < radix.PLUS_INF) | (rank > radix.MINUS_INF)).pick(1, 0)
    m.set_bits(refs.poison, 0, 1, where=nan.differs(0))


def masks(m, words, cut, outer):
    """32 ranks -> (bits of those better than the cut and finite, bits of those equal to it)."""

    def hide_infinity():
        hidden = []
        for word in words:
            low, high = radix.halves(word)
            low = low.equals(radix.PLUS_INF).pick(radix.MINUS_INF, low)
            hidden.append(low | (high.equals(radix.PLUS_INF).pick(radix.MINUS_INF, high) << 16))
        return hidden

    better, within = m.word(0), m.word(0)
    for word in reversed(m.amend(outer, words, hide_infinity)):
        for rank in reversed(radix.halves(m.opaque(word))):
            better = better.shift_in_sign(rank - cut)
            within = within.shift_in_sign(rank - (cut + 1))
    return better, within ^ better


def counts(better, equal):
    """How many are better than the cut, and in the upper half how many equal it."""
    return better.ones() | (equal.ones() << 16)


def place(m, better, equal, before, column, places, chosen):
    """Put the selected columns of a chunk into `chosen`; `before` counts those in front of it, as `counts`."""
    better_before, ties_before = before & 0xFFFF, before >> 16
    room, ties = places - ties_before, equal.ones()
    # The one chunk in which the places run out loses its last ties.
    partly = (room > 0) & (room < ties)
    rest = m.fold(partly.pick(room, 0), equal, lambda _, bits: bits & (bits - 1))
    kept = better | (room >= ties).pick(equal, partly.pick(equal ^ rest, 0))

    def visit(bit, at):
        m.put(chosen, at, column + bit)
        return at + 1

    m.each_bit(kept, better_before + ties_before.minimum(places), visit)


def _emit(m, refs: Refs, chunks, column, cut, places, outer):
    """Put the selected columns into `chosen` at their ranks in column order. Holds one barrier."""
    found, before, total = [], [], m.word(0)
    for words in chunks:
        better, equal = masks(m, words, cut, outer)
        count = counts(better, equal)
        running = m.scan_warp(count)
        found.append((better, equal))
        before.append(total + running - count)
        total = total + m.shuffle(running, 31)
    warp_before, _ = m.scan_warps(total, refs.sums)
    for c, ((better, equal), start) in enumerate(zip(found, before, strict=True)):
        place(m, better, equal, start + warp_before, column + c * STEP, places, refs.chosen)


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
    if Shape(logits.shape[1], k, THREADS).chunks > MAX_CHUNKS:
        return f"width {logits.shape[1]} does not fit in registers (at most {THREADS * CHUNK * MAX_CHUNKS} columns)"
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
