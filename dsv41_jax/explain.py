"""Which implementation every operator gets at a workload's shapes, and why not a faster one. Nothing is run."""

import jax
import jax.numpy as jnp

from dsv41_jax.cache import CacheGeometry
from dsv41_jax.config import ModelConfig
from dsv41_jax.options import DecodeOptions
from pallas_kernels import codecs
from pallas_kernels.block_scaled_matmul import api as block_scaled_matmul
from pallas_kernels.candidate_blocks import api as candidate_blocks
from pallas_kernels.expert_plan import api as expert_plan
from pallas_kernels.experts import api as experts
from pallas_kernels.fp8_round_trip import api as fp8_round_trip
from pallas_kernels.global_producer import api as global_producer
from pallas_kernels.hyper_coefficients import api as hyper_coefficients
from pallas_kernels.hyper_enter import api as hyper_enter
from pallas_kernels.hyper_leave import api as hyper_leave
from pallas_kernels.index_query import api as index_query
from pallas_kernels.index_score import api as index_score
from pallas_kernels.markov_argmax import api as markov_argmax
from pallas_kernels.qkv_producer import api as qkv_producer
from pallas_kernels.router import api as router
from pallas_kernels.select_tokens import SlotMap
from pallas_kernels.select_tokens import api as select_tokens
from pallas_kernels.sparse_attention import api as sparse_attention
from pallas_kernels.sparse_plan import api as sparse_plan
from pallas_kernels.swiglu import api as swiglu
from pallas_kernels.window_store import api as window_store


def _bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _u8(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def explain_operators(
    c: ModelConfig,
    options: DecodeOptions,
    *,
    batch: int,
    context: int,
    ranks: int = 1,
    arch: str | None = None,
) -> dict[str, dict[str, str]]:
    """{operator: {"chosen": implementation, implementation passed over: reason}} of one verify step in precision `released`.

    batch: requests per rank. context: tokens per request. arch: "sm_90", "sm_103", ..., "cpu"; None asks the default
    device. An operator that `options` pins is reported as such.
    """
    shapes = _Shapes(c, batch, context, ranks)
    auto = {
        "block_scaled_matmul": lambda: _least(
            block_scaled_matmul.explain(*a, groups=groups, quantised=groups == 1, arch=arch)
            for *a, groups in shapes.products()),
        "router": lambda: router.explain(
            _bf16(shapes.rows, c.hidden_size), _bf16(c.n_routed_experts, c.hidden_size), _f32(c.n_routed_experts),
            k=c.num_experts_per_tok, scale=c.routed_scaling_factor, arch=arch),
        "expert_plan": lambda: expert_plan.explain(  # no implementation minds the rows of a tile
            *shapes.experts()[1:3], 0, local=c.n_routed_experts // ranks, tile_rows=32, arch=arch),
        "experts": lambda: experts.explain(*shapes.experts(), swiglu_limit=c.swiglu_limit, arch=arch),
        "fp8_round_trip": lambda: fp8_round_trip.explain(_bf16(shapes.rows, c.hidden_size), arch=arch),
        "global_producer": lambda: _least(
            global_producer.explain(*a, eps=c.rms_norm_eps, arch=arch) for a in shapes.producers()),
        "hyper_coefficients": lambda: hyper_coefficients.explain(
            _f32(shapes.rows, 3 * c.hc_mult * (2 + c.hc_mult)), _f32(shapes.rows), _f32(3),
            _f32(c.hc_mult * (2 + c.hc_mult)), streams=c.hc_mult, iterations=c.hc_sinkhorn_iters, eps=c.hc_eps, arch=arch),
        "hyper_enter": lambda: hyper_enter.explain(
            _bf16(shapes.rows, c.hc_mult, c.hidden_size), _f32(shapes.rows, c.hc_mult), _bf16(c.hidden_size),
            eps=c.rms_norm_eps, arch=arch),
        "hyper_leave": lambda: hyper_leave.explain(*shapes.site(), arch=arch),
        "index_query": lambda: index_query.explain(
            *shapes.query(), heads=c.index_n_heads, dim=c.index_head_dim, arch=arch),
        "markov_argmax": lambda: markov_argmax.explain(*shapes.markov(), arch=arch),
        "qkv_producer": lambda: qkv_producer.explain(
            *shapes.front(), eps=c.rms_norm_eps, round_trip=True, arch=arch),
        "index_score": lambda: index_score.explain(*shapes.index(), _i32(shapes.rows), arch=arch),
        "index_score_blocks": lambda: index_score.explain_blocks(
            *shapes.index(), _i32(shapes.rows, c.candidate_topk_blocks), _i32(shapes.rows),
            block_size=c.candidate_block_size, arch=arch),
        "candidate_blocks": lambda: candidate_blocks.explain(
            _bf16(shapes.rows, shapes.capacity), _i32(shapes.rows), k_blocks=c.candidate_topk_blocks,
            block_size=c.candidate_block_size, arch=arch),
        "select_tokens": lambda: select_tokens.explain(
            _bf16(shapes.rows, shapes.capacity), _i32(shapes.rows), k=c.index_topk, slot_map=shapes.slot_map(), arch=arch),
        "sparse_attention": lambda: sparse_attention.explain(
            *shapes.attention(), window=c.sliding_window, scale=c.head_dim**-0.5, window_start=None, window_end=None,
            arch=arch),
        "sparse_plan": lambda: sparse_plan.explain(
            _i32(shapes.rows, c.candidate_topk_blocks), _i32(shapes.rows), key_count=shapes.capacity,
            k=c.candidate_topk_blocks, count=_i32(shapes.rows), block_size=c.candidate_block_size, arch=arch),
        "swiglu": lambda: swiglu.explain(
            _bf16(shapes.rows, 2 * c.moe_intermediate_size), limit=c.swiglu_limit, round_trip=True, arch=arch),
        "window_store": lambda: window_store.explain(
            *shapes.window(), first=c.q_lora_rank, eps=c.rms_norm_eps, arch=arch),
    }  # fmt: skip
    return {op: _explain(op, call, options) for op, call in auto.items()}


def _explain(op: str, call, options: DecodeOptions) -> dict[str, str]:
    if options.impl(op) != "auto":
        return {"chosen": options.impl(op), "auto": "the options ask for this implementation by name"}
    return call()


def _least(told) -> dict[str, str]:
    """Of an operator's uses the one that had most implementations passed over."""
    return max(told, key=len)


class _Shapes:
    """Abstract arguments of the operators at one workload."""

    def __init__(self, c: ModelConfig, batch: int, context: int, ranks: int):
        self.c, self.batch, self.ranks = c, batch, ranks
        self.span = c.dspark_block_size + 1 if c.has_draft else 1
        self.rows = batch * self.span
        self.geometry = CacheGeometry(slots=batch, pages=1 + batch * -(-context // 128), span=self.span)
        self.columns = self.geometry.columns(context)
        self.capacity = self.columns * self.geometry.page_tokens

    def site(self):
        """The arguments of a site's exit."""
        t, m, h = self.rows, self.c.hc_mult, self.c.hidden_size
        return _bf16(t, m, h), _bf16(t, h), _f32(t, m), _f32(t, m, m), _f32(t, m), _f32(m * (2 + m), m * h)

    def products(self):
        """x, w, s and groups of every FP8 product."""
        c, f, h = self.c, self.c.moe_intermediate_size, self.c.hidden_size
        heads, z = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
        shapes = [(c.q_lora_rank + c.head_dim, h, 1), (heads, c.q_lora_rank, 1), (z, heads // c.o_groups, c.o_groups),
                  (h, z, 1), (2 * f, h, 1), (h, f, 1)]  # fmt: skip
        if c.engram_layer_ids:
            shapes.append(((c.hc_mult + 1) * h, c.ngram_heads * c.engram_head_dim, 1))
        if c.has_draft:
            shapes.append((h, len(c.dspark_target_layer_ids) * h, 1))
        for out, inner, groups in shapes:
            weight = jax.ShapeDtypeStruct((out, inner), jnp.float8_e4m3fn)
            yield _bf16(self.rows, groups * inner), weight, _u8(codecs.cdiv(out, 32), codecs.cdiv(inner, 32)), groups

    def experts(self):
        c, rows = self.c, self.rows * self.ranks  # every rank sees the rows of all
        e, h, f = c.n_routed_experts // self.ranks, c.hidden_size, c.moe_intermediate_size
        return (_bf16(rows, h), _i32(rows, c.num_experts_per_tok), _f32(rows, c.num_experts_per_tok),
                _u8(e, 2 * f, h // 2), _u8(e, 2 * f, h // 32), _u8(e, h, f // 2), _u8(e, h, f // 32))  # fmt: skip

    def index(self):
        c, j = self.c, self.c.index_head_dim
        q = (_u8(self.rows, c.index_n_heads, j // 2), _u8(self.rows, c.index_n_heads, j // 32))
        pool = _u8(self.geometry.pages, self.geometry.page_tokens * codecs.index_record_bytes(j))
        return q, _bf16(self.rows, c.index_n_heads), pool, _i32(self.batch, self.columns)

    def slot_map(self):
        return SlotMap(_i32(self.batch, self.columns), _i32(self.rows), self.geometry.page_tokens)

    def query(self):
        c, t = self.c, self.rows
        columns = c.index_n_heads * c.index_head_dim + c.num_attention_heads * c.head_dim
        angles = _f32(t, c.qk_rope_head_dim // 2)
        return _bf16(t, columns), _f32(t, c.index_n_heads), angles, angles

    def attention(self):
        c, g, d = self.c, self.geometry, self.c.head_dim
        angles = _f32(self.batch, self.span, c.qk_rope_head_dim // 2)
        return (_bf16(self.batch, self.span, c.num_attention_heads, d),
                _u8(self.batch, g.ring(c), codecs.window_record_bytes(d)), _i32(self.batch), _i32(self.batch, self.span),
                _u8(g.pages, g.page_tokens, codecs.global_record_bytes(d)), _i32(self.batch, self.span, c.index_topk),
                _f32(c.num_attention_heads), angles, angles)  # fmt: skip

    def window(self):
        c, d = self.c, self.c.head_dim
        angles, row = _f32(self.rows, c.qk_rope_head_dim // 2), _i32(self.rows)
        ring = _u8(self.batch, self.geometry.ring(c), codecs.window_record_bytes(d))
        return ring, _bf16(self.rows, c.q_lora_rank + d), _bf16(d), angles, angles, row, row

    def front(self):
        """The window store's arguments with the norm of the query latents."""
        pool, rows, *rest = self.window()
        return pool, rows, _bf16(self.c.q_lora_rank), *rest

    def markov(self):
        """The arguments of a draft column's greedy choice."""
        c, columns = self.c, max(self.c.dspark_block_size, 1)
        return (_f32(columns * self.batch, c.vocab_size), _bf16(self.batch, c.dspark_markov_rank),
                _bf16(c.vocab_size, c.dspark_markov_rank))  # fmt: skip

    def producers(self):
        """The arguments of the producer, once for each ratio."""
        c, g, d, j, t = self.c, self.geometry, self.c.head_dim, self.c.index_head_dim, self.rows
        angles, row, request = _f32(t, c.qk_rope_head_dim // 2), _i32(t), _i32(self.batch)
        for ratio in sorted({s.ratio for s in c.layers if s.owns_kv}):
            entries = g.page_tokens // ratio
            pools = _u8(g.pages, entries, codecs.global_record_bytes(d)), _u8(g.pages, entries * codecs.index_record_bytes(j))
            pairs = _f32(self.batch, g.pending_ring(c), 2, d), _f32(t, d), _f32(t, d)
            yield (*pools, *(pairs if ratio == 2 else (None, _bf16(t, d), None)), _bf16(d), _bf16(j, d), _bf16(j), angles,
                   angles, row, row, request, request, row, row, jax.ShapeDtypeStruct((t,), jnp.bool_))  # fmt: skip
