"""index_score and index_score_blocks: indexer logits over all visible columns, or over candidate blocks only."""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, registry
from pallas_kernels.index_score import blackwell, hopper, reference

OP = "index_score"
OP_BLOCKS = "index_score_blocks"

__all__ = [
    "BLOCK_IMPLEMENTATIONS", "IMPLEMENTATIONS", "explain", "explain_blocks", "index_score", "index_score_blocks",
    "reads_packed",
]  # fmt: skip


def _expect(op, condition, what, expected, got):
    if not condition:
        raise ValueError(f"{op}: {what} expected {expected}, got {got}")


def _validate(op, q, head_weights, index_pool, table):
    _expect(op, head_weights.ndim == 2, "head_weights", "[T, heads]", head_weights.shape)
    rows, heads = head_weights.shape
    dtype = head_weights.dtype
    _expect(op, dtype in (jnp.bfloat16, jnp.float32), "head_weights.dtype", "bfloat16 or float32", dtype)
    if isinstance(q, tuple):
        payload, scales = q
        _expect(op, payload.ndim == 3 and payload.shape[:2] == (rows, heads), "q payload", f"[{rows}, {heads}, J/2]",
                payload.shape)  # fmt: skip
        dim = 2 * payload.shape[2]
        _expect(op, scales.shape == (rows, heads, dim // codecs.GROUP), "q scales",
                (rows, heads, dim // codecs.GROUP), scales.shape)  # fmt: skip
    else:
        _expect(op, q.ndim == 3 and q.shape[:2] == (rows, heads), "q", f"[{rows}, {heads}, J]", q.shape)
        _expect(op, q.dtype == dtype, "q.dtype", f"head_weights.dtype = {dtype}", q.dtype)
        dim = q.shape[2]
    _expect(op, dim % codecs.GROUP == 0, "J", f"a multiple of {codecs.GROUP}", dim)
    if index_pool.dtype == jnp.uint8:
        record = codecs.index_record_bytes(dim)
        _expect(op, index_pool.ndim == 2 and index_pool.shape[1] % record == 0, "index_pool", f"[P, E * {record}]",
                index_pool.shape)  # fmt: skip
    else:
        _expect(op, index_pool.ndim == 3 and index_pool.shape[2] == dim, "index_pool", f"[P, E, {dim}]",
                index_pool.shape)  # fmt: skip
    _expect(op, table.ndim == 2 and table.shape[0] > 0 and rows % table.shape[0] == 0, "table",
            f"[B, C] with B dividing T = {rows}", table.shape)  # fmt: skip
    return rows


IMPLEMENTATIONS = (  # of the dense operator, fastest first
    registry.Implementation("hopper", hopper.index_score, ("sm_90",), hopper.refuses),
    registry.Implementation("blackwell", blackwell.index_score, blackwell.ARCHES, blackwell.refuses, reads_packed=True),
    registry.Implementation("reference", reference.index_score),
)
BLOCK_IMPLEMENTATIONS = (  # of the candidate-only operator
    registry.Implementation("hopper", hopper.index_score_blocks, ("sm_90",), hopper.refuses_blocks),
    registry.Implementation("blackwell", blackwell.index_score_blocks, blackwell.ARCHES, blackwell.refuses_blocks,
                            reads_packed=True),
    registry.Implementation("reference", reference.index_score_blocks),
)


def index_score(
    q,  # bf16|f32[T, heads, J] MXFP4-exact values, or (payload u8[T, heads, J/2], scales u8[T, heads, J/32])
    head_weights,  # bf16|f32[T, heads], 2^-6 already inside
    index_pool,  # u8[P, E * (J/2 + J/32)] planar pages, or f32[P, E, J] values
    table,  # i32[B, C], page ids; <= 0 or >= P = unallocated
    visible,  # i32[T], visible columns of each row
    *,
    fill: bool = True,
    impl: str = "auto",
    arch: str | None = None,
):
    """Score every visible column; spec/model.md section 7, spec/decode.md section 2.

    Rows are request-major: row t belongs to request t // (T / B). score = sum_h w_h * relu(<q_h, k>). bf16 weights:
    dot -> bf16, relu, times w -> bf16, fp32 sum over heads -> bf16; f32 weights: fp32 throughout. -0 becomes +0.

    Returns head_weights' dtype [T, C * E]: columns >= visible are -inf (visible is clamped to 0..C * E by this rule),
    visible columns on an unallocated page are exactly 0, whatever any page holds. `fill=False` leaves columns >=
    visible unspecified, so that the cost depends on the live context alone; a reader bounded by `visible` cannot tell.
    Raises ValueError for shapes or dtypes that do not fit together, naming what was expected and got.
    """
    rows = _validate(OP, q, head_weights, index_pool, table)
    _expect(OP, visible.shape == (rows,), "visible", (rows,), visible.shape)
    args = (q, head_weights, index_pool, table, visible)
    chosen, _ = registry.resolve(OP, IMPLEMENTATIONS, impl, arch, *args, fill=fill)
    return chosen.run(*args, fill=fill)


def index_score_blocks(
    q,  # as in index_score
    head_weights,  # bf16|f32[T, heads]
    index_pool,  # as in index_score
    table,  # i32[B, C]
    block_ids,  # i32[T, Kb], ascending candidate blocks of each row (any valid id beyond the scan length)
    end,  # i32[T], compact scan length: columns at or beyond it are filler
    *,
    block_size: int = 8,
    impl: str = "auto",
    arch: str | None = None,
):
    """Score candidate blocks only (the plan of spec/decode.md section 3).

    Compact column c of row t stands for position block_ids[t, c // block_size] * block_size + c % block_size.

    Returns head_weights' dtype [T, Kb * block_size]: columns >= end are -inf, columns on an unallocated page (or
    outside the table) are exactly 0. Arithmetic and errors as in `index_score`.
    """
    rows = _validate(OP_BLOCKS, q, head_weights, index_pool, table)
    fits = block_ids.ndim == 2 and block_ids.shape[0] == rows
    _expect(OP_BLOCKS, fits, "block_ids", f"[{rows}, Kb]", block_ids.shape)
    _expect(OP_BLOCKS, end.shape == (rows,), "end", (rows,), end.shape)
    _expect(OP_BLOCKS, block_size >= 1, "block_size", ">= 1", block_size)
    args = (q, head_weights, index_pool, table, block_ids, end)
    chosen, _ = registry.resolve(OP_BLOCKS, BLOCK_IMPLEMENTATIONS, impl, arch, *args, block_size=block_size)
    return chosen.run(*args, block_size=block_size)


def explain(*args, fill: bool = True, impl: str = "auto", arch: str | None = None) -> dict[str, str]:
    """Which implementation `index_score` gives these arguments (arrays or ShapeDtypeStructs), and why not faster ones.

    Returns {"chosen": name, name passed over: reason, ...}.
    """
    chosen, against = registry.resolve(OP, IMPLEMENTATIONS, impl, arch, *args, fill=fill)
    return {"chosen": chosen.name, **against}


def explain_blocks(*args, block_size: int = 8, impl: str = "auto", arch: str | None = None) -> dict[str, str]:
    """`explain` for `index_score_blocks`."""
    chosen, against = registry.resolve(
        OP_BLOCKS, BLOCK_IMPLEMENTATIONS, impl, arch, *args, block_size=block_size
    )
    return {"chosen": chosen.name, **against}


def reads_packed(
    head_weights,  # dtype[T, heads], array or ShapeDtypeStruct
    index_pool,  # as in index_score, as are all others
    table,
    *,
    dim: int,
    blocks: int = 0,
    block_size: int = 8,
    impl: str = "auto",
    arch: str | None = None,
) -> bool:
    """Whether the scorer of such arguments (of `blocks` candidate blocks a row, if any) multiplies the MXFP4 form of its
    queries; any other decodes it first, so its queries may as well come decoded. Raises ValueError like the scorers."""
    rows, heads = head_weights.shape
    array = jax.ShapeDtypeStruct
    q = array((rows, heads, dim // 2), jnp.uint8), array((rows, heads, dim // codecs.GROUP), jnp.uint8)
    bound = array((rows,), jnp.int32)
    if blocks:
        args = (q, head_weights, index_pool, table, array((rows, blocks), jnp.int32), bound)
        chosen, _ = registry.resolve(OP_BLOCKS, BLOCK_IMPLEMENTATIONS, impl, arch, *args, block_size=block_size)
    else:
        chosen, _ = registry.resolve(OP, IMPLEMENTATIONS, impl, arch, q, head_weights, index_pool, table, bound, fill=False)
    return chosen.reads_packed
