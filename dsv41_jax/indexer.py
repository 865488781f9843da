"""Sparse token selection: index queries, scores, candidates, top-k, physical slots (spec/model.md section 7)."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import matmul
from dsv41_jax.options import DecodeOptions
from dsv41_jax.plan import RatioPlan, StepPlan
from dsv41_jax.precision import Precision
from dsv41_jax.schedule import LayerSpec
from pallas_kernels.candidate_blocks.api import candidate_blocks
from pallas_kernels.index_query.api import index_query
from pallas_kernels.index_score.api import index_score, index_score_blocks, reads_packed
from pallas_kernels.select_tokens.api import select_tokens
from pallas_kernels.sparse_plan.api import SparsePlan, sparse_plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What one index source selected: indices i32[T, K] ascending entry positions, -1 = none; slots i32[B, S, K]: the
    same as page * entries + entry of the compressed pool."""

    indices: jax.Array
    slots: jax.Array


def _scores_blocks(layer: LayerSpec, candidates: SparsePlan | None) -> bool:
    """Whether the layer scans candidate blocks only."""
    return layer.restricted and candidates is not None


def index_queries(
    layer: LayerSpec,
    u,  # dtype[T, H]
    qb,  # dtype[T, I*J + N*D], product of QB: its index columns are read where they lie
    weight,  # bf16[I, H], head weights
    index_pool,
    ratio: RatioPlan,
    candidates: SparsePlan | None,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """(q, weights dtype[T, I]) of `index_query`, rotated at the row's own position, in the form that the layer's scorer
    multiplies: where the cache is quantised MXFP4, packed or decoded."""
    blocks = candidates.sparse_indices.shape[1] if _scores_blocks(layer, candidates) else 0
    form = "exact"
    if p.quantise_cache:
        weights = jax.ShapeDtypeStruct((qb.shape[0], c.index_n_heads), qb.dtype)
        packed = reads_packed(weights, index_pool, ratio.index_table, dim=c.index_head_dim, blocks=blocks,
                              block_size=c.candidate_block_size,
                              impl=options.impl("index_score_blocks" if blocks else "index_score"))  # fmt: skip
        form = "packed" if packed else "values"
    return index_query(qb, matmul(u, weight, jnp.float32), ratio.cos, ratio.sin, heads=c.index_n_heads,
                       dim=c.index_head_dim, form=form, impl=options.impl("index_query"))  # fmt: skip


def select(
    layer: LayerSpec,
    q,  # of index_queries, as are
    weights,
    index_pool,
    plan: StepPlan,
    ratio: RatioPlan,
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
    if _scores_blocks(layer, candidates):
        logits = index_score_blocks(q, weights, index_pool, ratio.index_table, candidates.sparse_indices, candidates.end,
                                    block_size=c.candidate_block_size, impl=options.impl("index_score_blocks"))  # fmt: skip
        indices, slots = select_tokens(logits, candidates.end, k=c.index_topk, block_ids=candidates.sparse_indices,
                                       causal=visible, block_size=c.candidate_block_size, slot_map=ratio.slot_map,
                                       impl=options.impl("select_tokens"))  # fmt: skip
    else:
        # columns beyond a row's visible entries stay unwritten: both readers are bounded by `visible`
        logits = index_score(q, weights, index_pool, ratio.index_table, visible, fill=False,
                             impl=options.impl("index_score"))  # fmt: skip
        indices, slots = select_tokens(logits, visible, k=c.index_topk, slot_map=ratio.slot_map,
                                       impl=options.impl("select_tokens"))  # fmt: skip
        if layer.publishes_candidates and logits.shape[1] > c.candidate_topk_blocks * c.candidate_block_size:
            ids, count = candidate_blocks(logits, visible, k_blocks=c.candidate_topk_blocks,
                                          block_size=c.candidate_block_size, impl=options.impl("candidate_blocks"))  # fmt: skip
            candidates = sparse_plan(ids, visible, key_count=logits.shape[1], k=c.candidate_topk_blocks, count=count,
                                     block_size=c.candidate_block_size, impl=options.impl("sparse_plan"))  # fmt: skip
    return Selection(indices, slots.reshape(b, s, -1)), candidates
