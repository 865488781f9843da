"""The numpy reference against the recorded outputs of DeepSeek's own code (tests/golden)."""

import functools

import golden_data
import numpy as np
import pytest
from reference.model import Model
from reference.ops import Config, engram_multipliers, engram_primes
from reference.record import record
from reference.weights import Weights, read_safetensors

CONFIG = Config.from_hf(golden_data.config())
FIRST_ANCHOR = 14  # golden proposals sit at every second position from here on
CUT = (
    "streams_out_",
    "streams_in_0",
    "streams_in_1",
    "streams_in_4",
    "pre_mix_out_",
    "attn_out_",
    "ffn_out_",
    "main_hidden",
)


@functools.cache
def weights() -> Weights:
    return Weights(read_safetensors(golden_data.WEIGHTS))


@functools.cache
def ours(precision: str) -> dict[str, np.ndarray]:
    """All three prompts through the reference: arrays with a leading batch axis."""
    model = Model(weights(), CONFIG, np.load(golden_data.CHECKPOINT / "engram_token_map.npy"), precision)
    rows = [record(model, ids, FIRST_ANCHOR, anchors_apart=2) for ids in golden_data.inputs()["input_ids"]]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def worst_per_position(ours, theirs):
    """[B, L, V] twice -> [B, L]: the largest difference of a logit."""
    return np.abs(ours - theirs).max(-1)


def same_argmax(ours, theirs):
    return (ours.argmax(-1) == theirs.argmax(-1)).mean()


def by_position(name, array):
    """Golden gate arrays come as [B*L, k]."""
    return array.reshape(3, 48, -1) if name.startswith("gate_") else array


def test_engram_constants_are_the_recorded_ones():
    given = golden_data.inputs()
    np.testing.assert_array_equal(engram_primes(CONFIG), given["engram_primes"])
    np.testing.assert_array_equal(engram_multipliers(CONFIG), given["engram_multipliers"])


@pytest.mark.parametrize("precision", ["float32", "float32_cache"])
@pytest.mark.parametrize("which", ["logits", "decode_logits"])
def test_float32_logits(precision, which):
    theirs = golden_data.load(precision)[which]
    off = worst_per_position(ours(precision)["logits"], theirs)
    if precision == "float32":
        assert off.max() <= 2e-5
    else:
        assert (off <= 1e-4).mean() >= 0.8 and off.max() <= 0.2
    assert same_argmax(ours(precision)["logits"], theirs) == 1


@pytest.mark.parametrize("precision", ["float32", "float32_cache"])
def test_discrete_choices_are_equal(precision):
    theirs, mine = golden_data.load(precision), ours(precision)
    names = [n for n in theirs if n.startswith(("topk_", "gate_indices_")) or n in ("candidates", "engram_hash_ids")]
    assert len(names) == 3 + 8 + 2
    for name in names:
        np.testing.assert_array_equal(mine[name], by_position(name, theirs[name]), err_msg=name)


def test_float32_activations_and_caches():
    theirs, mine = golden_data.load("float32"), ours("float32")
    compared = 0
    for name, want in theirs.items():
        if name.startswith(CUT):
            got = golden_data.at(mine[name], theirs)
        elif name.startswith(("gate_weights_", "compressed_kv_", "index_k_", "window_kv_ring_")):
            got, want = mine[name], by_position(name, want)
        else:
            continue
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5, err_msg=name)
        compared += 1
    assert compared == 8 * 4 + 3 + 1 + 8 + 2 + 2 + 8


@pytest.mark.parametrize("precision", ["float32_cache", "released"])
def test_caches_hold_quantised_values(precision):
    """Cache entries of the first layers agree bit for bit but for a few roundings near a midpoint."""
    theirs = golden_data.load(precision)
    mine = ours("released_bf16_blocks" if precision == "released" else precision)
    for name in ("window_kv_ring_0", "window_kv_ring_2", "compressed_kv_2", "index_k_2"):
        np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=1.0, err_msg=name)
        close = np.isclose(mine[name], theirs[name], rtol=1e-5, atol=1e-6)
        assert close.mean() >= 0.995, name


@pytest.mark.parametrize("precision", ["float32", "float32_cache"])
def test_drafts(precision):
    theirs, mine = golden_data.load_drafts(precision), ours(precision)
    np.testing.assert_array_equal(mine["anchor_pos"], theirs["anchor_pos"])
    np.testing.assert_array_equal(mine["draft_ids"], theirs["draft_ids"])
    np.testing.assert_allclose(mine["draft_confidence"], theirs["draft_confidence"], rtol=0, atol=1e-4)
    logits = mine["draft_logits"]
    np.testing.assert_allclose(logits[:, theirs["logit_anchors"]], theirs["draft_logits"], rtol=0, atol=2e-5)
    drafted = np.take_along_axis(logits, mine["draft_ids"][:, :, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(drafted, theirs["drafted_logits"], rtol=0, atol=2e-5)


def test_draft_stages_of_the_last_proposal():
    """The proposal made after position 46, stage by stage, and the draft windows it reads."""
    theirs = golden_data.load_drafts("float32")
    model = Model(weights(), CONFIG, np.load(golden_data.CHECKPOINT / "engram_token_map.npy"), "float32")
    for row, ids in enumerate(golden_data.inputs()["input_ids"]):
        mine = record(model, ids, first_anchor=47)
        names = [n for n in theirs if n.startswith("last_")]
        assert len(names) == 3 * 6 + 1
        for name in names:
            got = mine["draft_" + name.removeprefix("last_")][0]
            want = theirs[name].reshape(3, 5, *theirs[name].shape[1:] if "gate" in name else theirs[name].shape[2:])[
                row
            ]
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5, err_msg=name)
        for stage in range(3):
            want = theirs[f"mtp{stage}_window_kv_ring_final"][row]
            got = mine[f"mtp{stage}_window_kv_ring"]
            others = np.arange(8) != 47 % 8  # slot 7 has been overwritten by position 47 by now
            np.testing.assert_allclose(got[others], want[others], rtol=0, atol=2e-5)


def test_released_rounding_is_the_recorded_one():
    """With the recording's bf16 block accumulator the first layers' attention agrees bit for bit; later layers differ by
    fp32 summation order amplified through quantisation only."""
    theirs, mine = golden_data.load("released"), ours("released_bf16_blocks")
    for layer in (0, 1):
        got = golden_data.at(mine[f"attn_out_{layer}"], theirs)
        np.testing.assert_array_equal(got, theirs[f"attn_out_{layer}"])
    assert np.median(worst_per_position(mine["logits"], theirs["logits"])) < 0.1
    for which in ("logits", "decode_logits"):
        assert same_argmax(mine["logits"], theirs[which]) >= 0.95
    drafts = golden_data.load_drafts("released")
    assert (mine["draft_ids"] == drafts["draft_ids"]).all(-1).mean() >= 0.85


def test_released_as_specified_is_near_the_recording():
    """The specified fp32 block accumulator is another rounding than the recording's: same network, other noise."""
    theirs, mine = golden_data.load("released"), ours("released")
    assert same_argmax(mine["logits"], theirs["logits"]) >= 0.8
    assert same_argmax(mine["logits"], ours("float32")["logits"]) >= 0.7
    assert np.median(np.abs(mine["logits"] - theirs["logits"])) < 0.15
    assert (mine["logits"] != theirs["logits"]).mean() > 0.5  # or the two accumulators were the same after all
