"""Config: both spellings, the released values, the schedule, and geometries that cannot work."""

import dataclasses
import json

import pytest
from golden_data import CHECKPOINT

from dsv41_jax.config import ModelConfig
from dsv41_jax.presets import FLASH, PRESETS, TINY
from dsv41_jax.schedule import ConfigError
from dsv41_jax.tensors import released_tensors

# the reference's inference/config.json of the release, text fields (spec/model.md section 1, second column)
FLAT = {
    "vocab_size": 129280, "dim": 5120, "moe_inter_dim": 2304, "n_layers": 40, "n_mtp_layers": 3, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_n_activated_experts": 3, "n_heads": 64, "n_routed_experts": 384,
    "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus", "route_scale": 1.5, "swiglu_limit": 10.0,
    "q_lora_rank": 1280, "head_dim": 512, "rope_head_dim": 64, "norm_eps": 1e-20, "o_groups": 8, "o_lora_rank": 1024,
    "window_size": 128, "kv_source_layers": [2, 8, 14, 20], "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "original_seq_len": 65536, "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 512, "candidate_source_layer": 20, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16000000, "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
    "engram_pad_id": 2, "engram_compressed_vocab_size": 99092, "dtype": "fp8", "expert_dtype": "fp4",
    "compress_rope_theta": 160000, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0], "vision_n_layers": 32,
    "image_token_id": 129264, "engram_n_heads": 8, "engram_head_dim": 256,
}  # fmt: skip


def test_the_flat_spelling_gives_the_flash_preset():
    assert ModelConfig.from_dict(FLAT) == FLASH


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_nested_spelling_comes_back(name):
    config = PRESETS[name]
    raw = json.loads(json.dumps(config.to_dict()))
    assert "text_config" in raw and "rope_scaling" in raw["text_config"]
    assert ModelConfig.from_dict(raw) == config


def test_the_golden_config_is_read():
    c = ModelConfig.from_file(CHECKPOINT)
    assert c == ModelConfig.from_file(CHECKPOINT / "config.json")
    assert (c.hidden_size, c.sliding_window, c.rope_factor, c.original_max_position_embeddings) == (128, 8, 16.0, 32)
    kinds = [s.kind for s in c.layers]
    assert kinds == ["SWA", "SWA", "FULL2", "REUSE", "FULL1", "REUSE", "REINDEX", "REUSE"]


def test_the_released_schedule():
    """Layer by layer as spec/model.md section 1 and spec/decode.md section 0 have it."""
    kinds = {"SWA": {0, 1}, "FULL2": {2, 8, 14}, "FULL1": {20}, "REINDEX": {24, 28, 32, 36}}
    for s in FLASH.layers:
        expected = next((kind for kind, ids in kinds.items() if s.index in ids), "REUSE")
        assert s.kind == expected, s
        assert s.ratio == (0 if s.index < 2 else 2 if s.index < 20 else 1)
        assert s.owns_kv == (s.index in (2, 8, 14, 20))
        assert s.publishes_candidates == (s.index == 20)
        assert s.restricted == (s.index in (24, 28, 32, 36))
        assert s.engram == {1: 0, 14: 1}.get(s.index)
        assert s.feature == {37: 0, 38: 1, 39: 2}.get(s.index)
    assert [s.kv_source for s in FLASH.layers] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [s.index_source for s in FLASH.layers[20:]] == [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [(s.index, s.kind, s.ratio) for s in FLASH.draft_layers] == [(40, "SWA", 0), (41, "SWA", 0), (42, "SWA", 0)]


def test_the_released_checkpoint_has_the_published_tensors_and_bytes():
    """spec/model.md section 13: counts, and bytes per type (bias_vl is F32 and not listed here: 4 B a routed expert)."""
    tensors = [t for source in released_tensors(FLASH).values() for t in source.tensors()]
    routers = 40 + 3
    assert len({t.name for t in tensors}) == len(tensors) == 93_415 + 2_401 + 3 - routers
    widths = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "F32": 4}
    sums = dict.fromkeys(widths, 0)
    for t in tensors:
        if t.dtype in widths:
            size = widths[t.dtype]
            for n in t.shape:
                size *= n
            sums[t.dtype] += size
    assert sums["F32"] + 4 * (40 * 384 + 3 * 128) == 169_229_128
    assert sums["I8"] == 278_585_671_680
    assert sums["F8_E4M3"] == 204_015_223_296
    assert sums["F8_E8M0"] == 23_563_015_184


IMPOSSIBLE = [
    # field blamed, changes, rule
    ("compress_ratios", {"compress_ratios": (0, 0, 2)}, "must have 11 entries"),
    ("compress_ratios", {"compress_ratios": (0, 0, 3, 2, 1, 1, 1, 1, 0, 0, 0)}, "must be 0, 1 or 2"),
    ("compress_ratios", {"compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 1)}, "draft stages must have ratio 0"),
    ("compress_ratios", {"compress_ratios": (0, 0, 2, 1, 1, 1, 1, 1, 0, 0, 0)}, "layer 3 has ratio 1, its KV source 2 has 2"),
    ("kv_source_layer_ids", {"kv_source_layer_ids": (4,), "index_source_layer_ids": (4, 6)}, "layer 2 has ratio 2 and no source"),
    ("kv_source_layer_ids", {"kv_source_layer_ids": (4, 2)}, "ascending, distinct layers 0..7"),
    ("kv_source_layer_ids", {"kv_source_layer_ids": (2, 4, 9)}, "ascending, distinct layers 0..7"),
    ("kv_source_layer_ids", {"index_source_layer_ids": (2, 6)}, r"layers \[4\] must be index sources too"),
    ("index_source_layer_ids", {"index_source_layer_ids": (1, 2, 4)}, "layer 1 has ratio 0"),
    ("candidate_source_layer_id", {"candidate_source_layer_id": 6}, "must be one of kv_source_layer_ids"),
    ("candidate_source_layer_id", {"candidate_source_layer_id": 2}, "must be a layer of ratio 1"),
    ("engram_layer_ids", {"engram_layer_ids": (1, 1)}, "ascending, distinct"),
    ("engram_num_embeddings", {"engram_num_embeddings": (5,)}, "one entry per engram layer"),
    ("dspark_target_layer_ids", {"dspark_target_layer_ids": (5, 6, 8)}, "layers 0..7"),
    ("dspark_target_layer_ids", {"dspark_target_layer_ids": ()}, "must be layers"),
    ("dspark_noise_token_id", {"dspark_noise_token_id": 512}, "must be a token id"),
    ("hidden_size", {"hidden_size": 100}, "multiple of 32"),
    ("head_dim", {"head_dim": 48}, "multiple of 32"),
    ("o_groups", {"o_groups": 3}, "must divide num_attention_heads"),
    ("qk_rope_head_dim", {"qk_rope_head_dim": 96}, "must fit in head_dim"),
    ("qk_rope_head_dim", {"qk_rope_head_dim": 31}, "must be even"),
    ("num_experts_per_tok", {"num_experts_per_tok": 17}, "must be <= n_routed_experts"),
    ("dspark_num_experts_per_tok", {"dspark_num_experts_per_tok": 9}, "must be <= dspark_n_routed_experts"),
    ("vocab_size", {"vocab_size": 0}, "must be positive"),
    ("rope_theta", {"rope_theta": 0.0}, "must be positive and finite"),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}, "must be positive and finite"),
    ("routed_scaling_factor", {"routed_scaling_factor": float("inf")}, "must be positive and finite"),
    ("engram_max_ngram_size", {"engram_max_ngram_size": 1}, "at least 2"),
    ("engram_num_embeddings", {"engram_max_ngram_size": 10**6}, "at least 359999640 rows a layer"),
    ("engram_pad_token_id", {"engram_pad_token_id": 600}, "must be a token id"),
    ("image_token_id", {"image_token_id": 512}, "must be a token id, or -1"),
    ("image_token_id", {"image_token_id": -2}, "must be a token id, or -1"),
    ("beta_fast", {"beta_fast": 1.0}, "must be > beta_slow"),
    ("max_position_embeddings", {"max_position_embeddings": 2**24 + 1}, "must be <= 2\\^24"),
    ("sliding_window", {"sliding_window": 4097}, "must be <= max_position_embeddings"),
    ("index_topk", {"index_topk": 4097}, "must be <= max_position_embeddings"),
    ("dspark_block_size", {"dspark_block_size": 17}, "must be <= sliding_window"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "changes", "rule"), IMPOSSIBLE, ids=lambda v: v if isinstance(v, str) else None)
def test_impossible_geometries_name_the_field_the_value_and_the_rule(field, changes, rule):
    with pytest.raises(ConfigError, match=rule) as e:
        dataclasses.replace(TINY, **changes)
    assert e.value.field == field
    assert repr(e.value.value) in str(e.value)


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"hidden_act": "gelu"}, "hidden_act", "must be 'silu'"),
        ({"scoring_func": "sigmoid"}, "scoring_func", "must be 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob", "must be True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "must be False"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "must be 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, "rope_scaling.rope_type", "must be 'yarn'"),
        ({"hidden_size": 5120.5}, "hidden_size", "must be int"),
        ({"hidden_size": "wide"}, "hidden_size", "must be int"),
        ({"hidden_size": float("inf")}, "hidden_size", "must be int"),
        ({"rope_theta": 10**400}, "rope_theta", "must be float"),
        ({"compress_ratios": 3}, "compress_ratios", "must be tuple"),
        ({"compress_ratios": "002"}, "compress_ratios", "must be tuple"),
        ({"compress_ratios": [0.5] * 43}, "compress_ratios", "must be tuple"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "must be an object"),
        ({"vocab_size": True}, "vocab_size", "must be int"),
    ],
)
def test_other_networks_and_wrong_types_are_refused(change, field, rule):
    raw = FLASH.to_dict()
    raw["text_config"] |= change
    with pytest.raises(ConfigError, match=rule) as e:
        ModelConfig.from_dict(raw)
    assert e.value.field == field


def test_a_text_config_that_is_no_object():
    with pytest.raises(ConfigError, match="text_config = .*must be an object"):
        ModelConfig.from_dict({"text_config": [1]})


def test_missing_sizes_are_all_named():
    raw = FLASH.to_dict()
    del raw["text_config"]["hidden_size"], raw["text_config"]["q_lora_rank"]
    with pytest.raises(ConfigError, match="hidden_size, q_lora_rank"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("text", [b"{", b"[1]", b"", b"\xff", b"[" * 100_000], ids=["open", "list", "empty", "bytes", "deep"])
def test_files_that_are_no_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match="config.json"):
        ModelConfig.from_file(tmp_path)


def test_a_config_without_a_drafter():
    c = dataclasses.replace(TINY, num_nextn_predict_layers=0, compress_ratios=TINY.compress_ratios[:8])
    assert not c.has_draft and c.draft_layers == ()
    assert not any(s.feature is not None for s in c.layers)
    assert not any(name.startswith("draft") for name in released_tensors(c))
