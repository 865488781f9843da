"""Random checkpoints for any config, under the released tensor names, dtypes and shapes (spec/model.md section 13).

Use:

    tensors = make(GEOMETRIES["two_full2"], seed=0)                 # {name: array in its released dtype}
    write_checkpoint(folder, GEOMETRIES["two_full2"], seed=0)       # config, weights, engram token map

Weights are scaled so that activations stay near unit size, sinks and biases matter, and every fifth expert is loud
enough for the SwiGLU clamp to bite. `bias_vl` is far off on purpose: text must never read it.
"""

import json
from pathlib import Path

import numpy as np

from . import codecs
from .ops import Config
from .weights import write_safetensors


def token_map(config: Config):
    """-> i32[V]: raw id -> compressed id, onto and not monotone (needs 7 and the compressed size coprime)."""
    size = config.engram_compressed_vocab_size
    return ((np.arange(config.vocab_size) * 7 + 3) % size).astype(np.int32)


def make(hf_config: dict, seed: int) -> dict[str, np.ndarray]:
    """A whole checkpoint of `hf_config` (nested or bare) as {released name: array}."""
    return _Maker(Config.from_hf(hf_config), seed).checkpoint()


def write_checkpoint(folder, hf_config: dict, seed: int) -> Path:
    """`make` to a folder: config.json, model.safetensors, engram_token_map.npy. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=1))
    write_safetensors(folder / "model.safetensors", make(hf_config, seed))
    np.save(folder / "engram_token_map.npy", token_map(Config.from_hf(hf_config)))
    return folder


class _Maker:
    def __init__(self, config: Config, seed: int):
        self.c, self.rng, self.out = config, np.random.default_rng(seed), {}

    def normal(self, *shape, std=1.0, mean=0.0):
        return (self.rng.standard_normal(shape) * std + mean).astype(np.float32)

    def f32(self, name, *shape, std=1.0, mean=0.0):
        self.out[name] = self.normal(*shape, std=std, mean=mean)

    def bf16(self, name, *shape, gain=1.0):
        """A matrix for inputs of unit size: std = gain / sqrt(columns)."""
        self.out[name] = self.normal(*shape, std=gain * shape[-1] ** -0.5).astype(codecs.BF16)

    def norm(self, name, *shape, std=0.15):
        self.out[name] = self.normal(*shape, std=std, mean=1.0).astype(codecs.BF16)

    def fp8(self, name, rows, cols, gain=1.0):
        """F8 with an E8M0 scale per 32 x 32 tile (edge tiles may be partial)."""
        w = self.normal(rows, cols, std=gain * cols**-0.5)
        padded = np.zeros((-(-rows // 32) * 32, -(-cols // 32) * 32), np.float32)
        padded[:rows, :cols] = w
        tiles = padded.reshape(padded.shape[0] // 32, 32, padded.shape[1] // 32, 32)
        scale = codecs.power_of_two_at_least(np.abs(tiles).max((1, 3)) / np.float32(448))
        quantised = (tiles / scale[:, None, :, None]).astype(codecs.E4M3)
        self.out[f"{name}.weight"] = np.ascontiguousarray(quantised.reshape(padded.shape)[:rows, :cols])
        self.out[f"{name}.scale"] = scale.astype(codecs.E8M0)

    def fp4(self, name, rows, cols, gain=1.0):
        """Random e2m1 codes, two a byte, with an E8M0 scale per row per 32 inputs."""
        codes_std = np.sqrt(np.mean(codecs.E2M1_VALUES**2))
        exponent = np.round(np.log2(gain * cols**-0.5 / codes_std)) + self.rng.integers(-1, 2, (rows, cols // 32))
        self.out[f"{name}.weight"] = self.rng.integers(-128, 128, (rows, cols // 2), dtype=np.int8)
        self.out[f"{name}.scale"] = np.exp2(exponent).astype(codecs.E8M0)

    def block(self, prefix, experts):
        """What backbone layers and draft stages have in common."""
        c, h = self.c, self.c.hidden_size
        self.fp8(f"{prefix}.attn.wq_a", c.q_lora_rank, h)
        self.norm(f"{prefix}.attn.q_norm.weight", c.q_lora_rank)
        self.fp8(f"{prefix}.attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank, gain=1.5)
        self.fp8(f"{prefix}.attn.wkv", c.head_dim, h)
        self.norm(f"{prefix}.attn.kv_norm.weight", c.head_dim)
        self.fp8(f"{prefix}.attn.wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
        self.fp8(f"{prefix}.attn.wo_b", h, c.o_groups * c.o_lora_rank)
        self.f32(f"{prefix}.attn.attn_sink", c.num_attention_heads, std=0.7)
        m = c.hc_mult
        for site in ("attn", "ffn"):
            self.norm(f"{prefix}.{site}_norm.weight", h)
            self.f32(f"{prefix}.hc_{site}_fn", (2 + m) * m, m * h, std=1.5 * (m * h) ** -0.5)
            self.f32(f"{prefix}.hc_{site}_base", (2 + m) * m, std=0.7)
            self.f32(f"{prefix}.hc_{site}_scale", 3, std=0.25, mean=0.9)
        self.bf16(f"{prefix}.ffn.gate.weight", experts, h, gain=2.0)
        self.f32(f"{prefix}.ffn.gate.bias", experts, std=0.3)
        self.f32(f"{prefix}.ffn.gate.bias_vl", experts, mean=5.0)
        f = c.moe_intermediate_size
        for e in range(experts):
            loud = 8.0 if e % 5 == 0 else 1.5
            self.fp4(f"{prefix}.ffn.experts.{e}.w1", f, h, gain=loud)
            self.fp4(f"{prefix}.ffn.experts.{e}.w3", f, h, gain=loud)
            self.fp4(f"{prefix}.ffn.experts.{e}.w2", h, f, gain=0.7 / loud)
        for w, rows, cols in (("w1", f, h), ("w3", f, h), ("w2", h, f)):
            self.fp8(f"{prefix}.ffn.shared_experts.{w}", rows, cols)

    def sparse(self, prefix, layer):
        """Compressor and indexer of a backbone layer, where it has them."""
        c, h = self.c, self.c.hidden_size
        if layer in c.kv_source_layer_ids:
            self.bf16(f"{prefix}.attn.compressor.wkv.weight", c.head_dim, h)
            if c.compress_ratios[layer] == 2:
                self.bf16(f"{prefix}.attn.compressor.wgate.weight", c.head_dim, h, gain=1.5)
            self.norm(f"{prefix}.attn.compressor.norm.weight", c.head_dim)
            self.bf16(f"{prefix}.attn.indexer.wk.weight", c.index_head_dim, c.head_dim)
            self.norm(f"{prefix}.attn.indexer.k_norm.weight", c.index_head_dim)
        if layer in c.index_source_layer_ids:
            self.fp8(f"{prefix}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.bf16(f"{prefix}.attn.indexer.weights_proj.weight", c.index_n_heads, h)

    def engram(self, prefix, rows):
        c, h, m = self.c, self.c.hidden_size, self.c.hc_mult
        table = self.normal(rows, c.engram_head_dim)
        groups = table.reshape(rows, -1, 32)
        scale = codecs.power_of_two_at_least(np.abs(groups).max(-1) / np.float32(448))
        self.out[f"{prefix}.engram.embed.weight"] = (groups / scale[..., None]).astype(codecs.E4M3).reshape(table.shape)
        self.out[f"{prefix}.engram.embed.scale"] = scale.astype(codecs.E8M0)
        self.fp8(
            f"{prefix}.engram.wkv", (m + 1) * h, (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
        )
        for name in ("q_weight", "k_weight"):
            self.norm(f"{prefix}.engram.{name}", m, h, std=0.3)

    def draft(self):
        c, h, last = self.c, self.c.hidden_size, f"mtp.{self.c.num_nextn_predict_layers - 1}"
        for i in range(c.num_nextn_predict_layers):
            self.block(f"mtp.{i}", c.dspark_n_routed_experts)
        self.fp8("mtp.0.main_proj", h, len(c.dspark_target_layer_ids) * h)
        self.norm("mtp.0.main_norm.weight", h)
        self.norm(f"{last}.norm.weight", h)
        self.out[f"{last}.markov_head.embed.weight"] = self.normal(c.vocab_size, c.dspark_markov_rank).astype(
            codecs.BF16
        )
        self.bf16(f"{last}.markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
        self.bf16(f"{last}.confidence_head.proj.weight", 1, h + c.dspark_markov_rank)

    def checkpoint(self):
        c = self.c
        self.out["embed.weight"] = self.normal(c.vocab_size, c.hidden_size).astype(codecs.BF16)
        self.bf16("head.weight", c.vocab_size, c.hidden_size)
        self.norm("norm.weight", c.hidden_size)
        for layer in range(c.num_hidden_layers):
            self.block(f"layers.{layer}", c.n_routed_experts)
            self.sparse(f"layers.{layer}", layer)
            if layer in c.engram_layer_ids:
                self.engram(f"layers.{layer}", c.engram_num_embeddings[c.engram_layer_ids.index(layer)])
        if c.num_nextn_predict_layers:
            self.draft()
        return self.out
