"""What the global producer is after its products, in plain jnp (spec/model.md section 6; spec/decode.md, A1)."""

import jax
import jax.numpy as jnp

from .. import codecs
from ..row_ops import drop_negative, matmul, rms_norm, rotate
from ..row_tiles import in_row_tiles


def pool_pairs(
    value,  # f32[B, S, D]
    gate,  # f32[B, S, D]
    previous,  # f32[B, 2, D] value and gate of the row before the chunk
):
    """f32[B, S, D]: every row pooled with its predecessor, softmax over the two gates per channel. Only rows at odd
    positions are ever stored; the others are computed because masking them would cost the same."""
    before_v = jnp.concatenate([previous[:, None, 0], value[:, :-1]], 1)
    before_g = jnp.concatenate([previous[:, None, 1], gate[:, :-1]], 1)
    rows = (x.reshape(-1, x.shape[-1]) for x in (before_v, before_g, value, gate))
    return in_row_tiles(pool_rows, *rows).reshape(value.shape)


def pool_rows(before_v, before_g, value, gate):
    """f32[..., D], from four of that shape: softmax over the two gates per channel."""
    top = jnp.maximum(before_g, gate)
    a, b = jnp.exp(before_g - top), jnp.exp(gate - top)
    return (a / (a + b)) * before_v + (b / (a + b)) * value


def pending_row(pending, slots, start):
    """f32[B, 2, D]: the pending row just before the chunk; 0 for padding requests. At start 0 any row will do: position
    0 completes no group."""
    row = pending[jnp.maximum(slots, 0), (start - 1) % pending.shape[1]]
    return jnp.where((slots >= 0)[:, None, None], row, 0)


def _store_pending(pending, value, gate, previous, slots, start, row_slots, positions, kept):
    """The ring with the chunk's rows, and the row before it written back as it was: so the update depends on
    the read, and XLA, which orders by data alone, need not copy the ring to keep the old rows for it."""
    held, ring = pending.shape[:2]
    at = jnp.where(kept, row_slots, held)
    # a chunk that may reach round the ring to that row does not write it back: one row never has two writers
    back = jnp.where((slots >= 0) & (value.shape[1] < ring), slots, held)
    rows = jnp.stack([value, gate], 2).reshape(-1, 2, value.shape[-1])
    return pending.at[jnp.concatenate([at, back]), jnp.concatenate([positions, start - 1]) % ring].set(
        jnp.concatenate([rows, previous]), mode="drop"
    )


def latents(value, gate, norm, pending, slots, start, row_slots, positions, kept, *, eps: float, dtype):
    """(dtype[T, D] un-rotated latents of every row, new pending). Arguments as in `api.global_producer`."""
    if gate is None:
        return rms_norm(value, norm, eps), pending
    by_request = (slots.shape[0], -1, value.shape[-1])
    value, gate = value.reshape(by_request), gate.reshape(by_request)
    # read once: a second read, fused elsewhere, would not be ordered before the update
    previous = jax.lax.optimization_barrier(pending_row(pending, slots, start))
    pooled = pool_pairs(value, gate, previous)
    pending = _store_pending(pending, value, gate, previous, slots, start, row_slots, positions, kept)
    pooled = codecs.rounded(pooled.reshape(-1, pooled.shape[-1]), dtype)
    return rms_norm(pooled, norm, eps), pending


def global_producer(
    global_pool, index_pool, pending, value, gate, norm, wk, key_norm, cos, sin, global_slots, index_slots,
    slots, start, row_slots, positions, kept, *, eps: float, dtype
):  # fmt: skip
    """See `api.global_producer`."""
    latent, pending = latents(value, gate, norm, pending, slots, start, row_slots, positions, kept, eps=eps, dtype=dtype)
    entry = rotate(latent, cos, sin)
    keys = rotate(rms_norm(matmul(latent, wk), key_norm, eps), cos, sin)
    return store_global(global_pool, entry, global_slots), store_index(index_pool, keys, index_slots), pending


def store_global(
    pool,  # u8[P, E, bytes] or f32[P, E, D]
    values,  # dtype[T, D]
    slots,  # i32[T], page * E + entry, negative = skip
):
    """The pool with one compressed entry written per row whose slot is not -1."""
    record = codecs.encode_global(values) if pool.dtype == jnp.uint8 else values.astype(jnp.float32)
    per_page = pool.shape[1]
    at = drop_negative(slots, pool.shape[0] * per_page)
    return pool.at[at // per_page, at % per_page].set(record, mode="drop")


def store_index(
    pool,  # u8[P, E * (J/2 + J/32)] planar or f32[P, E, J]
    values,  # dtype[T, J]
    slots,  # i32[T], page * E + entry, negative = skip
):
    """The pool with one index key written per row whose slot is not -1: payload and scales go to their planes."""
    if pool.dtype != jnp.uint8:
        return store_global(pool, values, slots)
    payload, scale = codecs.encode_index(values)
    half, group = payload.shape[-1], scale.shape[-1]
    per_page = pool.shape[1] // (half + group)
    at = drop_negative(slots, pool.shape[0] * per_page)
    page, entry = (at // per_page)[:, None], (at % per_page)[:, None]
    columns = jnp.concatenate([entry * half + jnp.arange(half), per_page * half + entry * group + jnp.arange(group)], 1)
    return pool.at[page, columns].set(jnp.concatenate([payload, scale], 1), mode="drop")
