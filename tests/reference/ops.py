"""Configuration and the pieces of the network that are functions of arrays alone (spec/model.md sections 1-10).

All arrays are f32 unless said otherwise; rounding to bf16 is the caller's business.
"""

import dataclasses

import numpy as np

F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Config:
    """Geometry, under the HF `text_config` names. `compress_ratios` has an entry per layer and per draft stage."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @classmethod
    def from_hf(cls, hf: dict) -> "Config":
        """`config.json` as a dict, nested `text_config` or bare."""
        text = hf.get("text_config", hf)
        picked = {f.name: text[f.name] for f in dataclasses.fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in picked.items()})

    def source(self, ids: tuple[int, ...], layer: int) -> int:
        """The largest id of `ids` that is <= layer."""
        return max(i for i in ids if i <= layer)


# ---------------------------------------------------------------------------------------------------- norms and RoPE


def rms_norm(x, weight, eps):
    """x [..., n], weight [n] -> [..., n]."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + F32(eps)) * weight


def rope_frequencies(config: Config, ratio: int):
    """-> f32[rope/2], radians per position: plain for ratio 0, YaRN-stretched with the compress theta otherwise."""
    dim = config.qk_rope_head_dim
    i = np.arange(dim // 2, dtype=F32)
    if ratio == 0:
        return F32(1) / F32(config.rope_theta) ** (2 * i / dim)
    theta, yarn = config.compress_rope_theta, config.rope_scaling

    def turns_at(n):
        length = yarn["original_max_position_embeddings"]
        return dim * np.log(length / (2 * np.pi * n)) / (2 * np.log(theta))

    low = max(np.floor(turns_at(yarn["beta_fast"])), 0)
    high = min(np.ceil(turns_at(yarn["beta_slow"])), dim - 1)
    if low == high:
        high += 0.001
    t = F32(1) / F32(theta) ** (2 * i / dim)
    ramp = np.clip((i - F32(low)) / F32(high - low), 0, 1).astype(F32)
    return t * (1 - ramp) + t / F32(yarn["factor"]) * ramp


def rotate(x, position, frequencies, inverse=False):
    """RoPE on the last 2*len(frequencies) channels, adjacent pairs. x [..., n], position i64[] or broadcastable to
    x.shape[:-1] -> [..., n]."""
    width = 2 * len(frequencies)
    angle = np.asarray(position, F32)[..., None] * frequencies
    cos, sin = np.cos(angle), -np.sin(angle) if inverse else np.sin(angle)
    re, im = x[..., -width::2], x[..., x.shape[-1] - width + 1 :: 2]
    out = x.copy()
    out[..., -width::2] = re * cos - im * sin
    out[..., x.shape[-1] - width + 1 :: 2] = re * sin + im * cos
    return out


# ------------------------------------------------------------------------------------------------------------- mHC


def sigmoid(x):
    return (F32(1) / (F32(1) + np.exp(-x))).astype(F32)


def hyper_coefficients(streams, fn, base, scale, config: Config):
    """Section 3: streams [M, H], fn [(2+M)*M, M*H], base [(2+M)*M], scale [3] -> pre [M], post [M], comb [M, M]."""
    m, eps = config.hc_mult, F32(config.hc_eps)
    v = streams.reshape(-1)
    mixed = (fn @ v) / np.sqrt(np.mean(v * v) + F32(config.rms_norm_eps))
    pre = sigmoid(mixed[:m] * scale[0] + base[:m]) + eps
    post = 2 * sigmoid(mixed[m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (mixed[2 * m :] * scale[2] + base[2 * m :]).reshape(m, m)
    comb = np.exp(logits - logits.max(1, keepdims=True))
    comb = comb / comb.sum(1, keepdims=True) + eps
    comb = comb / (comb.sum(0, keepdims=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        comb = comb / (comb.sum(0, keepdims=True) + eps)
    return pre, post, comb


# ------------------------------------------------------------------------------------------------------- selection


def best(scores, k):
    """The k highest of `scores` [n], best first, a tie to the lowest index -> i64[min(k, n)]."""
    return np.argsort(-scores, kind="stable")[:k]


def route(x, gate, bias, k, scale):
    """Section 9. x [H], gate [E, H], bias [E] -> expert ids i64[k] in rank order, weights [k]."""
    z = gate @ x
    score = np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    ids = best(score + bias, k)
    picked = score[ids]
    return ids, picked / (picked.sum() + F32(1e-20)) * F32(scale)


def candidate_mask(scores, config: Config):
    """Section 7: scores of the visible entries [v] -> bool[v rounded up to whole blocks], True inside the kept blocks.

    The newest entry's block is kept whatever it scores and takes one of the places."""
    size = config.candidate_block_size
    blocks = -(-len(scores) // size)
    padded = np.full(blocks * size, -np.inf, F32)
    padded[: len(scores)] = scores
    block_score = padded.reshape(blocks, size).max(1)
    block_score[-1:] = np.inf
    kept = np.zeros(blocks, bool)
    kept[best(block_score, config.candidate_topk_blocks)] = True
    return np.repeat(kept & (block_score > -np.inf), size)


def select_entries(scores, allowed, k):
    """scores [v] of the visible entries, allowed bool[v] -> i32[k]: the top k allowed ones ascending, then -1."""
    ids = np.flatnonzero(allowed)
    chosen = np.sort(ids[best(scores[ids], k)])
    return np.concatenate([chosen, np.full(k - len(chosen), -1)]).astype(np.int32)


# ---------------------------------------------------------------------------------------------------------- engram


def _is_prime(n: int) -> bool:
    if n % 2 == 0:
        return n == 2
    return n > 1 and all(n % d for d in range(3, int(n**0.5) + 1, 2))


def engram_primes(config: Config) -> list[list[list[int]]]:
    """Bucket counts [engram layer][n-gram size - 2][head]: for every size the first unused primes from the start on."""
    taken, layers = set(), []
    for _ in config.engram_layer_ids:
        sizes = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            heads, n = [], config.engram_vocab_size
            while len(heads) < config.engram_n_heads:
                if n not in taken and _is_prime(n):
                    heads.append(n)
                    taken.add(n)
                n += 1
            sizes.append(heads)
        layers.append(sizes)
    return layers


def engram_multipliers(config: Config) -> list[list[int]]:
    """Odd multipliers [engram layer][distance 0..max_ngram-1]."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = (
        np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
        for layer in config.engram_layer_ids
    )
    return [[2 * int(r) + 1 for r in draw] for draw in draws]


def engram_rows(ids, pad, multipliers, primes):
    """Table rows of one position. `ids`: compressed ids, newest token first, at most max_ngram of them (fewer at the
    start of the text: the rest counts as `pad`) -> list of (max_ngram-1)*heads python ints, n-gram-major."""
    rows, offset = [], 0
    padded = list(ids) + [pad] * (len(multipliers) - len(ids))
    rolling = padded[0] * multipliers[0]
    for size, token in enumerate(padded[1:]):
        rolling ^= token * multipliers[size + 1]
        for prime in primes[size]:
            rows.append(rolling % prime + offset)
            offset += prime
    return rows


def engram_gate(streams, keys, q_weight, k_weight, eps):
    """Section 10: streams, keys, q_weight, k_weight all [M, H] -> [M]."""
    width = streams.shape[-1]
    dot = np.sum(streams * q_weight * k_weight * keys, -1)
    norm = np.sqrt(np.mean(streams**2, -1) + F32(eps)) * np.sqrt(np.mean(keys**2, -1) + F32(eps))
    d = dot / norm * F32(width**-0.5)
    return sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(d), F32(1e-6))), d))


# -------------------------------------------------------------------------------------------------------- attention


def attend(q, keys, sink, round_p, tile=64):
    """Section 5: q [N, D], keys [n, D] (also the values), sink [N] -> [N, D]; no key gives 0.

    An online softmax over tiles of `tile` keys, because with rounded probabilities the tiles' running maxima show.
    `round_p` rounds the probabilities that multiply the values; the denominator keeps them unrounded."""
    scale = F32(q.shape[-1] ** -0.5)
    top = np.full(len(q), -1e30, F32)
    total = np.zeros(len(q), F32)
    out = np.zeros_like(q)
    for begin in range(0, len(keys), tile):
        k = keys[begin : begin + tile]
        logits = q @ k.T * scale
        new_top = np.maximum(top, logits.max(1))
        fade = np.exp(top - new_top)
        p = np.exp(logits - new_top[:, None])
        total = total * fade + p.sum(1)
        out = out * fade[:, None] + round_p(p) @ k
        top = new_top
    # exp(sink - top) overflows only where no key was seen (top = -1e30), and there out = 0 anyway.
    with np.errstate(over="ignore"):
        return (out / (total + np.exp(sink - top))[:, None]).astype(F32)
