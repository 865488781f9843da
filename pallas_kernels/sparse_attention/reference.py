"""What sparse attention computes, in plain jnp (spec/model.md section 5; spec/decode.md section 2, its consumer).

K and V are the same record: one latent of D channels, shared by all heads. One softmax runs over the window keys, the
selected compressed keys and a per-head sink that only enters the denominator. The dtype of `q` carries the precision:
bf16 is `released` (probabilities rounded to bf16 before they meet V, fp32 accumulation), f32 is exact fp32 arithmetic.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs
from pallas_kernels.row_tiles import in_row_tiles

EMPTY_MAX = -1e30  # running maximum of a row without keys: its exponentials are 0, never NaN


def query_shape(q, sink, first: int) -> tuple[int, int, int, int]:
    """(B, S, N, D) of queries [B, S, N, D] or [B, S, first + N*D]."""
    return q.shape if q.ndim == 4 else (*q.shape[:2], sink.shape[0], (q.shape[2] - first) // max(sink.shape[0], 1))


def _decoded(pool, rows, decode, dim, dtype):
    """Gather records `rows` i32[..., K] of pool [n, bytes or D] -> dtype[..., K, D]; rows outside are unspecified."""
    records = jnp.take(pool, rows, axis=0, mode="clip")
    return (decode(records, dim) if pool.dtype == jnp.uint8 else records).astype(dtype)


def window_keys(
    window_pool,  # u8[n_slots, R, D + D/32] or f32[n_slots, R, D]
    slots,  # i32[B], cache slot of each request, outside 0..n_slots-1 = invalid
    start,  # i32[B, S], first key position of each row
    end,  # i32[B, S], one past its last key position
    width: int,
    dim: int,
    dtype,
):
    """Read positions max(start, end - width, 0)..end-1 of each row back from the ring, at ring row `position mod R`.

    Returns keys dtype[B, S, width, D] and mask bool[B, S, width]; keys under a false mask are unspecified.
    """
    n_slots, ring = window_pool.shape[:2]
    position = end[..., None] - width + jnp.arange(width, dtype=jnp.int32)  # i32[B, S, width]
    slot_ok = (slots >= 0) & (slots < n_slots)
    mask = (position >= jnp.maximum(start, 0)[..., None]) & slot_ok[:, None, None]
    rows = jnp.where(mask, slots[:, None, None] * ring + jnp.mod(position, ring), 0)
    flat = window_pool.reshape(n_slots * ring, window_pool.shape[2])
    return _decoded(flat, rows, codecs.decode_window, dim, dtype), mask


def global_keys(
    global_pool,  # u8[P, E, D/2 + D/16] or f32[P, E, D]
    global_slots,  # i32[B, S, K] = page * E + entry, outside 0..P*E-1 = no key
    dim: int,
    dtype,
):
    """Gather selected entries -> (keys dtype[B, S, K, D], mask bool[B, S, K]); unspecified where the mask is false."""
    pages, entries = global_pool.shape[:2]
    mask = (global_slots >= 0) & (global_slots < pages * entries)
    flat = global_pool.reshape(pages * entries, global_pool.shape[2])
    return _decoded(flat, jnp.where(mask, global_slots, 0), codecs.decode_global, dim, dtype), mask


def attend(
    q,  # bf16|f32[..., N, D]
    keys,  # same dtype [..., K, D]; K = V
    mask,  # bool[..., K]
    sink,  # f32[N], a raw logit per head: not scaled, in the denominator only
    scale: float,
):
    """One joint softmax with a sink.

    logit = scale * <q, k> in fp32; out = sum p k / (sum p + exp(sink - max)) with p = exp(logit - max). The denominator
    sums fp32 probabilities; for bf16 `q` they are rounded to bf16 before they multiply V. Keys under a false mask reach
    nothing, whatever they hold. Returns q's dtype [..., N, D]; a row without keys is exactly 0.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    keys = jnp.where(mask[..., None], keys, 0).astype(q.dtype)
    logits = jnp.einsum("...nd,...kd->...nk", q, keys, precision=precision, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[..., None, :], logits * jnp.float32(scale), -jnp.inf)
    peak = jnp.maximum(jnp.max(logits, -1, keepdims=True), EMPTY_MAX)
    p = jnp.exp(logits - peak)
    denominator = jnp.sum(p, -1) + jnp.exp(sink.astype(jnp.float32) - peak[..., 0])
    p = codecs.round_values(p, q.dtype).astype(q.dtype)
    out = jnp.einsum("...nk,...kd->...nd", p, keys, precision=precision, preferred_element_type=jnp.float32)
    return codecs.round_values(out / denominator[..., None], q.dtype).astype(q.dtype)


def rope(
    x,  # bf16|f32[..., N, D]
    cos,  # f32[..., r] for r rotary pairs
    sin,  # f32[..., r]
):
    """Rotate the last 2r channels of every head, adjacent pairs, in fp32; the result is rounded to x's dtype."""
    pairs = cos.shape[-1]
    head, tail = x[..., : -2 * pairs], x[..., -2 * pairs :].astype(jnp.float32)
    re, im = tail[..., 0::2], tail[..., 1::2]
    c, s = cos[..., None, :].astype(jnp.float32), sin[..., None, :].astype(jnp.float32)
    rotated = jnp.stack([re * c - im * s, im * c + re * s], -1).reshape(tail.shape)
    return jnp.concatenate([head, codecs.rounded(rotated, x.dtype)], -1)


def inverse_rope(x, cos, sin):
    """`rope` the other way round."""
    return rope(x, cos, -sin)


def window_bounds(
    positions,  # i32[B, S]
    window: int,
    window_start,  # i32[B, S] or None
    window_end,  # i32[B, S] or None
):
    """Key range [start, end) of every row: by default the `window` positions that end with the row's own."""
    end = positions + 1 if window_end is None else window_end
    start = jnp.maximum(end - window, 0) if window_start is None else window_start
    return start, end


def sparse_attention(
    q,  # bf16|f32[B, S, N, D] or [B, S, first + N*D]
    window_pool,  # u8[n_slots, R, D + D/32] or f32[n_slots, R, D]
    slots,  # i32[B]
    positions,  # i32[B, S]
    global_pool,  # u8[P, E, D/2 + D/16], f32[P, E, D] or None
    global_slots,  # i32[B, S, K] or None
    sink,  # f32[N]
    cos,  # f32[B, S, r]
    sin,  # f32[B, S, r]
    *,
    window: int,
    scale: float,
    window_start=None,  # i32[B, S] or None
    window_end=None,  # i32[B, S] or None
    rotate_query: bool = False,
    first: int = 0,
):
    """Definition of the operator; `api.sparse_attention` documents it."""
    shape = query_shape(q, sink, first)
    q, dim = q[..., first:].reshape(shape), shape[-1]
    start, end = window_bounds(positions, window, window_start, window_end)
    keys, mask = window_keys(window_pool, slots, start, end, window, dim, q.dtype)
    if global_pool is not None:
        more, more_mask = global_keys(global_pool, global_slots, dim, q.dtype)
        keys, mask = jnp.concatenate([keys, more], 2), jnp.concatenate([mask, more_mask], 2)
    valid = (positions >= 0) & ((slots >= 0) & (slots < window_pool.shape[0]))[:, None]
    mask = mask & valid[..., None]
    q = jnp.where(valid[..., None, None], q, 0)  # an invalid row's q may hold anything

    def run(q, keys, mask, cos, sin):
        q = rope(q, cos, sin) if rotate_query else q
        return inverse_rope(attend(q, keys, mask, sink, scale), cos, sin)

    rows = (x.reshape(-1, *x.shape[2:]) for x in (q, keys, mask, cos, sin))
    return jnp.where(valid[..., None, None], in_row_tiles(run, *rows).reshape(q.shape), 0)
