"""Verification of drafted tokens: greedy, exact rejection sampling, forced (spec/decode.md B1, spec/serving.md)."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax import sampling
from dsv41_jax.sampling import ACCEPT, DRAFT, TARGET, SamplingBatch
from pallas_kernels.ordering import argmax
from pallas_kernels.row_tiles import in_row_tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """tokens i32[B, G+1]: accepted drafts, then the next token, then 0; accepted i32[B]: drafts accepted (0..G); count is
    accepted + 1. finite bool[B]: every logit that was looked at is a number."""

    tokens: jax.Array
    accepted: jax.Array
    finite: jax.Array


def choose_draft(
    logits,  # f32[B, V]
    positions,  # i32[B] position of the drafted token
    batch: SamplingBatch,
):
    """i32[B]: the drafted token: argmax for greedy requests, else a draw at the request's temperature (no other filter)."""
    greedy, _ = argmax(logits)
    if not batch.draws:
        return greedy
    scaled = logits / jnp.where(batch.stochastic, batch.temperature, 1.0)[:, None]
    return jnp.where(batch.stochastic, sampling.categorical(scaled, batch.seed, positions, DRAFT), greedy)


def draft_choice(
    first,  # i32[B] position of the first drafted token
    batch: SamplingBatch,
):
    """`choose` of `dspark.propose`: None, the largest logit and no logits kept, for a batch in which no row draws."""
    return (lambda logits, i: choose_draft(logits, first + i, batch)) if batch.draws else None


def verify(
    target_logits,  # f32[B, G+1, V]
    draft_tokens,  # i32[B, G]
    draft_logits,  # f32[B, G, V] of the drafted chain, as choose_draft saw them; None when G = 0
    first_position,  # i32[B] position that row 0 predicts
    batch: SamplingBatch,
) -> Verdict:
    """Accept the longest prefix of drafts, then one token of the target's own.

    Greedy rows accept d_i == argmax t_i; stochastic rows accept with probability min(1, p/q) and draw the next token from
    the residual max(p - q, 0), so that the output is distributed as the target. Forced rows accept all.
    """
    b, n, _ = target_logits.shape
    gamma = n - 1
    positions = first_position[:, None] + jnp.arange(n, dtype=jnp.int32)
    logits = sampling.adjust_logits(target_logits, positions, batch)
    greedy, seen = argmax(logits, jnp.isfinite(target_logits))  # one pass over the logits
    agreed = draft_tokens == greedy[:, :gamma]
    if batch.draws:
        accepted, following = _rejection(logits, draft_tokens, draft_logits, positions, agreed, greedy, batch)
    else:
        accepted = _accepted(agreed, batch)
        following = jnp.take_along_axis(greedy, accepted[:, None], 1)[:, 0]
    column = jnp.arange(n)
    drafts = jnp.concatenate([draft_tokens, jnp.zeros((b, 1), jnp.int32)], 1)
    tokens = jnp.where(column < accepted[:, None], drafts, jnp.where(column == accepted[:, None], following[:, None], 0))
    looked_at = column <= accepted[:, None]
    finite = jnp.all(seen | ~looked_at, -1)
    return Verdict(tokens, accepted, finite)


def _accepted(ok, batch: SamplingBatch):
    """i32[B]: length of the accepted prefix; forced rows accept everything."""
    run = jnp.cumprod(ok.astype(jnp.int32), -1).sum(-1).astype(jnp.int32)
    return jnp.where(batch.forced, ok.shape[1], run)


def _rejection(logits, draft_tokens, draft_logits, positions, agreed, greedy, batch: SamplingBatch):
    gamma = draft_tokens.shape[1]
    p = sampling.target_log_probs(logits, batch)
    if gamma:
        temperature = jnp.where(batch.stochastic, batch.temperature, 1.0)[:, None, None]
        flat = (draft_logits / temperature).reshape(-1, draft_logits.shape[-1])
        q = in_row_tiles(lambda x: jax.nn.softmax(x, -1), flat).reshape(draft_logits.shape)
        at = draft_tokens[..., None]
        p_d = jnp.exp(jnp.take_along_axis(p[:, :gamma], at, -1))[..., 0]
        q_d = jnp.take_along_axis(q, at, -1)[..., 0]
        u = sampling.uniforms(batch.seed, positions[:, :gamma], ACCEPT)
        ok = jnp.where(batch.stochastic[:, None], p_d > u * q_d, agreed)
    else:
        q, ok = None, agreed
    accepted = _accepted(ok, batch)
    log_p = jnp.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
    if gamma:
        q_at = jnp.take_along_axis(q, jnp.minimum(accepted, gamma - 1)[:, None, None], 1)[:, 0]
        residual = jnp.maximum(jnp.exp(log_p) - q_at, 0)
        # no residual mass means p == q up to rounding: the target itself is then the right distribution
        rejected = (accepted < gamma) & (residual.sum(-1) > 0)
        log_p = jnp.where(rejected[:, None], jnp.log(residual), log_p)
    position = positions[:, 0] + accepted
    drawn = sampling.categorical(log_p, batch.seed, position, TARGET)
    own = jnp.take_along_axis(greedy, accepted[:, None], 1)[:, 0]
    return accepted, jnp.where(batch.stochastic, drawn, own)
