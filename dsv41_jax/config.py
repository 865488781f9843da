"""Model geometry: the released config.json read, validated and turned into a layer schedule (spec/model.md section 1).

Both spellings are read: the nested HF `text_config` and the flat names of the reference's inference/config.json.
"""

import dataclasses
import math
import pathlib

from dsv41_jax.json_files import read_json
from dsv41_jax.schedule import ConfigError, LayerSpec, derive_schedule

# flat inference/config.json name -> ours (the HF text_config name, where it has one)
_FLAT = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "n_activated_experts": "num_experts_per_tok",
    "route_scale": "routed_scaling_factor",
    "window_size": "sliding_window",
    "original_seq_len": "original_max_position_embeddings",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "engram_layers": "engram_layer_ids",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_noise_id": "dspark_noise_token_id",
    "dspark_target_layers": "dspark_target_layer_ids",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "max_seq_len": "max_position_embeddings",
}

# values the network's definition fixes: anything else is another network
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "score_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "gate_temp": 1.0,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of one model. Defaults are the released DeepSeek-V4.1-Flash values.

    Raises ConfigError (field, value, rule) from __post_init__ for a geometry that cannot work.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    rope_factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536
    compress_rope_theta: float = 160000.0
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264  # -1 = none

    def __post_init__(self):
        object.__setattr__(self, "layers", derive_schedule(self))
        _check_geometry(self)

    # derived ----------------------------------------------------------------------------------------------------------

    @property
    def draft_layers(self) -> tuple[LayerSpec, ...]:
        """The DSpark stages as layers of kind SWA (spec/model.md section 11)."""
        n = self.num_hidden_layers
        return tuple(LayerSpec(n + i, "SWA", 0, None, None) for i in range(self.num_nextn_predict_layers))

    @property
    def ngram_heads(self) -> int:
        """Engram rows looked up per position and layer: n-gram sizes 2..max times heads (24 at release)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def has_draft(self) -> bool:
        return self.num_nextn_predict_layers > 0

    # reading ----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, raw: dict) -> "ModelConfig":
        """From a parsed config.json, nested (`text_config`) or flat. Unknown keys are ignored; missing ones are errors
        except where the release leaves them at a default. Raises ConfigError."""
        flat = dict(raw)
        for name in ("text_config", "rope_scaling"):
            nested = (flat.get("text_config") or {}) if name == "rope_scaling" else flat
            if not isinstance(nested.get(name, {}), dict | None):
                raise ConfigError(name, nested[name], "must be an object")
        flat.update(flat.pop("text_config", None) or {})
        scaling = flat.pop("rope_scaling", None)
        if scaling is not None:
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind != "yarn":
                raise ConfigError("rope_scaling.rope_type", kind, "must be 'yarn'")
            flat["rope_factor"] = scaling.get("factor", 16)
            for name in ("beta_fast", "beta_slow", "original_max_position_embeddings"):
                if name in scaling:
                    flat[name] = scaling[name]
        for theirs, ours in _FLAT.items():
            if theirs in flat:
                flat.setdefault(ours, flat[theirs])
        for name, value in _FIXED.items():
            if name in flat and flat[name] != value:
                raise ConfigError(name, flat[name], f"must be {value!r}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        needed = set(fields) - _OPTIONAL
        missing = sorted(needed - set(flat))
        if missing:
            raise ConfigError("config.json", f"without {', '.join(missing)}", "must name every size of the network")
        values = {name: _convert(name, f.type, flat[name]) for name, f in fields.items() if name in flat}
        if values["vocab_size"] <= cls.image_token_id:
            values.setdefault("image_token_id", -1)  # not the release's vocabulary, and none named
        return cls(**values)

    @classmethod
    def from_file(cls, path) -> "ModelConfig":
        """From a config.json file or the folder that holds one. Raises ConfigError or OSError."""
        path = pathlib.Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = read_json(path)
        except ValueError as e:
            raise ConfigError(str(path), "not JSON", f"must parse: {e}") from e
        if not isinstance(raw, dict):
            raise ConfigError(str(path), type(raw).__name__, "must be a JSON object")
        return cls.from_dict(raw)

    def to_dict(self) -> dict:
        """The nested HF form that `from_dict` reads back."""
        text = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        top = {n: text.pop(n) for n in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
        scaling = {"rope_type": "yarn", "factor": text.pop("rope_factor")}
        scaling |= {n: text.pop(n) for n in ("beta_fast", "beta_slow", "original_max_position_embeddings")}
        text = {k: list(v) if isinstance(v, tuple) else v for k, v in text.items()}
        text |= {k: v for k, v in _FIXED.items() if k not in ("score_func", "gate_temp")}
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            **top,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
            "text_config": {"model_type": "deepseek_v41_text", **text, "rope_scaling": scaling},
        }


_OPTIONAL = {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "rope_factor", "beta_fast", "beta_slow",
             "original_max_position_embeddings", "max_position_embeddings"}  # fmt: skip


def _convert(name, annotation, value):
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    try:
        if text.startswith("tuple"):
            if not isinstance(value, list | tuple):
                raise TypeError
            return tuple(_integer(v) for v in value)
        return float(value) if text == "float" else _integer(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(name, value, f"must be {text}") from None


def _integer(value) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise TypeError
    return int(value)


def _check_geometry(c: ModelConfig) -> None:
    def require(ok, field, rule):
        if not ok:
            raise ConfigError(field, getattr(c, field), rule)

    for f in dataclasses.fields(c):
        if f.type is int and not f.name.endswith("_id") and f.name not in ("num_nextn_predict_layers",):
            require(getattr(c, f.name) > 0, f.name, "must be positive")
        if f.type is float:
            require(0 < getattr(c, f.name) < math.inf, f.name, "must be positive and finite")
    for name in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "index_head_dim", "o_lora_rank"):
        require(getattr(c, name) % 32 == 0, name, "must be a multiple of 32, the quantisation group")
    require(c.num_attention_heads % c.o_groups == 0, "o_groups", "must divide num_attention_heads")
    require(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "must be even")
    require(c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim",
            "must fit in head_dim and index_head_dim")  # fmt: skip
    require(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", "must be <= n_routed_experts")
    require(c.engram_head_dim % 32 == 0, "engram_head_dim", "must be a multiple of 32")
    require(len(c.engram_num_embeddings) == len(c.engram_layer_ids), "engram_num_embeddings",
            "must have one entry per engram layer")  # fmt: skip
    if c.engram_layer_ids:
        require(c.engram_max_ngram_size > 1, "engram_max_ngram_size", "must be at least 2, the shortest n-gram")
        # checked before anybody looks for that many primes
        rows = c.ngram_heads * c.engram_vocab_size
        require(min(c.engram_num_embeddings) >= rows, "engram_num_embeddings",
                f"must be at least {rows} rows a layer: n-gram sizes x heads x engram_vocab_size")  # fmt: skip
    require(c.max_position_embeddings <= 1 << 24, "max_position_embeddings", "must be <= 2^24: fp32 angles hold no more positions")
    for name in ("sliding_window", "index_topk"):
        require(getattr(c, name) <= c.max_position_embeddings, name, "must be <= max_position_embeddings")
    require(c.beta_fast > c.beta_slow, "beta_fast", "must be > beta_slow, where the YaRN ramp ends")
    require(c.image_token_id >= -1 and c.image_token_id < c.vocab_size, "image_token_id", "must be a token id, or -1 for none")
    for name in ("engram_pad_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
        require(0 <= getattr(c, name) < c.vocab_size, name, "must be a token id")
    if c.has_draft:
        n = c.num_hidden_layers
        require(c.dspark_block_size <= c.sliding_window, "dspark_block_size", "must be <= sliding_window")
        require(0 <= c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id", "must be a token id")
        require(len(c.dspark_target_layer_ids) > 0 and all(0 <= i < n for i in c.dspark_target_layer_ids),
                "dspark_target_layer_ids", f"must be layers 0..{n - 1}")  # fmt: skip
        require(c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts, "dspark_num_experts_per_tok",
                "must be <= dspark_n_routed_experts")  # fmt: skip
