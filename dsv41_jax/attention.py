"""CSA2 attention of all five layer classes, S rows per request (spec/model.md section 5)."""

import dataclasses

import jax

from dsv41_jax import indexer
from dsv41_jax.compressor import produce
from dsv41_jax.config import ModelConfig
from dsv41_jax.indexer import Selection
from dsv41_jax.linear import fp8_linear, fp8_matmul, rms_norm, values, wants_round_trip
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Attention
from dsv41_jax.plan import StepPlan
from dsv41_jax.precision import Precision
from dsv41_jax.schedule import LayerSpec
from pallas_kernels import codecs
from pallas_kernels.qkv_producer.api import merges, qkv_producer
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_plan.api import SparsePlan
from pallas_kernels.window_store.api import window_store

_ALIGNED = 256  # bytes; what Mosaic GPU asks of every array that a kernel reads


@dataclasses.dataclass
class Pools:
    """The pools of one step while its layers run: replaced, never mutated in place; keyed like cache.State."""

    window: list
    global_kv: dict
    index: dict
    pending: dict


@dataclasses.dataclass
class Carry:
    """What layers hand down within one step: the newest selection and the published candidates."""

    selection: Selection | None = None
    candidates: SparsePlan | None = None


def project_window(
    x,  # dtype[T, H]
    params: Attention,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, D]: the window KV columns of the front product alone (draft commits need no queries)."""
    first = c.q_lora_rank // codecs.GROUP
    weight, scale = params.front.weight[...][c.q_lora_rank :], params.front.scale[...][first:]
    if first * scale.shape[1] % _ALIGNED:
        # XLA hands a kernel the place of a slice, and Mosaic's refuse one that is not aligned: these scales are copied
        scale = jax.lax.optimization_barrier(scale)
    return fp8_matmul(x, weight, scale, p, options)


def store_window(
    pool,
    front,  # dtype[T, Q + D] of the front product, or dtype[T, D] of project_window
    params: Attention,
    cos,
    sin,
    slots,  # i32[T], -1 = skip
    positions,  # i32[T]
    c: ModelConfig,
    options: DecodeOptions,
):
    """The pool with the normalised, rotated window KV of every row at its position's ring row."""
    return window_store(pool, front, params.kv_norm[...], cos, sin, slots, positions, first=front.shape[1] - c.head_dim,
                        eps=c.rms_norm_eps, impl=options.impl("window_store"))  # fmt: skip


def project_front(
    u,  # dtype[T, H] or Rows
    params: Attention,
    pool,
    cos,
    sin,
    slots,  # i32[T], -1 = skip
    positions,  # i32[T]
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """(qr dtype[T, Q] normalised query latents, whether these are what QB's product begins with, the pool of `store_window`):
    one product with one quantised input, then its two halves, in one launch where the options ask for that. The window KV
    is the product's last D columns: a slice of their own would cost a kernel that reads the whole a copy."""
    with jax.named_scope("front_projection"):
        front = fp8_linear(u, params.front, p, options)
    latents = jax.ShapeDtypeStruct((front.shape[0], c.q_lora_rank), front.dtype)
    arguments = pool, front, params.q_norm[...], params.kv_norm[...], cos, sin, slots, positions
    merged = dict(eps=c.rms_norm_eps, round_trip=wants_round_trip(latents, params.qb, p, options),
                  impl=options.impl("qkv_producer"))  # fmt: skip
    if merges(*arguments, **merged):
        with jax.named_scope("qkv_producer"):
            pool, qr = qkv_producer(*arguments, **merged)
        return qr, True, pool
    with jax.named_scope("front_projection"):
        qr = rms_norm(front[:, : c.q_lora_rank], params.q_norm[...], c.rms_norm_eps)
    with jax.named_scope("window_store"):
        return qr, False, store_window(pool, front, params, cos, sin, slots, positions, c, options)


def output_projection(
    o,  # dtype[T, N, D], inverse-rotated
    params: Attention,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, H]: grouped wo_a without activation quantisation, then the FP8 linear wo_b."""
    o = o.reshape(o.shape[0], -1)
    z = fp8_matmul(o, params.wo_a.weight[...], params.wo_a.scale[...], p, options, quantise=False, groups=c.o_groups)
    return fp8_linear(z, params.wo_b, p, options)


def attention(
    u,  # dtype[T, H] or Rows, the attn_norm output
    params: Attention,
    layer: LayerSpec,
    pools: Pools,
    carry: Carry,
    plan: StepPlan,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, H]. Writes the layer's window (and, for KV sources, its entries and keys) into `pools`, then reads: a row
    sees the rows of its own step through the cache. `carry` is updated by index sources and the candidate source."""
    b, s = plan.shape
    ratio = plan.ratios.get(layer.ratio)
    cos, sin = (ratio.cos, ratio.sin) if ratio else (plan.cos, plan.sin)

    qr, ready, pools.window[layer.index] = project_front(
        u, params, pools.window[layer.index], cos, sin, plan.row_slots, plan.positions.reshape(-1), c, p, options
    )
    u = values(u)
    if layer.owns_kv:
        i = layer.index
        pools.global_kv[i], pools.index[i], pending = produce(
            u, params, pools.global_kv[i], pools.index[i], pools.pending.get(i), plan, ratio, c, options
        )
        if pending is not None:
            pools.pending[i] = pending
    with jax.named_scope("qb"):
        qb = fp8_linear(qr, params.qb, p, options, ready=ready)
    if layer.scores:
        with jax.named_scope("indexer"):
            keys = pools.index[layer.kv_source]
            carry.selection, carry.candidates = indexer.select(
                layer,
                *indexer.index_queries(
                    layer, u, qb, params.weights_proj[...], keys, ratio, carry.candidates, c, p, options
                ),
                keys,
                plan,
                ratio,
                carry.candidates,
                c,
                options,
            )
    with jax.named_scope("sparse_attention"):
        o = sparse_attention(
            qb.reshape(b, s, -1),  # the main columns are read where they lie, behind the index columns if there are any
            pools.window[layer.index],
            plan.slots,
            plan.positions,
            pools.global_kv[layer.kv_source] if ratio else None,
            carry.selection.slots if ratio else None,
            params.sink[...],
            cos.reshape(b, s, -1),
            sin.reshape(b, s, -1),
            window=c.sliding_window,
            scale=c.head_dim**-0.5,
            rotate_query=True,
            first=c.index_n_heads * c.index_head_dim if layer.scores else 0,
            impl=options.impl("sparse_attention"),
        )
    with jax.named_scope("output_projection"):
        return output_projection(o.reshape(b * s, c.num_attention_heads, c.head_dim), params, c, p, options)
