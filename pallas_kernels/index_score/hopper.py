"""The index scores on Hopper: when the kernels of hopper_kernel.py fit, and how they are launched."""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, gluon_call
from pallas_kernels.index_score.reference import geometry, query_values

TILE = 64  # keys a tile of the kernels
PROGRAMS = 3 * 132  # what an H100 or H200 holds at once: 3 of the dense kernel's programs on each multiprocessor
REGISTERS = 168  # a thread of the dense kernel; more would leave room for 2 programs only
# The candidates' kernel that shares decoded keys: (blocks a window, blocks kept from before it, groups of 4 warps,
# registers a thread, programs a request). Two programs fit a multiprocessor; 64 requests fill an H100 or H200 once.
WINDOW = (64, 16, 2, 128, 4)
SPARSEST = 4  # keys in reach for each candidate column, up to which decoding all of them is expected to pay


def _common_refusal(q, head_weights, index_pool):
    heads = head_weights.shape[1]
    dim = 2 * q[0].shape[-1] if isinstance(q, tuple) else q.shape[-1]
    if reason := gluon_call.unavailable():
        return reason
    if head_weights.dtype != jnp.bfloat16:
        return f"head weights are {head_weights.dtype}, the kernel is for bfloat16"
    if index_pool.dtype != jnp.uint8:
        return "the pool holds values, the kernel reads packed records"
    if dim != 128 or heads not in (16, 32, 64):
        return f"{heads} heads of {dim} channels, the kernel is for 16, 32 or 64 of 128"
    return None


def refuses(q, head_weights, index_pool, table, visible, **options):
    """Why the dense kernel does not take these arguments, or None."""
    del table, visible, options
    if reason := _common_refusal(q, head_weights, index_pool):
        return reason
    entries = geometry(index_pool, 128)[1]
    return f"pages of {entries} entries, the kernel wants a multiple of {TILE}" if entries % TILE else None


def refuses_blocks(q, head_weights, index_pool, table, block_ids, end, *, block_size):
    """Why the candidate-only kernel does not take these arguments, or None."""
    del table, end, block_size
    if reason := _common_refusal(q, head_weights, index_pool):
        return reason
    if block_ids.shape[0] > 65535 * 1024:
        return "more rows than the grid holds"
    return None


def wide(index_pool) -> bool:
    """Whether offsets in words into the pool take more than 32 bits, of which one is the sign."""
    return index_pool.size // 4 > 2**31


def rows_together(span: int) -> tuple[int, int]:
    """(rows a program scores, rows in one product): divisors of the span, at most 4 products a program."""
    even = [r for r in (8, 6, 4, 2) if span % r == 0]
    if even:
        return even[0], 2
    return (3, 1) if span % 3 == 0 else (1, 1)


def index_score(q, head_weights, index_pool, table, visible, *, fill=True, programs=PROGRAMS, registers=REGISTERS):
    """The dense operator (api.py has its contract) for bf16 weights and packed pages."""
    from pallas_kernels.index_score import hopper_kernel

    rows, heads = head_weights.shape
    batch, columns = table.shape
    pages, entries = geometry(index_pool, 128)
    together, per = rows_together(rows // batch)
    groups = rows // batch // together
    return gluon_call.gluon_call(
        hopper_kernel.dense,
        query_values(q, jnp.bfloat16), head_weights, index_pool, table, visible,
        out_shape=jax.ShapeDtypeStruct((rows, columns * entries), jnp.bfloat16),
        grid=(max(1, programs // groups), groups, 1), warps=4, compute_capability=90, maxnreg=registers,
        B=batch, BP=max(32, 1 << (batch - 1).bit_length()), S=rows // batch, ROWS=together, PER=per, HEADS=heads,
        PAGES=pages, E=entries, COLUMNS=columns, FILL=fill, WIDE=wide(index_pool),
    )  # fmt: skip


def refuses_sharing(q, head_weights, index_pool, table, block_ids, block_size: int) -> str | None:
    """Why the kernel that decodes keys once for all rows of a request is not taken or would not win, or None.

    It decodes every key that the rows reach, so with few candidates among many keys gathering them row by row is less.
    """
    del q
    rows, heads = head_weights.shape
    columns, blocks = table.shape[1], block_ids.shape[1]
    span, entries = rows // table.shape[0], geometry(index_pool, 128)[1]
    if block_size != 8 or entries % TILE:
        return f"blocks of {block_size} on pages of {entries} entries, wanted 8 and a multiple of {TILE}"
    if table.shape[0] > 65535:
        return "more requests than the grid holds"
    if not 2 <= span <= 8 or span * heads > 256:
        return f"{span} rows of {heads} heads a request, wanted 2 to 8 rows and at most 256 heads in all"
    if columns * entries > SPARSEST * blocks * block_size:
        return f"{columns * entries} keys in reach of {blocks * block_size} candidates"
    return None


def index_score_blocks(
    q, head_weights, index_pool, table, block_ids, end, *, block_size, chunk=2048, registers=None, window="auto"
):  # fmt: skip
    """The candidate-only operator (api.py has its contract) for bf16 weights and packed pages.

    window: WINDOW's five numbers for the kernel that shares decoded keys among the rows of a request, None for the one
    that gathers keys row by row, by default what `refuses_sharing` leaves. chunk, registers: columns a program and
    registers a thread of the latter.
    """
    rows, batch, columns = head_weights.shape[0], *table.shape
    span, blocks = rows // batch, block_ids.shape[1]
    pages, entries = geometry(index_pool, 128)
    if window == "auto":
        window = None if refuses_sharing(q, head_weights, index_pool, table, block_ids, block_size) else WINDOW
    arrays = (query_values(q, jnp.bfloat16), head_weights, index_pool, table, block_ids, end)
    constants = dict(S=span, HEADS=head_weights.shape[1], KB=blocks, PAGES=pages, E=entries, COLUMNS=columns)
    out_shape = jax.ShapeDtypeStruct((rows, blocks * block_size), jnp.bfloat16)
    if window is None:
        from pallas_kernels.index_score import hopper_kernel

        return gluon_call.gluon_call(
            hopper_kernel.blocks, *arrays, out_shape=out_shape, warps=4, compute_capability=90, maxnreg=registers,
            grid=(rows, codecs.cdiv(blocks * block_size, chunk), 1), BLOCK=block_size, CHUNK=chunk,
            WIDE=wide(index_pool), **constants,
        )  # fmt: skip
    from pallas_kernels.index_score import hopper_lists as lists
    from pallas_kernels.index_score import hopper_shared_kernel as shared

    fresh, kept, halves, registers, programs = window
    extra = shared.ring_bytes(fresh, kept, span, halves)
    return gluon_call.gluon_call(
        shared.request_blocks, *arrays, out_shape=out_shape, warps=4, compute_capability=90, maxnreg=registers,
        grid=(programs, batch, 1), extra_shared=extra, BYTES=extra, SP=lists.padded_rows(span, halves), HALVES=halves,
        FRESH=fresh, KEPT=kept, LIST=lists.list_length(fresh), REGISTERS=registers, **constants,
    )  # fmt: skip
