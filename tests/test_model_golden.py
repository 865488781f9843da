"""The JAX model, through its caches, against the recorded outputs of DeepSeek's own code (tests/golden).

Two passes: all 48 tokens as one chunk, and a prefill of 13 followed by one token a step (the decode path).
"""

import functools

import golden_data
import numpy as np
import pytest

from dsv41_jax import checkpoint
from dsv41_jax.config import ModelConfig
from dsv41_jax.score import score

CONFIG = ModelConfig.from_file(golden_data.CHECKPOINT / "config.json")
LAYERS = range(CONFIG.num_hidden_layers)
pytestmark = pytest.mark.slow


@functools.cache
def params():
    return checkpoint.load(golden_data.CHECKPOINT, CONFIG, progress=False)


@functools.cache
def full(precision: str) -> dict[str, np.ndarray]:
    """One chunk of 48; the per-layer arrays in float32."""
    ids = golden_data.inputs()["input_ids"]
    return score(params(), CONFIG, ids, prefill=48, precision=precision, dump=precision == "float32")


@functools.cache
def stepwise(precision: str) -> dict[str, np.ndarray]:
    """13 tokens, then one a step; drafts of every anchor but in `released`, for which no bound is stated."""
    ids = golden_data.inputs()["input_ids"]
    return score(
        params(), CONFIG, ids, prefill=golden_data.PREFILL, precision=precision, drafts=precision != "released"
    )


def both_passes(precision: str):
    theirs = golden_data.load(precision)
    return [(full(precision)["logits"], theirs["logits"]), (stepwise(precision)["logits"], theirs["decode_logits"])]


def same_argmax(ours, theirs) -> float:
    return float((ours.argmax(-1) == theirs.argmax(-1)).mean())


def test_float32_logits():
    for ours, theirs in both_passes("float32"):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
        assert same_argmax(ours, theirs) == 1


def test_float32_choices_are_equal():
    """Gate experts, selected entries, candidate blocks and engram rows of every position and layer."""
    ours, theirs = full("float32"), golden_data.load("float32")
    for layer in LAYERS:
        name = f"gate_indices_{layer}"
        np.testing.assert_array_equal(np.sort(ours[name]), np.sort(theirs[name]), err_msg=name)
    for name in ("topk_2", "topk_4", "topk_6", "candidates", "engram_hash_ids"):
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_float32_streams_and_sublayers():
    ours, theirs = full("float32"), golden_data.load("float32")
    names = [f"{stem}_{i}" for stem in ("streams_out", "pre_mix_out", "attn_out", "ffn_out") for i in LAYERS]
    for name in [*names, "streams_in_0", "streams_in_1", "streams_in_4", "main_hidden"]:
        got = golden_data.at(ours[name], theirs)
        np.testing.assert_allclose(got, theirs[name], rtol=0, atol=2e-5, err_msg=name)


def test_float32_gate_weights():
    ours, theirs = full("float32"), golden_data.load("float32")
    for layer in LAYERS:
        ids, weights = f"gate_indices_{layer}", f"gate_weights_{layer}"
        mine, want = (np.take_along_axis(a[weights], a[ids].argsort(-1), -1) for a in (ours, theirs))
        np.testing.assert_allclose(mine, want, rtol=0, atol=2e-5, err_msg=weights)


def test_float32_caches():
    """What rings and pages hold after the last token, read back through the page table."""
    ours, theirs = full("float32"), golden_data.load("float32")
    names = [f"window_kv_ring_{i}" for i in LAYERS]
    for name in [*names, "compressed_kv_2", "compressed_kv_4", "index_k_2", "index_k_4"]:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=2e-5, err_msg=name)


def test_float32_drafts():
    """Golden proposals sit at every second anchor from position 14 on."""
    ours, theirs = stepwise("float32"), golden_data.load_drafts("float32")
    mine = {name: ours[name][:, 1::2] for name in ("anchor_pos", "draft_ids", "draft_logits", "draft_confidence")}
    np.testing.assert_array_equal(mine["anchor_pos"], theirs["anchor_pos"])
    np.testing.assert_array_equal(mine["draft_ids"], theirs["draft_ids"])
    np.testing.assert_allclose(mine["draft_confidence"], theirs["draft_confidence"], rtol=0, atol=1e-4)
    logits = mine["draft_logits"]
    np.testing.assert_allclose(logits[:, theirs["logit_anchors"]], theirs["draft_logits"], rtol=0, atol=2e-5)
    drafted = np.take_along_axis(logits, mine["draft_ids"][:, :, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(drafted, theirs["drafted_logits"], rtol=0, atol=2e-5)


def test_float32_cache():
    """Both passes with the cache formats: a rounding that falls the other way moves a position by up to 0.2."""
    for ours, theirs in both_passes("float32_cache"):
        off = np.abs(ours - theirs).max(-1)
        assert (off <= 1e-4).mean() >= 0.8
        assert off.max() <= 0.2
        assert same_argmax(ours, theirs) == 1
    drafts = golden_data.load_drafts("float32_cache")["draft_ids"]
    assert (stepwise("float32_cache")["draft_ids"][:, 1::2] == drafts).mean() >= 0.95


def test_released():
    """argmax on 85 % of the positions, no more: the recording rounds the accumulator of every FP8 and FP4
    product to bf16 after each 32 channels (an artefact of its emulation of the GPU kernels; tests/reference has it as
    `released_bf16_blocks`), while the specification, and this model, keep fp32 over all blocks."""
    for ours, theirs in both_passes("released"):
        assert np.isfinite(ours).all()
        assert same_argmax(ours, theirs) >= 0.85
        assert np.median(np.abs(ours - theirs)) <= 0.15
