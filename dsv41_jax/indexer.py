"""Sparse token selection: index queries, scores, candidates, top-k, physical slots (spec/model.md section 7)."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax import rope
from dsv41_jax.cache import entry_slots
from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import matmul
from dsv41_jax.options import DecodeOptions
from dsv41_jax.plan import RatioPlan, StepPlan
from dsv41_jax.precision import Precision
from dsv41_jax.schedule import LayerSpec
from pallas_kernels import codecs
from pallas_kernels.candidate_blocks.api import candidate_blocks
from pallas_kernels.index_score.api import index_score, index_score_blocks
from pallas_kernels.select_tokens.api import select_tokens
from pallas_kernels.sparse_plan.api import SparsePlan, sparse_plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What one index source selected: indices i32[T, K] ascending entry positions, -1 = none; slots i32[B, S, K]: the
    same as page * entries + entry of the compressed pool."""

    indices: jax.Array
    slots: jax.Array


def index_queries(
    projected,  # dtype[T, I*J], the index columns of QB
    ratio: RatioPlan,
    c: ModelConfig,
    p: Precision,
):
    """Rotated at the row's own position: dtype[T, I, J], or where the cache is quantised its MXFP4 form (payload
    u8[T, I, J/2], scales u8[T, I, J/32]), which a scorer of FP4 products reads as it is and any other decodes."""
    q = projected.reshape(projected.shape[0], c.index_n_heads, c.index_head_dim)
    q = rope.rotate(q, ratio.cos[:, None], ratio.sin[:, None])
    return codecs.quantize_mxfp4(q) if p.quantise_cache else q


def head_weights(
    u,  # dtype[T, H]
    weight,  # bf16[I, H]
    c: ModelConfig,
):
    """dtype[T, I], signed, scaled by J^-0.5 * I^-0.5 (2^-6 at release, so exact)."""
    w = matmul(u, weight)
    return codecs.rounded(w.astype(jnp.float32) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5), u.dtype)


def select(
    layer: LayerSpec,
    q,  # of index_queries
    weights,  # dtype[T, I]
    index_pool,
    plan: StepPlan,
    ratio: RatioPlan,
    global_pool,
    candidates: SparsePlan | None,
    c: ModelConfig,
    options: DecodeOptions,
) -> tuple[Selection, SparsePlan | None]:
    """Score, publish candidate blocks (as the plan that all their consumers share) where the layer does, select.

    A restricted layer scans only the candidate blocks. When the page table cannot hold more entries than the candidate
    blocks cover, the restriction is the identity and the dense score is used: a choice by static capacity.
    """
    b, s = plan.shape
    visible = ratio.visible
    if layer.restricted and candidates is not None:
        logits = index_score_blocks(q, weights, index_pool, ratio.index_table, candidates.sparse_indices, candidates.end,
                                    block_size=c.candidate_block_size, impl=options.impl("index_score_blocks"))  # fmt: skip
        indices = select_tokens(logits, candidates.end, k=c.index_topk, block_ids=candidates.sparse_indices, causal=visible,
                                block_size=c.candidate_block_size, impl=options.impl("select_tokens"))  # fmt: skip
    else:
        # columns beyond a row's visible entries stay unwritten: both readers are bounded by `visible`
        logits = index_score(q, weights, index_pool, ratio.index_table, visible, fill=False,
                             impl=options.impl("index_score"))  # fmt: skip
        indices = select_tokens(logits, visible, k=c.index_topk, impl=options.impl("select_tokens"))
        if layer.publishes_candidates and logits.shape[1] > c.candidate_topk_blocks * c.candidate_block_size:
            ids, count = candidate_blocks(logits, visible, k_blocks=c.candidate_topk_blocks,
                                          block_size=c.candidate_block_size, impl=options.impl("candidate_blocks"))  # fmt: skip
            candidates = sparse_plan(ids, visible, key_count=logits.shape[1], k=c.candidate_topk_blocks, count=count,
                                     block_size=c.candidate_block_size, impl=options.impl("sparse_plan"))  # fmt: skip
    slots = entry_slots(ratio.table, indices.reshape(b, -1), global_pool.shape[1], global_pool.shape[0])
    return Selection(indices, slots.reshape(b, s, -1)), candidates
