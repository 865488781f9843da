"""The index scores on Hopper: when the kernels of hopper_kernel.py fit, and how they are launched."""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, gluon_call
from pallas_kernels.index_score.reference import geometry, query_values

TILE = 64  # keys a tile of the kernels
PROGRAMS = 3 * 132  # what an H100 or H200 holds at once: 3 of the dense kernel's programs on each multiprocessor
REGISTERS = 168  # a thread of the dense kernel; more would leave room for 2 programs only


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
    if index_pool.size // 4 >= 2**31:
        return "an index pool of 8 GiB or more overflows the kernel's word offsets"
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
        PAGES=pages, E=entries, COLUMNS=columns, FILL=fill,
    )  # fmt: skip


def index_score_blocks(q, head_weights, index_pool, table, block_ids, end, *, block_size, chunk=2048, registers=None):
    """The candidate-only operator (api.py has its contract) for bf16 weights and packed pages."""
    from pallas_kernels.index_score import hopper_kernel

    rows, heads = head_weights.shape
    batch, columns = table.shape
    blocks = block_ids.shape[1]
    pages, entries = geometry(index_pool, 128)
    return gluon_call.gluon_call(
        hopper_kernel.blocks,
        query_values(q, jnp.bfloat16), head_weights, index_pool, table, block_ids, end,
        out_shape=jax.ShapeDtypeStruct((rows, blocks * block_size), jnp.bfloat16),
        grid=(rows, codecs.cdiv(blocks * block_size, chunk), 1), warps=4, compute_capability=90, maxnreg=registers,
        S=rows // batch, HEADS=heads, KB=blocks, BLOCK=block_size, CHUNK=chunk,
        PAGES=pages, E=entries, COLUMNS=columns,
    )  # fmt: skip
