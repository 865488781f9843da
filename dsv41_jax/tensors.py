"""Which released tensors make up each parameter (spec/model.md section 13).

`released_tensors(config)` maps a parameter path of `params.Transformer` to the released tensors it is made of, in order:
one tensor, several concatenated along the rows, or one list per expert, stacked. The loader, the writer of random
checkpoints and `dsv41 inspect` all read this one table.
"""

import dataclasses

from dsv41_jax.config import ModelConfig
from dsv41_jax.schedule import LayerSpec
from pallas_kernels.codecs import cdiv

# safetensors dtype names
F8, E8, I8, BF16, F32 = "F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the release: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """How a parameter is made: `parts` concatenated along axis 0; with `per_expert`, parts[e] is expert e's list and
    the experts are stacked. `rows_sharded`: a rank holds a contiguous slice of the rows (engram tables)."""

    parts: tuple
    per_expert: bool = False
    rows_sharded: bool = False

    def tensors(self) -> list[Tensor]:
        return [t for p in self.parts for t in p] if self.per_expert else list(self.parts)


# tensors of the release that text decode does not use: present or absent, both are fine
IGNORED_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
IGNORED_SUFFIXES = (".gate.bias_vl",)


def released_tensors(c: ModelConfig) -> dict[str, Source]:
    """{parameter path: Source} for every checkpoint-backed parameter. `token_map` is not one (it is derived)."""
    h, v = c.hidden_size, c.vocab_size
    out = {
        "embed": _plain("embed.weight", BF16, v, h),
        "head": _plain("head.weight", BF16, v, h),
        "norm": _plain("norm.weight", BF16, h),
    }
    for s in c.layers:
        out |= _block(c, s, f"layers.{s.index}", f"layers.{s.index}", c.n_routed_experts)
    if c.has_draft:
        out |= _draft(c)
    return out


def _plain(name, dtype, *shape) -> Source:
    return Source((Tensor(name, dtype, shape),))


def _fp8(path: str, *named_rows, inp: int) -> dict[str, Source]:
    """Weight and scale sources of an FP8 linear made of (name, rows) pieces."""
    weights = tuple(Tensor(f"{n}.weight", F8, (rows, inp)) for n, rows in named_rows)
    scales = tuple(Tensor(f"{n}.scale", E8, (cdiv(rows, 32), cdiv(inp, 32))) for n, rows in named_rows)
    return {f"{path}.weight": Source(weights), f"{path}.scale": Source(scales)}


def _block(c: ModelConfig, s: LayerSpec, path: str, name: str, experts: int) -> dict[str, Source]:
    h = c.hidden_size
    out = {}
    for site in ("attn", "ffn"):
        n = 2 * c.hc_mult + c.hc_mult**2
        out[f"{path}.hc_{site}.fn"] = _plain(f"{name}.hc_{site}_fn", F32, n, c.hc_mult * h)
        out[f"{path}.hc_{site}.base"] = _plain(f"{name}.hc_{site}_base", F32, n)
        out[f"{path}.hc_{site}.scale"] = _plain(f"{name}.hc_{site}_scale", F32, 3)
        out[f"{path}.{site}_norm"] = _plain(f"{name}.{site}_norm.weight", BF16, h)
    out |= _attention(c, s, f"{path}.attn", f"{name}.attn")
    out |= _moe(c, f"{path}.ffn", f"{name}.ffn", experts)
    if s.engram is not None:
        out |= _engram(c, f"{path}.engram", f"{name}.engram", c.engram_num_embeddings[s.engram])
    return out


def _attention(c, s, path, name) -> dict[str, Source]:
    h, d, heads, groups = c.hidden_size, c.head_dim, c.num_attention_heads * c.head_dim, c.o_groups
    index = [(f"{name}.indexer.wq_b", c.index_n_heads * c.index_head_dim)] if s.scores else []
    out = _fp8(f"{path}.front", (f"{name}.wq_a", c.q_lora_rank), (f"{name}.wkv", d), inp=h)
    out |= _fp8(f"{path}.qb", *index, (f"{name}.wq_b", heads), inp=c.q_lora_rank)
    out |= _fp8(f"{path}.wo_a", (f"{name}.wo_a", groups * c.o_lora_rank), inp=heads // groups)
    out |= _fp8(f"{path}.wo_b", (f"{name}.wo_b", h), inp=groups * c.o_lora_rank)
    out[f"{path}.q_norm"] = _plain(f"{name}.q_norm.weight", BF16, c.q_lora_rank)
    out[f"{path}.kv_norm"] = _plain(f"{name}.kv_norm.weight", BF16, d)
    out[f"{path}.sink"] = _plain(f"{name}.attn_sink", F32, c.num_attention_heads)
    if s.owns_kv:
        out[f"{path}.compressor.wkv"] = _plain(f"{name}.compressor.wkv.weight", BF16, d, h)
        if s.ratio == 2:
            out[f"{path}.compressor.wgate"] = _plain(f"{name}.compressor.wgate.weight", BF16, d, h)
        out[f"{path}.compressor.norm"] = _plain(f"{name}.compressor.norm.weight", BF16, d)
        out[f"{path}.index_keys.wk"] = _plain(f"{name}.indexer.wk.weight", BF16, c.index_head_dim, d)
        out[f"{path}.index_keys.k_norm"] = _plain(f"{name}.indexer.k_norm.weight", BF16, c.index_head_dim)
    if s.scores:
        out[f"{path}.weights_proj"] = _plain(f"{name}.indexer.weights_proj.weight", BF16, c.index_n_heads, h)
    return out


def _moe(c, path, name, experts: int) -> dict[str, Source]:
    h, f = c.hidden_size, c.moe_intermediate_size

    def stacked(suffix, dtype, weights, shape):
        return Source(
            tuple(tuple(Tensor(f"{name}.experts.{e}.{w}.{suffix}", dtype, shape) for w in weights) for e in range(experts)),
            per_expert=True,
        )

    out = {
        f"{path}.gate": _plain(f"{name}.gate.weight", BF16, experts, h),
        f"{path}.bias": _plain(f"{name}.gate.bias", F32, experts),
        f"{path}.experts.w13": stacked("weight", I8, ("w1", "w3"), (f, h // 2)),
        f"{path}.experts.s13": stacked("scale", E8, ("w1", "w3"), (f, h // 32)),
        f"{path}.experts.w2": stacked("weight", I8, ("w2",), (h, f // 2)),
        f"{path}.experts.s2": stacked("scale", E8, ("w2",), (h, f // 32)),
    }
    shared = f"{name}.shared_experts"
    out |= _fp8(f"{path}.shared_w13", (f"{shared}.w1", f), (f"{shared}.w3", f), inp=h)
    out |= _fp8(f"{path}.shared_w2", (f"{shared}.w2", h), inp=f)
    return out


def _engram(c, path, name, rows: int) -> dict[str, Source]:
    d = c.engram_head_dim
    out = {
        f"{path}.table": Source((Tensor(f"{name}.embed.weight", F8, (rows, d)),), rows_sharded=True),
        f"{path}.table_scale": Source((Tensor(f"{name}.embed.scale", E8, (rows, d // 32)),), rows_sharded=True),
        f"{path}.q_weight": _plain(f"{name}.q_weight", BF16, c.hc_mult, c.hidden_size),
        f"{path}.k_weight": _plain(f"{name}.k_weight", BF16, c.hc_mult, c.hidden_size),
    }
    return out | _fp8(f"{path}.wkv", (f"{name}.wkv", (c.hc_mult + 1) * c.hidden_size), inp=c.ngram_heads * d)


def _draft(c: ModelConfig) -> dict[str, Source]:
    h, v, r, last = c.hidden_size, c.vocab_size, c.dspark_markov_rank, c.num_nextn_predict_layers - 1
    out = _fp8("draft.main_proj", ("mtp.0.main_proj", h), inp=len(c.dspark_target_layer_ids) * h)
    out |= {
        "draft.main_norm": _plain("mtp.0.main_norm.weight", BF16, h),
        "draft.norm": _plain(f"mtp.{last}.norm.weight", BF16, h),
        "draft.markov_embed": _plain(f"mtp.{last}.markov_head.embed.weight", BF16, v, r),
        "draft.markov_head": _plain(f"mtp.{last}.markov_head.head.weight", BF16, v, r),
        "draft.confidence": _plain(f"mtp.{last}.confidence_head.proj.weight", BF16, 1, h + r),
    }
    for i, s in enumerate(c.draft_layers):
        out |= _block(c, s, f"draft.stages.{i}", f"mtp.{i}", c.dspark_n_routed_experts)
    return out
