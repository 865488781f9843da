"""The global producer: compressed KV entries and their index keys (spec/model.md section 6; spec/decode.md, A1)."""

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import matmul
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Attention
from dsv41_jax.plan import RatioPlan, StepPlan
from pallas_kernels.global_producer.api import global_producer


def produce(
    u,  # dtype[T, H], the attention input
    params: Attention,
    global_pool,
    index_pool,
    pending,  # f32[slots, ring, 2, D] or None (ratio 1)
    plan: StepPlan,
    ratio: RatioPlan,
    c: ModelConfig,
    options: DecodeOptions,
):
    """Write the entries that the rows complete: compressed KV, index key, pending rows.

    Returns (global_pool, index_pool, pending); rows that complete nothing, or whose page is unallocated, write nothing.
    The pools' dtype carries the precision."""
    compressor, keys = params.compressor, params.index_keys
    with jax.named_scope("global_producer"):
        pairs = compressor.wgate is not None
        value = matmul(u, compressor.wkv[...], jnp.float32 if pairs else None)
        gate = matmul(u, compressor.wgate[...], jnp.float32) if pairs else None
        return global_producer(
            global_pool, index_pool, pending, value, gate, compressor.norm[...], keys.wk[...], keys.k_norm[...],
            ratio.entry_cos, ratio.entry_sin, ratio.global_store, ratio.index_store,
            plan.slots, plan.start, plan.row_slots, plan.positions.reshape(-1), plan.pending_store,
            eps=c.rms_norm_eps, dtype=u.dtype, impl=options.impl("global_producer"),
        )  # fmt: skip
