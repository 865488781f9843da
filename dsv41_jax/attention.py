"""CSA2 attention of all five layer classes, S rows per request (spec/model.md section 5)."""

import dataclasses

import jax

from dsv41_jax import indexer, rope
from dsv41_jax.cache import store_window
from dsv41_jax.compressor import produce
from dsv41_jax.config import ModelConfig
from dsv41_jax.indexer import Selection
from dsv41_jax.linear import fp8_linear, fp8_matmul, quantise_input, rms_norm
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Attention
from dsv41_jax.plan import StepPlan
from dsv41_jax.precision import Precision
from dsv41_jax.schedule import LayerSpec
from pallas_kernels import codecs
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_plan.api import SparsePlan


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


def project_front(
    u,  # dtype[T, H]
    params: Attention,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """(qr dtype[T, Q], kv dtype[T, D]) both normalised, neither rotated: one product with one quantised input."""
    front = fp8_linear(u, params.front, p, options)
    qr = rms_norm(front[:, : c.q_lora_rank], params.q_norm[...], c.rms_norm_eps)
    return qr, rms_norm(front[:, c.q_lora_rank :], params.kv_norm[...], c.rms_norm_eps)


def window_kv(
    x,  # dtype[T, H]
    params: Attention,
    cos,
    sin,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, D]: normalised and rotated window KV alone (draft commits need no queries)."""
    rows = slice(c.q_lora_rank, None)
    weight, scale = params.front.weight[...][rows], params.front.scale[...][c.q_lora_rank // codecs.GROUP :]
    kv = fp8_matmul(quantise_input(x, p, options), weight, scale, options, quantised=p.quantise_activations)
    kv = rms_norm(kv, params.kv_norm[...], c.rms_norm_eps)
    return rope.rotate(kv, cos, sin)


def output_projection(
    o,  # dtype[T, N, D], inverse-rotated
    params: Attention,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, H]: grouped wo_a without activation quantisation, then the FP8 linear wo_b."""
    o = o.reshape(o.shape[0], -1)
    z = fp8_matmul(o, params.wo_a.weight[...], params.wo_a.scale[...], options, quantised=False, groups=c.o_groups)
    return fp8_linear(z, params.wo_b, p, options)


def attention(
    u,  # dtype[T, H], the attn_norm output
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

    with jax.named_scope("front_projection"):
        qr, kv = project_front(u, params, c, p, options)
    with jax.named_scope("window_store"):
        pools.window[layer.index] = store_window(
            pools.window[layer.index], rope.rotate(kv, cos, sin), plan.row_slots, plan.positions.reshape(-1)
        )
    if layer.owns_kv:
        i = layer.index
        pools.global_kv[i], pools.index[i], pending = produce(
            u, params, pools.global_kv[i], pools.index[i], pools.pending.get(i), plan, ratio, c, p
        )
        if pending is not None:
            pools.pending[i] = pending
    with jax.named_scope("qb"):
        qb = fp8_linear(qr, params.qb, p, options)
        index_columns = c.index_n_heads * c.index_head_dim if layer.scores else 0
        q = qb[:, index_columns:].reshape(b, s, c.num_attention_heads, c.head_dim)
    if layer.scores:
        with jax.named_scope("indexer"):
            carry.selection, carry.candidates = indexer.select(
                layer,
                indexer.index_queries(qb[:, :index_columns], ratio, c, p),
                indexer.head_weights(u, params.weights_proj[...], c),
                pools.index[layer.kv_source],
                plan,
                ratio,
                pools.global_kv[layer.kv_source],
                carry.candidates,
                c,
                options,
            )
    with jax.named_scope("sparse_attention"):
        o = sparse_attention(
            q,
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
            impl=options.impl("sparse_attention"),
        )
    with jax.named_scope("output_projection"):
        return output_projection(o.reshape(b * s, c.num_attention_heads, c.head_dim), params, c, p, options)
