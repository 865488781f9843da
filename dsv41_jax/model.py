"""The network, top-down: embedding, blocks, head (spec/model.md section 2)."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax import engram, engram_host, hyper
from dsv41_jax.attention import Carry, Pools, attention
from dsv41_jax.cache import CacheGeometry, State
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import engram_constants
from dsv41_jax.linear import Rows, matmul, wants_round_trip
from dsv41_jax.moe import LocalExchange, moe
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Block, Fp8Linear, HyperSite, Transformer
from dsv41_jax.plan import Chunk, plan_step
from dsv41_jax.precision import Precision
from pallas_kernels import codecs
from pallas_kernels.row_tiles import in_row_tiles


@dataclasses.dataclass(frozen=True)
class Network:
    """The static half of a step: everything that is fixed when it is compiled.

    exchange: how routed experts and engram rows are reached (moe.LocalExchange, or one of `sharding`).
    """

    config: ModelConfig
    geometry: CacheGeometry
    precision: Precision
    options: DecodeOptions = dataclasses.field(default_factory=DecodeOptions)
    exchange: object = dataclasses.field(default_factory=LocalExchange)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """Outputs of `forward`. hidden dtype[T, H]: collapsed and normalised, ready for the head. target dtype[T, F*H]: inputs
    of the target layers, mean over the streams, for the drafter (None without one). taps: named arrays when asked for."""

    hidden: jax.Array
    target: jax.Array | None
    taps: dict


def sublayer(
    at: hyper.Residual,
    site: HyperSite,
    norm,  # bf16[H]
    run,  # dtype[T, H] or Rows -> dtype[T, H]
    net: Network,
    following: HyperSite | None,  # the site that reads the streams next, unless something else changes them before
    first: Fp8Linear,  # what multiplies the rows first
):
    """One mHC sublayer: collapse with the PREVIOUS `pre`, norm, run, expand with this site's post and comb.

    Returns (residual with this site's pre, the sublayer output y)."""
    with jax.named_scope("hyper_mixes"):
        t, _, h = at.streams.shape
        rows = jax.ShapeDtypeStruct((t, h), at.streams.dtype)
        round_trip = wants_round_trip(rows, first, net.precision, net.options)
        u, rounded, pre, post, comb = hyper.enter(at, norm, site, net.config, net.options, round_trip)
    y = run(u if rounded is None else Rows(u, rounded))
    with jax.named_scope("hyper_expand"):
        return hyper.leave(at, y, pre, post, comb, following, net.options), y


def block(
    at: hyper.Residual,
    params: Block,
    attend,  # dtype[T, H] or Rows -> dtype[T, H]
    experts_per_token: int,
    net: Network,
    following: HyperSite | None,  # as in `sublayer`, after the block
    taps: dict | None = None,
    name: str = "",
) -> hyper.Residual:
    """Attention sublayer, then MoE sublayer."""
    c = net.config
    at, y = sublayer(at, params.hc_attn, params.attn_norm[...], attend, net, params.hc_ffn, params.attn.front)
    if taps is not None:
        taps[f"attn_out_{name}"] = y

    def run_moe(u):
        return moe(u, params.ffn, experts_per_token, net.exchange, c, net.precision, net.options, taps, name)

    at, y = sublayer(at, params.hc_ffn, params.ffn_norm[...], run_moe, net, following, params.ffn.shared_w13)
    if taps is not None:
        taps[f"ffn_out_{name}"] = y
    return at


def initial_streams(
    params: Transformer,
    tokens,  # i32[T]
    c: ModelConfig,
    p: Precision,
) -> hyper.Residual:
    """The embedding in every stream; the first sublayer reads stream 0."""
    x = params.embed[...][jnp.clip(tokens, 0, c.vocab_size - 1)].astype(p.dtype)
    pre = jnp.zeros((tokens.shape[0], c.hc_mult), jnp.float32).at[:, 0].set(1.0)
    return hyper.Residual(jnp.repeat(x[:, None], c.hc_mult, 1), pre)


def engram_rows(params: Transformer, chunk: Chunk, history, c: ModelConfig):
    """[i32[T, rows] per engram layer]: table rows of every position; they depend on token ids alone, so all of them are
    known before layer 0."""
    pad = params.token_map[...][c.engram_pad_token_id]
    ids = engram.ngram_ids(chunk.tokens, history, params.token_map[...], pad, c.engram_max_ngram_size)
    return [engram.hash_rows(ids, k) for k in engram_constants(c)]


def request_history(
    state: State,
    slots,  # i32[B]
    start,  # i32[B]
):
    """i32[B, ngram-1] raw ids before the chunk; all absent for padding requests and at the start of a text, whatever an
    earlier request left in the slot."""
    known = (slots >= 0) & (start > 0)
    return jnp.where(known[:, None], state.history[jnp.maximum(slots, 0)], engram.ABSENT)


def forward(
    params: Transformer,
    state: State,
    chunk: Chunk,
    net: Network,
    dump: bool = False,
) -> tuple[State, Features]:
    """Run one chunk of S rows per request through the network and its caches.

    The chunk's rows are S consecutive single steps in one: row s sees what rows <= s of its request wrote. Registers
    (length, anchor, history) are not touched: committing is the step's decision. dump: fill Features.taps with per-layer
    arrays under the golden data's names.
    """
    c, p = net.config, net.precision
    plan = plan_step(c, net.geometry, state, chunk)
    taps: dict | None = {} if dump else None
    pools = Pools(list(state.window), dict(state.global_kv), dict(state.index), dict(state.pending))
    carry = Carry()
    with jax.named_scope("embed"):
        rows = engram_rows(params, chunk, request_history(state, plan.slots, chunk.start), c)
        records = None if params.engram_host is None else engram_host.fetch(params.engram_host[...], rows, c)
        at = initial_streams(params, chunk.tokens.reshape(-1), c, p)
    target = []
    sites = [w.hc_attn if s.engram is None else None for s, w in zip(c.layers, params.layers, strict=True)]
    for layer, layer_params, following in zip(c.layers, params.layers, [*sites[1:], None], strict=True):
        with jax.named_scope(f"layer{layer.index}_{layer.kind}"):
            if layer.engram is not None:
                found = None if records is None else records[layer.engram]
                at = hyper.Residual(_engram(at.streams, layer_params.engram, rows[layer.engram], found, net), at.pre)
            if layer.feature is not None:
                mean = lambda s: codecs.rounded(jnp.mean(s.astype(jnp.float32), 1), p.dtype)
                target.append(in_row_tiles(mean, at.streams))
            if dump:
                taps[f"streams_in_{layer.index}"] = at.streams
            at = block(
                at, layer_params,
                lambda u, a=layer_params.attn, s=layer: attention(u, a, s, pools, carry, plan, c, p, net.options),
                c.num_experts_per_tok, net, following, taps, str(layer.index),
            )  # fmt: skip
            if dump:
                taps[f"streams_out_{layer.index}"], taps[f"pre_mix_out_{layer.index}"] = at.streams, at.pre
                if layer.scores:
                    taps[f"topk_{layer.index}"] = carry.selection.indices
                if layer.publishes_candidates and carry.candidates is not None:
                    taps["candidate_blocks"] = carry.candidates.sparse_indices
                    taps["candidate_end"] = carry.candidates.end
    with jax.named_scope("final_norm"):
        hidden = hyper.enter_last(at, params.norm[...], c, net.options)
    if dump:
        taps["engram_hash_ids"] = jnp.stack(rows, 1)
    state = dataclasses.replace(state, window=tuple(pools.window), global_kv=pools.global_kv, index=pools.index,
                                pending=pools.pending)  # fmt: skip
    return state, Features(hidden, jnp.concatenate(target, -1) if target else None, taps or {})


def _engram(streams, params, rows, records, net: Network):
    """records: what the host has fetched for `rows`, None where the device has the table."""
    with jax.named_scope("engram"):
        if records is None:
            e = net.exchange.lookup(params.table[...], params.table_scale[...], rows, streams.dtype)
        else:
            e = engram_host.values(records, streams.dtype)
        return engram.gate(streams, e, params, net.config, net.precision, net.options)


def head(
    params: Transformer,
    hidden,  # dtype[T, H]
):
    """f32[T, V] logits: bf16 operands, fp32 accumulation and result; no fp32 copy of the weights in `released`."""
    with jax.named_scope("lm_head"):
        return matmul(hidden, params.head[...], jnp.float32)
