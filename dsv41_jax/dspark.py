"""DSpark drafter: propose a block of tokens, commit target features to the draft window (spec/model.md section 11)."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax import hyper, rope
from dsv41_jax.attention import output_projection, project_front, project_window, store_window
from dsv41_jax.cache import State
from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import fp8_linear, matmul, rms_norm
from dsv41_jax.model import Network, block, head, initial_streams
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Transformer
from pallas_kernels.markov_argmax.api import markov_argmax
from pallas_kernels.row_tiles import in_row_tiles
from pallas_kernels.sparse_attention.api import sparse_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """tokens i32[B, G]; logits f32[B, G, V], Markov bias included, along the drafted chain, None where nobody asked for them;
    confidence f32[B, G] raw."""

    tokens: jax.Array
    logits: jax.Array | None
    confidence: jax.Array


def commit(
    params: Transformer,
    state: State,
    features,  # dtype[T, F*H] target features
    row_slots,  # i32[T], -1 = not committed
    positions,  # i32[T]
    net: Network,
) -> State:
    """Write the draft window rows of committed target positions, in every stage. Rejected and padding rows have slot -1."""
    c, p = net.config, net.precision
    with jax.named_scope("draft_commit"):
        main = rms_norm(fp8_linear(features, params.draft.main_proj, p, net.options), params.draft.main_norm[...],
                        c.rms_norm_eps)  # fmt: skip
        cos, sin = rope.tables(rope.frequencies(c, False), jnp.maximum(positions, 0))
        rings = []
        for ring, stage in zip(state.draft_window, params.draft.stages, strict=True):
            front = project_window(main, stage.attn, c, p, net.options)
            rings.append(store_window(ring, front, stage.attn, cos, sin, row_slots, positions, c, net.options))
        return dataclasses.replace(state, draft_window=tuple(rings))


def propose(
    params: Transformer,
    state: State,
    anchor,  # i32[B] newest token, not yet run through the target
    position,  # i32[B] its position P
    slots,  # i32[B], < 0 = padding request
    net: Network,
    choose=None,  # (logits f32[B, V], column int) -> i32[B]: picks the drafted token of a column; None = the largest logit
) -> tuple[State, Proposal]:
    """Draft the block's tokens: every row sees the same context P-W..P-1 and all rows of the block.

    The block's own KV goes through the draft window (as any key does) and is overwritten by the next commit."""
    c, p = net.config, net.precision
    b, n = anchor.shape[0], c.dspark_block_size
    with jax.named_scope("draft_propose"):
        tokens = jnp.full((b, n), c.dspark_noise_token_id, jnp.int32).at[:, 0].set(anchor)
        live = slots >= 0
        positions = jnp.where(live[:, None], position[:, None] + jnp.arange(n, dtype=jnp.int32), -1)
        row_slots = jnp.where(positions >= 0, slots[:, None], -1).reshape(-1)
        bounds = _context(state, position, slots, n, c)
        at = initial_streams(params, tokens.reshape(-1), c, p)
        cos, sin = rope.tables(rope.frequencies(c, False), jnp.maximum(positions, 0))
        rings = list(state.draft_window)
        following = [stage.hc_attn for stage in params.draft.stages[1:]] + [None]
        for i, stage in enumerate(params.draft.stages):
            with jax.named_scope(f"draft_stage{i}"):
                attend = _stage_attention(rings, i, stage.attn, row_slots, positions, slots, bounds, cos, sin, net)
                at = block(at, stage, attend, c.dspark_num_experts_per_tok, net, following[i])
        x = hyper.collapse(at.streams, at.pre)
        x = x.reshape(b, n, -1).swapaxes(0, 1)  # column by column: the logits of one are a slice that nobody copies
        base = head(params, rms_norm(x.reshape(n * b, -1), params.draft.norm[...], c.rms_norm_eps))
        proposal = _markov(params, x, base, anchor, choose, net.options)
        return dataclasses.replace(state, draft_window=tuple(rings)), proposal


def _context(state, position, slots, n: int, c: ModelConfig):
    """(start, end) i32[B, n] of the key range, the same for all rows of a block."""
    floor = jnp.where(slots >= 0, state.draft_from[jnp.maximum(slots, 0)], 0)
    start = jnp.maximum(jnp.maximum(position - c.sliding_window, floor), 0)
    return jnp.broadcast_to(start[:, None], (start.shape[0], n)), jnp.broadcast_to(position[:, None] + n, (start.shape[0], n))


def _stage_attention(rings, i, params, row_slots, positions, slots, bounds, cos, sin, net: Network):
    c, p = net.config, net.precision
    b, n = positions.shape
    flat_cos, flat_sin = cos.reshape(b * n, -1), sin.reshape(b * n, -1)

    def attend(u):
        qr, ready, rings[i] = project_front(
            u, params, rings[i], flat_cos, flat_sin, row_slots, positions.reshape(-1), c, p, net.options
        )
        q = fp8_linear(qr, params.qb, p, net.options, ready=ready).reshape(b, n, c.num_attention_heads, c.head_dim)
        o = sparse_attention(
            q, rings[i], slots, positions, None, None, params.sink[...], cos, sin,
            window=c.sliding_window + n, scale=c.head_dim**-0.5, window_start=bounds[0], window_end=bounds[1],
            rotate_query=True, impl=net.options.impl("sparse_attention"),
        )  # fmt: skip
        return output_projection(o.reshape(b * n, c.num_attention_heads, c.head_dim), params, c, p, net.options)

    return attend


def _markov(
    params: Transformer,
    x,  # dtype[G, B, H]
    base,  # f32[G * B, V]
    anchor,
    choose,
    options: DecodeOptions,
) -> Proposal:
    """The sequential Markov head: each column's logits depend on the token drafted before it."""
    columns, b, _ = x.shape
    draft = params.draft
    embed, markov, weight = draft.markov_embed[...], draft.markov_head[...], draft.confidence[...].astype(jnp.float32)
    previous, tokens, logits, confidence = anchor, [], [], []
    for i in range(columns):
        with jax.named_scope("markov"):
            e = embed[jnp.clip(previous, 0, embed.shape[0] - 1)].astype(x.dtype)
            joint = jnp.concatenate([x[i].astype(jnp.float32), e.astype(jnp.float32)], -1)
            confidence.append(in_row_tiles(lambda j: jnp.sum(j * weight[0], -1), joint))
            if choose is None:
                previous = markov_argmax(base, e, markov, first=i * b, impl=options.impl("markov_argmax"))
            else:
                logits.append(base[i * b : (i + 1) * b] + matmul(e, markov, jnp.float32))
                previous = choose(logits[-1], i)
            tokens.append(previous)
    return Proposal(jnp.stack(tokens, 1), jnp.stack(logits, 1) if logits else None, jnp.stack(confidence, 1))
