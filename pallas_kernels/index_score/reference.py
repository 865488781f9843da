"""What the index scores are, in plain jnp (spec/model.md section 7, spec/decode.md section 2 "Dense FULL scoring").

score = sum over heads of w_h * relu(<q_h, k>). bf16 head weights mean `released`: the dot is rounded to bf16, the
weighted term again, the sum over heads runs in fp32 and is rounded to bf16. f32 head weights mean fp32 throughout.
-0 is written as +0, so equal scores have equal bits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs
from pallas_kernels.row_tiles import in_row_tiles

CHUNK_ELEMENTS = 1 << 26  # per-head products held at once; beyond it requests are scored in turn
KEY_TILE = 64


def geometry(index_pool, dim: int) -> tuple[int, int]:
    """(pages, entries a page) of an index pool u8[P, E * (J/2 + J/32)] or f32[P, E, J]."""
    pages, width = index_pool.shape[:2]
    return pages, width // codecs.index_record_bytes(dim) if index_pool.dtype == jnp.uint8 else width


def query_values(q, dtype):
    """Index queries -> dtype[T, heads, J]: values as they are, or (payload, scales) of the MXFP4 form decoded."""
    return codecs.decode_index(*q).astype(dtype) if isinstance(q, tuple) else q.astype(dtype)


def _runs(pool, page, offset, size: int):
    """pool u8[P, W], page and offset i32[...] -> u8[..., size]: runs of bytes, gathered without reshaping the pool."""
    take = lambda p, o: jax.lax.dynamic_slice(pool, (p, o), (1, size))[0]
    return jax.vmap(take)(page.reshape(-1), offset.reshape(-1)).reshape(*page.shape, size)


def gather_keys(
    index_pool,  # u8[P, E * (J/2 + J/32)] planar or f32[P, E, J]
    table,  # i32[..., C], page ids of one request a row, <= 0 = unallocated
    position,  # i32[..., n], logical entry positions
    dim: int,
    dtype,
):
    """Read index keys by logical position -> (keys dtype[..., n, J], allocated bool[..., n]).

    A position outside the table, or on a page that is unallocated or outside the pool, is unallocated: its key is 0.
    """
    pages, entries = geometry(index_pool, dim)
    column = position // entries
    inside = (position >= 0) & (column < table.shape[-1])
    page = jnp.take_along_axis(table, jnp.where(inside, column, 0), axis=-1)
    allocated = inside & (page > 0) & (page < pages)
    page, entry = jnp.where(allocated, page, 0), jnp.where(allocated, position % entries, 0)
    if index_pool.dtype == jnp.uint8:
        half, scales = dim // 2, dim // codecs.GROUP
        payload = _runs(index_pool, page, entry * half, half)
        keys = codecs.decode_index(payload, _runs(index_pool, page, entries * half + entry * scales, scales))
    else:
        keys = index_pool[page, entry]
    return jnp.where(allocated[..., None], keys, 0).astype(dtype), allocated


def weighted_scores(
    q,  # bf16|f32[..., heads, J]
    weights,  # same dtype [..., heads]
    keys,  # same dtype [..., n, J]
):
    """The score itself -> weights' dtype [..., n]; see the module docstring for its roundings."""
    dtype = weights.dtype
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = jnp.einsum("...hj,...nj->...hn", q, keys, precision=precision, preferred_element_type=jnp.float32)
    term = jnp.maximum(codecs.round_values(dot, dtype), 0) * weights[..., None].astype(jnp.float32)
    score = jnp.sum(codecs.round_values(term, dtype), axis=-2).astype(dtype)
    return jnp.where(score == 0, jnp.zeros((), dtype), score)  # also turns -0 into +0


def _by_request(function, operands, elements: int):
    """Map `function` over the leading (request) axis, as many requests at once as CHUNK_ELEMENTS allows; on a CPU one at
    a time (row_tiles.py)."""
    batch = max(1, min(CHUNK_ELEMENTS // max(elements, 1), 64))
    return jax.lax.platform_dependent(
        *operands,
        cpu=lambda *x: jax.lax.map(function, x),
        default=lambda *x: jax.lax.map(function, x, batch_size=batch),
    )


def _dense_scores(
    q,  # [S, heads, J]
    weights,  # [S, heads]
    keys,  # [n, J]
):
    """[S, n]; on a CPU a row and KEY_TILE keys at a time, so that a score depends neither on S nor on the capacity n."""

    def one_row(x):
        return in_row_tiles(lambda k: weighted_scores(*x, k), keys, rows=KEY_TILE)

    return jax.lax.platform_dependent(q, weights, cpu=lambda *x: jax.lax.map(one_row, x),
                                      default=lambda q, w: weighted_scores(q, w, keys))  # fmt: skip


def index_score(q, head_weights, index_pool, table, visible, *, fill: bool = True):
    """Definition of the dense operator; `api.index_score` documents it. It fills whether asked or not."""
    del fill
    rows, heads = head_weights.shape
    requests, columns = table.shape
    q = query_values(q, head_weights.dtype)
    dim, span = q.shape[-1], rows // requests
    capacity = columns * geometry(index_pool, dim)[1]
    position = jnp.arange(capacity, dtype=jnp.int32)

    def one_request(operands):
        q, weights, table, visible = operands  # [S, heads, J], [S, heads], i32[C], i32[S]
        keys, _ = gather_keys(index_pool, table, position, dim, weights.dtype)
        scores = _dense_scores(q, weights, keys)
        return jnp.where(position < visible[:, None], scores, -jnp.inf).astype(weights.dtype)

    operands = (
        q.reshape(requests, span, heads, dim),
        head_weights.reshape(requests, span, heads),
        table,
        visible.reshape(requests, span),
    )
    return _by_request(one_request, operands, span * heads * capacity).reshape(rows, capacity)


def index_score_blocks(q, head_weights, index_pool, table, block_ids, end, *, block_size: int):
    """Definition of the candidate-only operator; `api.index_score_blocks` documents it."""
    rows, heads = head_weights.shape
    requests, blocks = table.shape[0], block_ids.shape[1]
    q = query_values(q, head_weights.dtype)
    dim, span = q.shape[-1], rows // requests
    column = jnp.arange(blocks * block_size, dtype=jnp.int32)

    def one_request(operands):
        q, weights, table, ids, end = operands  # [S, heads, J], [S, heads], i32[C], i32[S, Kb], i32[S]
        position = ids[:, column // block_size] * block_size + column % block_size
        keys, _ = gather_keys(index_pool, jnp.broadcast_to(table, (span, *table.shape)), position, dim, weights.dtype)
        scores = in_row_tiles(weighted_scores, q, weights, keys)
        return jnp.where(column < end[:, None], scores, -jnp.inf).astype(weights.dtype)

    operands = (
        q.reshape(requests, span, heads, dim),
        head_weights.reshape(requests, span, heads),
        table,
        block_ids.reshape(requests, span, blocks),
        end.reshape(requests, span),
    )
    return _by_request(one_request, operands, span * heads * column.size).reshape(rows, column.size)
