"""The index scores on Blackwell: when the kernels of blackwell_kernel.py fit, and how they are launched."""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, registry
from pallas_kernels.index_score.reference import geometry

ARCHES = ("sm_100", "sm_103")
COLUMNS_TOGETHER = 64  # most heads x rows of one product: more leaves no registers for the weights
STAGES = 5  # the table or the slots, then the keys: two levels of loads, both two tiles ahead
# (keys a tile, warps, programs held at once) of the dense kernel, (keys a tile, warps) of the candidates' one: what
# compiles without spills. On Hopper the operands are decoded first, and the kernel is there for checking.
DENSE, DENSE_HOPPER = (128, 4, 2 * 148), (64, 4, 2 * 132)
CANDIDATES, CANDIDATES_HOPPER = (256, 4), (128, 4)


def _common_refusal(q, head_weights, index_pool):
    heads = head_weights.shape[1]
    dim = 2 * q[0].shape[-1] if isinstance(q, tuple) else q.shape[-1]
    if importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed"
    if head_weights.dtype != jnp.bfloat16:
        return f"head weights are {head_weights.dtype}, the kernel is for bfloat16"
    if index_pool.dtype != jnp.uint8:
        return "the pool holds values, the kernel reads packed records"
    if dim != 128 or heads not in (16, 32, 64):
        return f"{heads} heads of {dim} channels, the kernel is for 16, 32 or 64 of 128"
    if geometry(index_pool, dim)[1] % 4:
        return f"pages of {geometry(index_pool, dim)[1]} entries, the kernel wants a multiple of 4"
    return None


def refuses(q, head_weights, index_pool, table, visible, **options):
    """Why the dense kernel does not take these arguments, or None."""
    del table, visible, options
    return _common_refusal(q, head_weights, index_pool)


def refuses_blocks(q, head_weights, index_pool, table, block_ids, end, *, block_size):
    """Why the candidate-only kernel does not take these arguments, or None."""
    del table, block_ids, end
    if reason := _common_refusal(q, head_weights, index_pool):
        return reason
    pages, entries = geometry(index_pool, 128)
    if entries % block_size:
        return f"blocks of {block_size} cross pages of {entries} entries"
    return "2**31 entries or more overflow the kernel's slots" if pages * entries >= 2**31 else None


@jax.jit  # lowered once for all layers
def _packed(q):
    """(payload, scales) of the queries; values that MXFP4 holds exactly are held exactly again."""
    return q if isinstance(q, tuple) else codecs.quantize_mxfp4(q)


def products(span: int, heads: int) -> tuple[int, int]:
    """(products a program keeps the queries of, rows in one product): their product divides the span."""
    per = next(r for r in (4, 2, 1) if span % r == 0 and r * heads <= max(COLUMNS_TOGETHER, heads))
    return next(g for g in (3, 2, 1) if span // per % g == 0), per


def _call(kernel, *arrays, shape, grid, warps, capability, **constants):
    import jax_triton

    target = {} if capability is None else {"compute_capability": capability}
    return jax_triton.triton_call(
        *arrays, kernel=kernel, out_shape=jax.ShapeDtypeStruct(shape, jnp.bfloat16), grid=grid, num_warps=warps,
        num_stages=STAGES, **target, **constants,
    )  # fmt: skip


def index_score(q, head_weights, index_pool, table, visible, *, fill=True, capability=None, launch=None):
    """The dense operator (api.py has its contract) for bf16 weights and packed pages.

    capability: e.g. 100, by default the registry's; launch: (keys a tile, warps, programs), by default the table's.
    """
    from pallas_kernels.index_score import blackwell_kernel

    rows, heads = head_weights.shape
    batch, columns = table.shape
    pages, entries = geometry(index_pool, 128)
    groups, per = products(rows // batch, heads)
    capability = capability or registry.current_capability()
    tile, warps, programs = launch or (DENSE_HOPPER if capability == 90 else DENSE)
    parts = rows // batch // (groups * per)
    return _call(
        blackwell_kernel.index_score_dense, *_packed(q), head_weights, index_pool, table, visible,
        shape=(rows, columns * entries), grid=(max(1, programs // parts), parts), warps=warps, capability=capability,
        B=batch, BP=max(32, 1 << (batch - 1).bit_length()), S=rows // batch, GROUPS=groups, PER=per, HEADS=heads,
        DIM=128, PAGES=pages, E=entries, COLUMNS=columns, FILL=fill, TILE=tile,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("pages", "entries", "block_size"))
def block_slots(table, block_ids, *, pages: int, entries: int, block_size: int):
    """i32[B, C] table, i32[T, Kb] block ids -> i32[T, Kb]: each block's first entry in the pool, -1 = unallocated.

    The layers that share a plan and a table share this: XLA computes equal expressions once.
    """
    batch, columns = table.shape
    per_page = entries // block_size
    ids = block_ids.reshape(batch, -1)
    column = ids // per_page
    inside = (ids >= 0) & (column < columns)
    page = jnp.take_along_axis(table, jnp.where(inside, column, 0), axis=1)
    live = inside & (page > 0) & (page < pages)
    return jnp.where(live, page * entries + ids % per_page * block_size, -1).reshape(block_ids.shape)


def index_score_blocks(
    q, head_weights, index_pool, table, block_ids, end, *, block_size, chunk=2048, capability=None, launch=None
):  # fmt: skip
    """The candidate-only operator (api.py has its contract) for bf16 weights and packed pages.

    chunk: columns a program; capability: e.g. 100, by default the registry's; launch: (keys a tile, warps).
    """
    from pallas_kernels.index_score import blackwell_kernel

    rows, heads = head_weights.shape
    blocks = block_ids.shape[1]
    pages, entries = geometry(index_pool, 128)
    capability = capability or registry.current_capability()
    tile, warps = launch or (CANDIDATES_HOPPER if capability == 90 else CANDIDATES)
    return _call(
        blackwell_kernel.index_score_candidates, *_packed(q), head_weights, index_pool,
        block_slots(table, block_ids, pages=pages, entries=entries, block_size=block_size), end,
        shape=(rows, blocks * block_size), grid=(rows, codecs.cdiv(blocks * block_size, chunk)), warps=warps,
        capability=capability, HEADS=heads, DIM=128, E=entries, BLOCKS=blocks, BLOCK=block_size, CHUNK=chunk,
        TILE=tile,
    )  # fmt: skip
