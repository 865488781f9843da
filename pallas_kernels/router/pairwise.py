"""Router selection by counting, for GPUs: no sort, two fusions after the projection.

An expert's place is the number of experts before it: those with a larger biased score, or an equal one and a lower id.
All pairs of a few hundred experts are cheap beside the launches that a sort of such short rows costs. Same ids and
weights as `reference.select`, ties included; scores are compared as integers of the same order, so that even a row of
NaN gets k distinct ids.
"""

import jax
import jax.numpy as jnp

from . import reference

MOST_EXPERTS = 1024  # T * E * E comparisons


def places(biased):
    """f32[T, E] -> i32[T, E]: 0 for the largest; the lower id first among equals."""
    bits = jax.lax.bitcast_convert_type(biased, jnp.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    e = jnp.arange(key.shape[-1], dtype=jnp.int32)
    mine, other = key[:, :, None], key[:, None, :]
    first = (other > mine) | ((other == mine) & (e[None, None, :] < e[None, :, None]))
    return jnp.sum(first, axis=-1, dtype=jnp.int32)


def router(x, gate, bias, *, k: int, scale: float, precision: str):
    """See `api.router`."""
    del precision
    s = reference.scores(x, gate)
    here = places(s + bias)[:, None, :] == jnp.arange(k, dtype=jnp.int32)[None, :, None]  # [T, k, E], one true in each
    ids = jnp.sum(jnp.where(here, jnp.arange(s.shape[-1], dtype=jnp.int32), 0), axis=-1, dtype=jnp.int32)
    w = jnp.sum(jnp.where(here, s[:, None, :], 0.0), axis=-1)
    w = w / (jnp.sum(w, axis=-1, keepdims=True) + jnp.float32(1e-20))
    return ids, w * jnp.float32(scale)


def refuses(x, gate, bias, *, k, scale, precision):
    """Why this is not the way for these arguments, or None."""
    return f"{gate.shape[0]} experts, at most {MOST_EXPERTS}" if gate.shape[0] > MOST_EXPERTS else None
