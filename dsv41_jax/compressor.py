"""The global producer: compressed KV entries and their index keys (spec/model.md section 6; spec/decode.md, A1)."""

import jax
import jax.numpy as jnp

from dsv41_jax import rope
from dsv41_jax.cache import store_global, store_index
from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import matmul, rms_norm
from dsv41_jax.params import Attention, Compressor
from dsv41_jax.plan import RatioPlan, StepPlan
from dsv41_jax.precision import Precision
from pallas_kernels import codecs
from pallas_kernels.row_tiles import in_row_tiles


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
    return in_row_tiles(_pooled, *rows).reshape(value.shape)


def _pooled(before_v, before_g, value, gate):
    top = jnp.maximum(before_g, gate)
    a, b = jnp.exp(before_g - top), jnp.exp(gate - top)
    return (a / (a + b)) * before_v + (b / (a + b)) * value


def _pending_row(pending, slots, start):
    """f32[B, 2, D]: the pending row just before the chunk; 0 for padding requests. At start 0 any row will do: position
    0 completes no group."""
    row = pending[jnp.maximum(slots, 0), (start - 1) % pending.shape[1]]
    return jnp.where((slots >= 0)[:, None, None], row, 0)


def _store_pending(pending, value, gate, previous, plan: StepPlan):
    """The ring with the chunk's rows, and the row before it written back as it was: so the update depends on
    the read, and XLA, which orders by data alone, need not copy the ring to keep the old rows for it."""
    slots, ring = pending.shape[:2]
    at = jnp.where(plan.pending_store, plan.row_slots, slots)
    # a chunk that may reach round the ring to that row does not write it back: one row never has two writers
    back = jnp.where((plan.slots >= 0) & (value.shape[1] < ring), plan.slots, slots)
    rows = jnp.stack([value, gate], 2).reshape(-1, 2, value.shape[-1])
    return pending.at[
        jnp.concatenate([at, back]), jnp.concatenate([plan.positions.reshape(-1), plan.start - 1]) % ring
    ].set(jnp.concatenate([rows, previous]), mode="drop")


def latents(
    u,  # dtype[T, H]
    params: Compressor,
    pending,  # f32[slots, ring, 2, D] or None (ratio 1)
    plan: StepPlan,
    c: ModelConfig,
):
    """(dtype[T, D] un-rotated latents of every row, new pending)."""
    if params.wgate is None:
        return rms_norm(matmul(u, params.wkv[...]), params.norm[...], c.rms_norm_eps), pending
    b, s = plan.shape
    value = matmul(u, params.wkv[...], jnp.float32).reshape(b, s, -1)
    gate = matmul(u, params.wgate[...], jnp.float32).reshape(b, s, -1)
    # read once: a second read, fused elsewhere, would not be ordered before the update
    previous = jax.lax.optimization_barrier(_pending_row(pending, plan.slots, plan.start))
    pooled = pool_pairs(value, gate, previous)
    pending = _store_pending(pending, value, gate, previous, plan)
    pooled = codecs.rounded(pooled.reshape(-1, pooled.shape[-1]), u.dtype)
    return rms_norm(pooled, params.norm[...], c.rms_norm_eps), pending


def produce(
    u,  # dtype[T, H], the attention input
    params: Attention,
    global_pool,
    index_pool,
    pending,
    plan: StepPlan,
    ratio: RatioPlan,
    c: ModelConfig,
    p: Precision,
):
    """Write the entries that the rows complete: compressed KV, index key, pending rows.

    Returns (global_pool, index_pool, pending); rows that complete nothing, or whose page is unallocated, write nothing.
    """
    del p  # the pools' dtype carries the precision
    with jax.named_scope("global_producer"):
        latent, pending = latents(u, params.compressor, pending, plan, c)
        entry = rope.rotate(latent, ratio.entry_cos, ratio.entry_sin)
        keys = rms_norm(matmul(latent, params.index_keys.wk[...]), params.index_keys.k_norm[...], c.rms_norm_eps)
        keys = rope.rotate(keys, ratio.entry_cos, ratio.entry_sin)
        return (
            store_global(global_pool, entry, ratio.global_store),
            store_index(index_pool, keys, ratio.index_store),
            pending,
        )
