"""What the window store is, in plain jnp (spec/model.md section 5, spec/decode.md section 1)."""

import jax.numpy as jnp

from .. import codecs
from ..row_ops import drop_negative, rms_norm, rotate


def window_store(pool, front, norm, cos, sin, slots, positions, *, first: int, eps: float):
    """See `api.window_store`."""
    return store_window(pool, rotate(rms_norm(front[:, first:], norm, eps), cos, sin), slots, positions)


def store_window(
    pool,  # u8[slots, ring, D + D/32] or f32[slots, ring, D]
    values,  # dtype[T, D]
    slots,  # i32[T], negative or beyond the pool = skip
    positions,  # i32[T]
):
    """The pool with one record written per row, at ring row position mod ring."""
    record = codecs.encode_window(values) if pool.dtype == jnp.uint8 else values.astype(jnp.float32)
    return pool.at[drop_negative(slots, pool.shape[0]), positions % pool.shape[1]].set(record, mode="drop")
