"""The parameters as Flax modules: what is on the device, in the checkpoint's own formats (spec/model.md section 13).

Modules hold parameters only. A fresh module holds `jax.ShapeDtypeStruct` placeholders; `checkpoint.load` replaces them
by arrays. Tensors that are always multiplied together are stored merged, so no step ever copies weights to merge them:

* `attn.front` = wq_a ++ wkv; `attn.qb` = indexer.wq_b ++ wq_b (index columns first); `ffn.w13` = w1 ++ w3 per expert.

E8M0 scales are raw bytes (uint8).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41_jax.config import ModelConfig
from dsv41_jax.schedule import LayerSpec
from pallas_kernels.codecs import cdiv

F8, BF16, F32, U8, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.uint8, jnp.int32

ENGRAM_PLACES = ("device", "host")


def _param(shape, dtype) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)))


class Fp8Linear(nnx.Module):
    """FP8 weight f8[out, in] with E8M0 scales u8[ceil(out/32), ceil(in/32)]."""

    def __init__(self, out: int, inp: int):
        self.weight = _param((out, inp), F8)
        self.scale = _param((cdiv(out, 32), cdiv(inp, 32)), U8)


class HyperSite(nnx.Module):
    """mHC coefficients of one sublayer: fn f32[2M + M*M, M*H], on a GPU in three bf16 parts end to end (`hyper_parts`),
    base f32[2M + M*M], scale f32[3]; M = 4 streams."""

    def __init__(self, c: ModelConfig):
        n = 2 * c.hc_mult + c.hc_mult**2
        self.fn = _param((n, c.hc_mult * c.hidden_size), F32)
        self.base = _param((n,), F32)
        self.scale = _param((3,), F32)


class Compressor(nnx.Module):
    """wkv bf16[D, H], norm bf16[D]; wgate bf16[D, H] for ratio 2 only."""

    def __init__(self, c: ModelConfig, ratio: int):
        self.wkv = _param((c.head_dim, c.hidden_size), BF16)
        self.wgate = _param((c.head_dim, c.hidden_size), BF16) if ratio == 2 else None
        self.norm = _param((c.head_dim,), BF16)


class IndexKeys(nnx.Module):
    """wk bf16[J, D], k_norm bf16[J]."""

    def __init__(self, c: ModelConfig):
        self.wk = _param((c.index_head_dim, c.head_dim), BF16)
        self.k_norm = _param((c.index_head_dim,), BF16)


class Attention(nnx.Module):
    """CSA2 attention of any class. front: f8[Q + D, H]; qb: f8[I*J + N*D, Q], index columns first where there are any;
    wo_a: f8[G*O, N*D/G]; wo_b: f8[H, G*O]; sink f32[N]; weights_proj bf16[I, H] for index sources."""

    def __init__(self, c: ModelConfig, layer: LayerSpec):
        index_columns = c.index_n_heads * c.index_head_dim if layer.scores else 0
        heads = c.num_attention_heads * c.head_dim
        self.front = Fp8Linear(c.q_lora_rank + c.head_dim, c.hidden_size)
        self.q_norm = _param((c.q_lora_rank,), BF16)
        self.kv_norm = _param((c.head_dim,), BF16)
        self.qb = Fp8Linear(index_columns + heads, c.q_lora_rank)
        self.wo_a = Fp8Linear(c.o_groups * c.o_lora_rank, heads // c.o_groups)
        self.wo_b = Fp8Linear(c.hidden_size, c.o_groups * c.o_lora_rank)
        self.sink = _param((c.num_attention_heads,), F32)
        self.compressor = Compressor(c, layer.ratio) if layer.owns_kv else None
        self.index_keys = IndexKeys(c) if layer.owns_kv else None
        self.weights_proj = _param((c.index_n_heads, c.hidden_size), BF16) if layer.scores else None


class Experts(nnx.Module):
    """Routed experts as packed MXFP4. w13 u8[E, 2F, H/2] (gate rows, then up rows), s13 u8[E, 2F, H/32],
    w2 u8[E, H, F/2], s2 u8[E, H, F/32]; low nibble = even input."""

    def __init__(self, c: ModelConfig, experts: int):
        h, f = c.hidden_size, c.moe_intermediate_size
        self.w13 = _param((experts, 2 * f, h // 2), U8)
        self.s13 = _param((experts, 2 * f, h // 32), U8)
        self.w2 = _param((experts, h, f // 2), U8)
        self.s2 = _param((experts, h, f // 32), U8)


class MoE(nnx.Module):
    """gate bf16[E, H], bias f32[E], routed experts, shared expert w13 f8[2F, H] and w2 f8[H, F]."""

    def __init__(self, c: ModelConfig, experts: int, local_experts: int):
        h, f = c.hidden_size, c.moe_intermediate_size
        self.gate = _param((experts, h), BF16)
        self.bias = _param((experts,), F32)
        self.experts = Experts(c, local_experts)
        self.shared_w13 = Fp8Linear(2 * f, h)
        self.shared_w2 = Fp8Linear(h, f)


class Engram(nnx.Module):
    """table f8[rows, D] and table_scale u8[rows, D/32] (None: they stay on the host), wkv f8[(M+1)*H, heads*D], q_weight and
    k_weight bf16[M, H]."""

    def __init__(self, c: ModelConfig, rows: int | None):
        d = c.engram_head_dim
        self.table = _param((rows, d), F8) if rows is not None else None
        self.table_scale = _param((rows, d // 32), U8) if rows is not None else None
        self.wkv = Fp8Linear((c.hc_mult + 1) * c.hidden_size, c.ngram_heads * d)
        self.q_weight = _param((c.hc_mult, c.hidden_size), BF16)
        self.k_weight = _param((c.hc_mult, c.hidden_size), BF16)


class Block(nnx.Module):
    """One layer, or one draft stage."""

    def __init__(self, c: ModelConfig, layer: LayerSpec, experts: int, local_experts: int, engram_rows: int | None = None):
        self.engram = Engram(c, engram_rows) if layer.engram is not None else None
        self.hc_attn = HyperSite(c)
        self.attn_norm = _param((c.hidden_size,), BF16)
        self.attn = Attention(c, layer)
        self.hc_ffn = HyperSite(c)
        self.ffn_norm = _param((c.hidden_size,), BF16)
        self.ffn = MoE(c, experts, local_experts)


class Draft(nnx.Module):
    """The DSpark drafter: main_proj f8[H, F*H] over F target features, stages, Markov head and confidence head."""

    def __init__(self, c: ModelConfig, local_experts: int):
        h, r = c.hidden_size, c.dspark_markov_rank
        self.main_proj = Fp8Linear(h, len(c.dspark_target_layer_ids) * h)
        self.main_norm = _param((h,), BF16)
        self.stages = nnx.List([Block(c, s, c.dspark_n_routed_experts, local_experts) for s in c.draft_layers])
        self.norm = _param((h,), BF16)
        self.markov_embed = _param((c.vocab_size, r), BF16)
        self.markov_head = _param((c.vocab_size, r), BF16)
        self.confidence = _param((1, h + r), BF16)


class Transformer(nnx.Module):
    """All parameters of one rank.

    config: the geometry. ranks: expert-parallel ranks; experts and engram rows are held 1/ranks each. engram: where the
    engram tables are, one of ENGRAM_PLACES.
    token_map: i32[V], raw token id -> engram id (spec/model.md section 10). engram_host: i32[], the number of the tables on
    the host (`engram_host`), None if they are on the device or there are none.
    Raises ValueError if `ranks` does not divide the experts, or for another place.
    """

    def __init__(self, c: ModelConfig, ranks: int = 1, engram: str = "device"):
        if engram not in ENGRAM_PLACES:
            raise ValueError(f"engram: expected one of {ENGRAM_PLACES}, got {engram!r}")
        for name in ("n_routed_experts", "dspark_n_routed_experts"):
            if getattr(c, name) % ranks:
                raise ValueError(f"ranks: expected a divisor of {name} = {getattr(c, name)}, got {ranks}")
        self.embed = _param((c.vocab_size, c.hidden_size), BF16)
        self.token_map = _param((c.vocab_size,), I32)
        local = c.n_routed_experts // ranks
        on_host = engram == "host" and bool(c.engram_layer_ids)
        self.engram_host = _param((), I32) if on_host else None
        rows = [None if on_host else cdiv(n, ranks) for n in c.engram_num_embeddings]
        self.layers = nnx.List([
            Block(c, s, c.n_routed_experts, local, rows[s.engram] if s.engram is not None else None) for s in c.layers
        ])  # fmt: skip
        self.norm = _param((c.hidden_size,), BF16)
        self.head = _param((c.vocab_size, c.hidden_size), BF16)
        self.draft = Draft(c, c.dspark_n_routed_experts // ranks) if c.has_draft else None

    @property
    def engram_place(self) -> str:
        """Where the engram tables are: "device" or "host"."""
        return "device" if self.engram_host is None else "host"


def flat_paths(module) -> dict[str, jax.ShapeDtypeStruct]:
    """{"layers.3.attn.front.weight": placeholder or array, ...} in pytree order."""
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]:
        keys = [str(getattr(k, "name", getattr(k, "idx", getattr(k, "key", k)))) for k in path]
        out[".".join(keys[:-1] if keys[-1] == "value" else keys)] = leaf
    return out
