"""The JAX model against the numpy reference on geometries that the golden data lacks
(tests/reference/geometries.py)."""

import functools

import model_harness as harness
import numpy as np
import pytest
from reference.geometries import GEOMETRIES
from reference.record import model_for, record

from dsv41_jax.score import score

LENGTH, CHUNK, APART = 37, 5, 4  # odd: the last ratio-2 group stays open, the last chunk is short
BATCH = 2
pytestmark = pytest.mark.slow


def texts(length: int = LENGTH) -> np.ndarray:
    """i32[2, length], below every geometry's vocabulary; ids repeat, so that engram n-grams do too."""
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 250, (BATCH, length))
    ids[:, 20:30] = ids[:, 3:13]
    return ids.astype(np.int32)


@functools.cache
def theirs(name: str, precision: str, drafts: bool = False) -> dict[str, np.ndarray]:
    """The reference over both texts, one token at a time; a proposal before every fourth position where asked for."""
    model = model_for(GEOMETRIES[name], 0, precision)
    rows = [record(model, ids, 0 if drafts else None, anchors_apart=APART) for ids in texts()]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def ours(name: str, precision: str, length: int = LENGTH, chunk: int = CHUNK, **options) -> dict[str, np.ndarray]:
    return score(
        harness.params(name), harness.config(name), texts()[:, :length], chunk=chunk, precision=precision, **options
    )


def same_argmax(a, b) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).mean())


@pytest.mark.parametrize("name", GEOMETRIES)
def test_float32(name):
    """Logits, expert choices, selected entries and drafts, with and without context, in chunks of five."""
    # twelve layers, or sums of 512 instead of 64 terms, leave more float32 rounding than the others: 3.5e-5 was seen
    close = 5e-5 if name in ("two_full2", "released_head") else 2e-5
    got, want = ours(name, "float32", drafts=True, dump=True), theirs(name, "float32", drafts=True)
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=0, atol=close)
    c = harness.config(name)
    for layer in c.layers:
        experts = got[f"gate_indices_{layer.index}"].reshape(BATCH, LENGTH, -1)
        np.testing.assert_array_equal(np.sort(experts), np.sort(want[f"gate_indices_{layer.index}"]))
        if layer.scores:
            np.testing.assert_array_equal(got[f"topk_{layer.index}"], want[f"topk_{layer.index}"], err_msg=str(layer))
    np.testing.assert_array_equal(got["engram_hash_ids"], want["engram_hash_ids"])
    np.testing.assert_array_equal(got["candidates"], want["candidates"][..., :LENGTH])
    np.testing.assert_array_equal(got["anchor_pos"][:, ::APART], want["anchor_pos"])
    np.testing.assert_array_equal(got["draft_ids"][:, ::APART], want["draft_ids"])
    np.testing.assert_allclose(got["draft_logits"][:, ::APART], want["draft_logits"], rtol=0, atol=close)
    np.testing.assert_allclose(got["draft_confidence"][:, ::APART], want["draft_confidence"], rtol=0, atol=1e-4)


def test_candidates_bind():
    """The texts above are long enough: on both geometries the restriction removes entries that would have been
    chosen."""
    for name, source, layers in (("two_full2", 6, (8, 10, 11)), ("few_candidates", 2, (3,))):
        want = theirs(name, "float32", drafts=True)
        allowed = want["candidates"].sum(-1)
        assert (
            allowed[:, -10:] <= harness.config(name).candidate_topk_blocks * harness.config(name).candidate_block_size
        ).all()
        assert not all(np.array_equal(want[f"topk_{source}"], want[f"topk_{layer}"]) for layer in layers)


def test_candidate_switch():
    """Eight tokens are as many as the candidate blocks hold. A page table of eight takes the dense path (a
    static choice by capacity), a larger one the candidate path: the same logits, the reference's."""
    name, length = "few_candidates", 8
    c = harness.config(name)
    assert c.candidate_topk_blocks * c.candidate_block_size == length
    dense = ours(name, "float32", length, chunk=length, page_tokens=length)["logits"]
    blocks = ours(name, "float32", length, chunk=length)["logits"]
    np.testing.assert_allclose(dense, blocks, rtol=0, atol=2e-5)
    np.testing.assert_allclose(dense, theirs(name, "float32", drafts=True)["logits"][:, :length], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name,close", [("all_kinds", 0.85), ("odd_sizes", 0.65), ("two_full2", 0.4)])
def test_float32_cache(name, close):
    """A value next to a rounding boundary may fall on the other side; from there a position differs by what one
    quantised step is worth, and so may all later ones: the more layers, the fewer positions stay clear of it."""
    got, want = ours(name, "float32_cache", chunk=LENGTH)["logits"], theirs(name, "float32_cache")["logits"]
    off = np.abs(got - want).max(-1)
    assert (off <= 1e-4).mean() >= close, np.sort(off.ravel())
    assert np.median(np.abs(got - want)) <= 1e-4 * want.std()
    assert same_argmax(got, want) >= 0.95


@pytest.mark.parametrize("name", GEOMETRIES)
def test_released(name):
    """bf16 activations: float32 sums in another order flip bf16 and FP8 roundings, and these random models amplify
    a flip through loud experts to the size of the logits. So: byte for byte until the first flip (layer 0's window, and
    its output where it reads no compressed entry), then close in the median, with most argmaxes equal."""
    got, want = ours(name, "released", chunk=LENGTH, dump=True), theirs(name, "released")
    assert np.isfinite(got["logits"]).all()
    np.testing.assert_array_equal(got["window_kv_ring_0"], want["window_kv_ring_0"])
    if harness.config(name).layers[0].kind == "SWA":
        assert (got["attn_out_0"] == want["attn_out_0"]).mean() >= 0.99
    assert same_argmax(got["logits"], want["logits"]) >= 0.65
    assert np.median(np.abs(got["logits"] - want["logits"])) <= 0.15 * want["logits"].std()


def test_released_drafts():
    """Most greedy drafts are the reference's where both start from the same text."""
    got = ours("all_kinds", "released", chunk=CHUNK, drafts=True)
    want = theirs("all_kinds", "released", drafts=True)
    np.testing.assert_array_equal(got["draft_ids"][:, ::APART, 0], want["draft_ids"][..., 0])
    assert (got["draft_ids"][:, ::APART, 1] == want["draft_ids"][..., 1]).mean() >= 0.75
    first = np.abs(got["draft_logits"][:, ::APART, 0] - want["draft_logits"][:, :, 0])
    assert np.median(first) <= 0.1 * want["draft_logits"].std()
