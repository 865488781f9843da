"""sparse_plan for Hopper and Blackwell: one block of threads per row.

Ids in any order set bits of a shared bitmap over the row's blocks, which sorts them and collapses duplicates at once;
flags are the bitmap already, a ballot at a time. A warp turns a word of it into 32 neighbouring stores. A sorted prefix
is only cut and padded.
"""

import dataclasses

from .. import simt
from ..codecs import cdiv
from .reference import SparsePlan

ARCHES = ("sm_90", "sm_100", "sm_103")
THREADS = 256
MAX_BITMAP_WORDS = 4096  # 2**20 positions
_SMS, _ROWS_PER_SM = 132, 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static facts the kernel is specialised for."""

    kind: str
    columns: int
    k: int
    key_count: int
    block_size: int
    threads: int
    has_valid: bool

    @property
    def blocks(self) -> int:
        return cdiv(self.key_count, self.block_size)

    @property
    def words_per_warp(self) -> int:
        return cdiv(self.blocks, 32 * (self.threads // 32))

    @property
    def bitmap_words(self) -> int:
        return self.words_per_warp * (self.threads // 32) if self.kind == "ids" else 0

    @property
    def shared_words(self) -> int:
        return self.bitmap_words + self.threads // 32 + 1


def kernel(shape: Shape, m, candidates, visible, *rest):
    rest = list(rest)
    count = rest.pop(0) if shape.kind == "prefix" else None
    valid = rest.pop(0) if shape.has_valid else None
    indices, end, row_ke, row_ks = rest
    ke = m.load(visible, m.row).clamp(0, shape.key_count)
    limit = _divide(m, ke + (shape.block_size - 1), shape.block_size)
    if valid is not None:
        limit = m.load_byte(valid, m.row).differs(0).pick(limit, 0)
    sums, cell = m.shared(m.warps), m.shared(1)
    m.put(cell, 0, 0, where=m.tid.equals(0))
    if shape.kind == "prefix":
        n = _cut_prefix(shape, m, candidates, m.load(count, m.row), limit, indices, sums, cell)
    else:
        n = _compact(shape, m, candidates, limit, indices, sums, cell)
    m.barrier()
    last = m.get(cell, 0)
    for i in range(cdiv(shape.k, m.threads)):
        j = m.tid + i * m.threads
        m.store(indices, m.row * shape.k + j, last, where=(j >= n) & (j < shape.k))
    scan = (n - 1) * shape.block_size + (ke - last * shape.block_size).clamp(0, shape.block_size)
    with m.when(m.tid.equals(0)):
        m.store(end, m.row, (n > 0).pick(scan, 0))
        m.store(row_ke, m.row, ke)
        m.store(row_ks, m.row, m.word(0))


def _divide(m, value, by: int):
    return value >> (by.bit_length() - 1)  # `refuses` lets only powers of two in


def _cut_prefix(shape: Shape, m, ids, count, limit, indices, sums, cell):
    """Copy the part of the prefix that is in range; returns its length. The last id goes to `cell`."""
    found, inside = [], m.word(0)
    for i in range(cdiv(shape.k, m.threads)):
        j = m.tid + i * m.threads
        block = m.load(ids, m.row * shape.k + j, where=(j < count) & (j < shape.k), other=-1)
        good = (block >= 0) & (block < limit)
        found.append((j, block, good))
        inside = inside + good.pick(1, 0)
    _, n = m.scan_block(inside, sums)
    for j, block, good in found:
        m.store(indices, m.row * shape.k + j, block, where=good)
        m.put(cell, 0, block, where=good & j.equals(n - 1))
    return n


def _compact(shape: Shape, m, candidates, limit, indices, sums, cell):
    """Store the set blocks below `limit` in ascending order, at most k; returns their number."""
    bitmap = _bitmap(shape, m, candidates, limit) if shape.kind == "ids" else None
    first_word, below_lane = m.warp * shape.words_per_warp, (m.word(1) << m.lane) - 1
    steps = m.word(shape.words_per_warp)

    def bits(i):
        if bitmap is not None:
            return m.get(bitmap, first_word + i)
        block = (first_word + i) * 32 + m.lane
        flag = m.load_byte(candidates, m.row * shape.blocks + block, where=block < limit)
        return m.ballot(flag.differs(0))

    total = m.fold(steps, m.word(0), lambda i, sofar: sofar + bits(i).ones())
    before, everything = m.scan_warps(total, sums)
    n = everything.minimum(shape.k)

    def emit(i, at):
        word = bits(i)
        mine = at + (word & below_lane).ones()
        block = (first_word + i) * 32 + m.lane
        keep = ((word >> m.lane) & 1).differs(0) & (mine < shape.k)
        m.store(indices, m.row * shape.k + mine, block, where=keep)
        m.put(cell, 0, block, where=keep & mine.equals(n - 1))
        return at + word.ones()

    m.fold(steps, before, emit)
    return n


def _bitmap(shape: Shape, m, ids, limit):
    """Shared bitmap of the ids in [0, limit). Holds two barriers."""
    bitmap = m.shared(shape.bitmap_words)
    for i in range(cdiv(shape.bitmap_words, m.threads)):
        j = m.tid + i * m.threads
        m.put(bitmap, j, 0, where=j < shape.bitmap_words)
    wide = 4 if shape.columns % 4 == 0 else 1
    loaded = []
    for i in range(cdiv(shape.columns, wide * m.threads)):
        j = (m.tid + i * m.threads) * wide
        loaded += m.load_many(ids, m.row * shape.columns + j, wide, where=j < shape.columns, other=-1)
    m.barrier()
    for block in loaded:
        m.set_bits(bitmap, block >> 5, m.word(1) << (block & 31), where=(block >= 0) & (block < limit))
    m.barrier()
    return bitmap


def refuses(candidates, visible, *, key_count, k, kind, count=None, valid=None, block_size=8) -> str | None:
    """Why these arguments are not for this kernel, or None."""
    if block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two"
    if kind != "flags" and candidates.dtype != "int32":
        return f"ids are {candidates.dtype}, not int32"
    blocks = cdiv(key_count, block_size)
    if blocks > 32 * MAX_BITMAP_WORDS:
        return f"{blocks} blocks are more than the {32 * MAX_BITMAP_WORDS} of the shared bitmap"
    if kind == "ids" and candidates.shape[1] > 64 * THREADS:
        return f"{candidates.shape[1]} ids a row are more than the {64 * THREADS} a block keeps in flight"
    if kind == "prefix" and k > 16 * THREADS:
        return f"k = {k} is more than the {16 * THREADS} a block keeps in flight"
    return None


def prepare(
    candidates, visible, *, key_count, k, kind, count=None, valid=None, block_size=8, threads=THREADS, groups=None
):
    """(kernel, inputs, outputs, launch arguments) for `simt_mosaic.launch` or `simt.emulate`."""
    rows, columns = candidates.shape
    shape = Shape(kind, columns, k, key_count, block_size, threads, valid is not None)
    inputs = [candidates, visible, *(x for x in (count, valid) if x is not None)]
    outputs = [((rows, k), "int32"), ((rows,), "int32"), ((rows,), "int32"), ((rows,), "int32")]
    launch = {"rows": rows, "threads": threads, "shared_words": shape.shared_words,
              "groups": groups or min(_ROWS_PER_SM, cdiv(rows, _SMS))}  # fmt: skip
    return (lambda m, *refs: kernel(shape, m, *refs)), inputs, outputs, launch


def _plan(out, key_count, block_size) -> SparsePlan:
    indices, end, row_ke, row_ks = out
    return SparsePlan(row_ks, row_ke, indices, end, key_count, block_size)


def emulated(candidates, visible, **kwargs) -> SparsePlan:
    """The kernel in numpy, thread by thread (tests)."""
    body, inputs, outputs, launch = prepare(candidates, visible, **kwargs)
    return _plan(simt.emulate(body, inputs, outputs, **launch), kwargs["key_count"], kwargs.get("block_size", 8))


def sparse_plan(candidates, visible, **kwargs) -> SparsePlan:
    """The operator; see `api.sparse_plan` for the contract."""
    from .. import simt_mosaic

    body, inputs, outputs, launch = prepare(candidates, visible, **kwargs)
    out = simt_mosaic.launch(body, inputs, outputs, name="sparse_plan", **launch)
    return _plan(out, kwargs["key_count"], kwargs.get("block_size", 8))
