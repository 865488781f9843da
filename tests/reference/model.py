"""The backbone, one token at a time with explicit caches (spec/model.md sections 2-10).

Use:

    model = Model(Weights(read_safetensors(path)), Config.from_hf(json), token_map, "float32")
    state = model.new_state()
    for token in ids:
        out = model.step(state, token)      # out.logits f32[V], out.features f32[targets*H], out.trace {name: array}

Precisions: `released` rounds where the release stores bf16 and quantises linear inputs and caches; `float32_cache`
keeps the cache formats only; `float32` quantises nothing. Weights are the exact dequantised values in all three.
`released_bf16_blocks` is `released` but for the linears' accumulator, which is rounded to bf16 after every 32 channels:
the recorded golden data were made so, against the specification (section 4: fp32 over the blocks, one rounding).
"""

import copy
import dataclasses

import numpy as np

from . import codecs, ops
from .ops import F32, Config
from .weights import Weights

PRECISIONS = ("released", "released_bf16_blocks", "float32_cache", "float32")


@dataclasses.dataclass
class Precision:
    name: str

    def __post_init__(self):
        if self.name not in PRECISIONS:
            raise ValueError(f"precision: expected one of {PRECISIONS}, got {self.name!r}")

        self.released = self.name.startswith("released")

    def store(self, x):
        """What a value becomes when it is kept between operations."""
        return codecs.bf16(x) if self.released else np.asarray(x, F32)

    def linear(self, weight, x):
        """weight [out, in] of an FP8 or FP4 linear, x [in] -> [out]."""
        if not self.released:
            return weight @ x
        x = codecs.qdq_fp8(x)
        if self.name == "released":
            return codecs.bf16(weight @ x)
        total = np.zeros(len(weight), F32)
        for begin in range(0, len(x), 32):
            total = codecs.bf16(total + weight[:, begin : begin + 32] @ x[begin : begin + 32])
        return total

    def cached(self, codec, x):
        return x if self.name == "float32" else codec(x)


@dataclasses.dataclass
class LayerCache:
    """One layer's private state; lists grow by one entry, positions are explicit."""

    window: dict[int, np.ndarray]  # position -> [D], the last `sliding_window` positions
    compressed: list[np.ndarray]  # entry j -> [D], KV sources only
    index_keys: list[np.ndarray]  # entry j -> [J], KV sources only
    pending: tuple[np.ndarray, np.ndarray] | None = None  # (value [D], gate [D]) of an open ratio-2 group


@dataclasses.dataclass
class State:
    length: int
    tokens: list[int]  # raw ids so far; engram looks at the last few
    layers: list[LayerCache]

    def copy(self) -> "State":
        return copy.deepcopy(self)


@dataclasses.dataclass
class Output:
    logits: np.ndarray  # [V]
    features: np.ndarray  # [targets * H], the drafter's view of this position
    trace: dict[str, np.ndarray]  # per-layer arrays under the golden data's names, without batch and position axes


class Block:
    """The parts that backbone layers and draft stages share: linears, mHC sublayers, attention front and back, MoE."""

    def __init__(
        self, weights: Weights, config: Config, precision: Precision, prefix: str, ratio: int, experts_per_token
    ):
        self.w, self.c, self.p, self.prefix = weights, config, precision, prefix
        self.experts_per_token = experts_per_token
        self.frequencies = ops.rope_frequencies(config, ratio)

    def get(self, name):
        return self.w.matrix(f"{self.prefix}.{name}")

    def norm(self, x, name):
        return self.p.store(ops.rms_norm(x, self.get(f"{name}.weight"), self.c.rms_norm_eps))

    def linear(self, x, name):
        """FP8 or FP4 linear: quantised input, exact products. x [in] -> [out]."""
        return self.p.linear(self.get(name), x)

    def plain(self, x, name):
        """bf16 linear without input quantisation. x [in] -> [out]."""
        return self.p.store(self.get(f"{name}.weight") @ x)

    def rope(self, x, position, inverse=False):
        return self.p.store(ops.rotate(x, position, self.frequencies, inverse))

    def coefficients(self, streams, site):
        names = (f"hc_{site}_fn", f"hc_{site}_base", f"hc_{site}_scale")
        return ops.hyper_coefficients(streams, *map(self.get, names), self.c)

    def collapse(self, streams, pre):
        return self.p.store(pre @ streams)

    def expand(self, streams, y, post, comb):
        return self.p.store(post[:, None] * y + comb.T @ streams)

    def query(self, u, position):
        """u [H] -> q latent [q_lora], rotated heads [N, D]."""
        latent = self.norm(self.linear(u, "attn.wq_a"), "attn.q_norm")
        q = self.linear(latent, "attn.wq_b").reshape(self.c.num_attention_heads, self.c.head_dim)
        return latent, self.rope(q, position)

    def window_kv(self, u, position):
        """u [H] -> [D] as the window cache holds it."""
        kv = self.rope(self.norm(self.linear(u, "attn.wkv"), "attn.kv_norm"), position)
        return self.p.cached(codecs.qdq_fp8, kv)

    def attend(self, q, keys, position):
        """q [N, D], keys [n, D] -> sublayer output [H]: softmax with sinks, inverse RoPE, grouped output projection."""
        out = self.p.store(ops.attend(q, keys, self.get("attn.attn_sink"), self.p.store))
        out = self.rope(out, position, inverse=True).reshape(self.c.o_groups, -1)
        first = self.get("attn.wo_a").reshape(self.c.o_groups, self.c.o_lora_rank, -1)
        z = self.p.store(np.einsum("gri,gi->gr", first, out, dtype=F32))
        return self.linear(z.reshape(-1), "attn.wo_b")

    def _swiglu(self, x, name, weight):
        limit = F32(self.c.swiglu_limit)
        gate = np.minimum(self.linear(x, f"{name}.w1"), limit)
        up = np.clip(self.linear(x, f"{name}.w3"), -limit, limit)
        return self.linear(self.p.store(gate * ops.sigmoid(gate) * up * weight), f"{name}.w2")

    def moe(self, x, trace, tag):
        """x [H] -> [H]; the routed experts are summed in ascending id, then the shared one."""
        ids, weights = ops.route(
            x,
            self.get("ffn.gate.weight"),
            self.get("ffn.gate.bias"),
            self.experts_per_token,
            self.c.routed_scaling_factor,
        )
        trace[f"gate_indices_{tag}"], trace[f"gate_weights_{tag}"] = ids, weights
        total = np.zeros(self.c.hidden_size, F32)
        for i in np.argsort(ids):
            total = total + self._swiglu(x, f"ffn.experts.{ids[i]}", weights[i])
        return self.p.store(total + self._swiglu(x, "ffn.shared_experts", F32(1)))

    def ffn(self, streams, pre, trace, tag):
        """The FFN sublayer of one token: streams [M, H], pre [M] of the attention site -> streams, this site's pre."""
        next_pre, post, comb = self.coefficients(streams, "ffn")
        y = self.moe(self.norm(self.collapse(streams, pre), "ffn_norm"), trace, tag)
        streams = self.expand(streams, y, post, comb)
        trace.update({f"ffn_out_{tag}": y, f"streams_out_{tag}": streams, f"pre_mix_out_{tag}": next_pre})
        return streams, next_pre


class Layer(Block):
    """One backbone layer: attention of its class, then the MoE."""

    def __init__(self, weights, config: Config, precision, index: int):
        super().__init__(
            weights, config, precision, f"layers.{index}", config.compress_ratios[index], config.num_experts_per_tok
        )
        self.index, self.ratio = index, config.compress_ratios[index]
        self.owns_keys = index in config.kv_source_layer_ids
        self.scores = index in config.index_source_layer_ids

    def compress(self, u, position, cache: LayerCache):
        """Section 6: append the entry and index key that the token at `position` completes, if any."""
        if self.ratio == 1:
            pooled = self.plain(u, "attn.compressor.wkv")
        else:
            value, gate = (self.get(f"attn.compressor.{n}.weight") @ u for n in ("wkv", "wgate"))
            if position % 2 == 0:
                cache.pending = (value, gate)
                return
            first_value, first_gate = cache.pending
            cache.pending = None
            share = ops.sigmoid(gate - first_gate)  # softmax over the two, the second one's part
            pooled = self.p.store(first_value * (1 - share) + value * share)
        latent = self.norm(pooled, "attn.compressor.norm")
        start = position // self.ratio * self.ratio
        cache.compressed.append(self.p.cached(codecs.qdq_nvfp4, self.rope(latent, start)))
        key = self.norm(self.plain(latent, "attn.indexer.wk"), "attn.indexer.k_norm")
        cache.index_keys.append(self.p.cached(codecs.qdq_mxfp4, self.rope(key, start)))

    def index_scores(self, u, latent, keys, position):
        """Section 7: u [H], q latent [q_lora], keys [v, J] -> [v], rounded as the release rounds."""
        heads, dim, store = self.c.index_n_heads, self.c.index_head_dim, self.p.store
        q = self.rope(self.linear(latent, "attn.indexer.wq_b").reshape(heads, dim), position)
        q = self.p.cached(codecs.qdq_mxfp4, q)
        w = store(self.plain(u, "attn.indexer.weights_proj") * F32(dim**-0.5 * heads**-0.5))
        products = store(np.maximum(store(q @ keys.T), 0) * w[:, None])
        return store(products.sum(0, dtype=F32))

    def select(self, u, latent, position, source: LayerCache, shared, trace):
        """-> i32[K] selected entries, ascending then -1; also sets `shared["allowed"]` at the candidate source."""
        visible = (position + 1) // self.ratio
        scores = np.zeros(0, F32)
        if visible:
            scores = self.index_scores(u, latent, np.stack(source.index_keys[:visible]), position)
        allowed = np.ones(visible, bool)
        if self.index == self.c.candidate_source_layer_id:
            shared["allowed"] = ops.candidate_mask(scores, self.c)
            trace["candidates"] = shared["allowed"]
        elif self.index > self.c.candidate_source_layer_id:
            allowed = shared["allowed"][:visible]
        trace[f"index_scores_{self.index}"] = scores
        return ops.select_entries(scores, allowed, self.c.index_topk)

    def attention(self, streams, pre, position, caches, shared, trace):
        """The attention sublayer: streams [M, H], pre [M] -> streams, this site's pre. Caches are written first."""
        next_pre, post, comb = self.coefficients(streams, "attn")
        u = self.norm(self.collapse(streams, pre), "attn_norm")
        cache = caches[self.index]
        latent, q = self.query(u, position)
        cache.window[position] = self.window_kv(u, position)
        cache.window.pop(position - self.c.sliding_window, None)
        keys = [cache.window[p] for p in sorted(cache.window)]
        if self.ratio:
            source = caches[self.c.source(self.c.kv_source_layer_ids, self.index)]
            if self.owns_keys:
                self.compress(u, position, cache)
            if self.scores:
                shared["selected"] = self.select(u, latent, position, source, shared, trace)
                trace[f"topk_{self.index}"] = shared["selected"]
            keys += [source.compressed[j] for j in shared["selected"] if j >= 0]
        y = self.attend(q, np.stack(keys), position)
        trace[f"attn_out_{self.index}"] = y
        return self.expand(streams, y, post, comb), next_pre


class Model:
    """The target network. `token_map` i[V]: raw token id -> compressed id of the engram."""

    def __init__(self, weights: Weights, config: Config, token_map, precision: str):
        self.w, self.c, self.p = weights, config, Precision(precision)
        self.layers = [Layer(weights, config, self.p, i) for i in range(config.num_hidden_layers)]
        self.token_map = [int(t) for t in token_map]
        self.primes, self.multipliers = ops.engram_primes(config), ops.engram_multipliers(config)

    def new_state(self) -> State:
        return State(0, [], [LayerCache({}, [], []) for _ in self.layers])

    def hash_rows(self, state: State):
        """Rows of the newest token, one list per engram layer."""
        ids = [self.token_map[t] for t in state.tokens[: -self.c.engram_max_ngram_size - 1 : -1]]
        pad = self.token_map[self.c.engram_pad_token_id]
        return [ops.engram_rows(ids, pad, m, p) for m, p in zip(self.multipliers, self.primes)]

    def engram(self, layer: Layer, streams, rows):
        """Section 10: streams [M, H] -> [M, H]."""
        m, store = self.c.hc_mult, self.p.store
        table = self.w.rows(f"layers.{layer.index}.engram.embed", np.array(rows))
        mixed = layer.linear(table.reshape(-1), "engram.wkv").reshape(m + 1, -1)
        gate = ops.engram_gate(
            streams, mixed[:m], layer.get("engram.q_weight"), layer.get("engram.k_weight"), self.c.rms_norm_eps
        )
        return store(streams + gate[:, None] * mixed[m])

    def head(self, x, norm_name):
        """Collapsed streams [..., H] -> logits [..., V]."""
        x = self.p.store(ops.rms_norm(x, self.w.matrix(f"{norm_name}.weight"), self.c.rms_norm_eps))
        return x @ self.w.matrix("head.weight").T

    def step(self, state: State, token: int) -> Output:
        """Run one token (python int) at position `state.length`; changes `state`."""
        if not 0 <= token < self.c.vocab_size:
            raise ValueError(f"token: expected 0..{self.c.vocab_size - 1}, got {token}")
        position = state.length
        state.tokens.append(int(token))
        rows = self.hash_rows(state)
        trace = {"engram_hash_ids": np.array(rows)}
        streams = np.repeat(self.w.matrix("embed.weight")[None, token], self.c.hc_mult, 0)
        pre = np.eye(1, self.c.hc_mult, dtype=F32)[0]
        features, shared = [], {}
        for layer in self.layers:
            if layer.index in self.c.engram_layer_ids:
                streams = self.engram(layer, streams, rows[self.c.engram_layer_ids.index(layer.index)])
            trace[f"streams_in_{layer.index}"] = streams
            if layer.index in self.c.dspark_target_layer_ids:
                features.append(self.p.store(streams.mean(0, dtype=F32)))
            streams, pre = layer.attention(streams, pre, position, state.layers, shared, trace)
            streams, pre = layer.ffn(streams, pre, trace, layer.index)
        state.length += 1
        logits = self.head(self.p.store(pre @ streams), "norm")
        return Output(logits, np.concatenate(features), trace)

    def run(self, ids, state: State | None = None) -> list[Output]:
        """Feed `ids` one after the other from `state` (default: a fresh one)."""
        state = state or self.new_state()
        return [self.step(state, int(t)) for t in ids]
