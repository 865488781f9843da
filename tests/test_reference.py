"""The numpy reference against hand-worked values, released constants and its own invariants."""

import dataclasses
import itertools

import numpy as np
import pytest
import safetensors.numpy
from reference import codecs, ops, weights
from reference.dspark import Drafter, accepted_prefix, greedy, speculative_greedy
from reference.geometries import GEOMETRIES
from reference.model import Precision
from reference.random_weights import make, write_checkpoint
from reference.record import model_for, record

F32 = np.float32
RELEASED = {
    "qk_rope_head_dim": 64,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    "engram_layer_ids": (1, 14),
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_compressed_vocab_size": 99092,
}


def small(name="two_full2", **changes):
    return dataclasses.replace(ops.Config.from_hf(GEOMETRIES[name]), **changes)


# ---------------------------------------------------------------------------------------------------------- codecs


def test_e2m1_ties_go_to_the_even_code():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -5.0, -100.0], F32)
    np.testing.assert_array_equal(codecs.e2m1(x), [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -4, -6])
    up = np.nextafter(x[:7], F32(np.inf))
    np.testing.assert_array_equal(codecs.e2m1(up), [0.5, 1, 1.5, 2, 3, 4, 6])


def test_fp8_scale_is_the_power_of_two_that_avoids_clipping():
    x = np.zeros((3, 32), F32)
    x[0, 0], x[1, 0], x[2, 0] = 448, np.nextafter(F32(448), F32(1e9)), 1e-5
    assert codecs.qdq_fp8(x)[0, 0] == 448  # scale 1
    assert codecs.qdq_fp8(x)[1, 0] == 448  # scale 2, 224.00002 rounds to 224
    # amax is floored at 1e-4: scale 2**-22, 1e-5 * 2**22 = 41.94 rounds to 40 of (40, 44)
    assert codecs.qdq_fp8(x)[2, 0] == F32(40 * 2.0**-22)


def test_nvfp4_scale_is_rounded_to_nearest_and_clips():
    x = np.zeros(16, F32)
    x[0], x[1] = 6 * 17 / 16 - 0.01, 1.0  # amax/6 = 1.0608 rounds down to 1: x[0] clips to 6
    np.testing.assert_array_equal(codecs.qdq_nvfp4(x)[:2], [6, 1])
    assert codecs.qdq_nvfp4(np.full(16, 1e-9, F32)).max() == 0


def test_mxfp4_covers_each_group_without_clipping():
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(F32) * np.exp2(np.arange(50) - 25)[:, None].astype(
        F32
    )
    groups = codecs.qdq_mxfp4(x).reshape(50, 2, 32)
    worst = np.abs(groups - x.reshape(50, 2, 32)).max(-1) / np.abs(x.reshape(50, 2, 32)).max(-1)
    assert worst.max() <= 1 / 5 and worst.min() > 0  # half the widest step (4 to 6) over an amax of more than 5 halves


def test_packed_fp4_low_nibble_is_the_even_input():
    packed = np.array([[0x21, -1] + [0] * 14], np.int8)  # codes 1, 2, 15, 15
    scale = np.array([[2.0]], F32).astype(codecs.E8M0)
    np.testing.assert_array_equal(codecs.packed_fp4_weight(packed, scale)[0, :5], [1.0, 2.0, -12.0, -12.0, 0])


@pytest.mark.parametrize("precision", ["released", "released_bf16_blocks"])
def test_linear_accumulates_blocks_as_named(precision):
    """Block sums 256, 1 and 1: a bf16 accumulator (8 bits) drops both ones, fp32 keeps them."""
    weight = np.repeat(np.array([8.0, 1 / 32, 1 / 32], F32), 32)[None]
    assert (
        Precision(precision).linear(weight, np.ones(96, F32))[0]
        == {"released": 258, "released_bf16_blocks": 256}[precision]
    )


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="expected one of .*float32_cache.*got 'half'"):
        Precision("half")


# ------------------------------------------------------------------------------------------------- released constants


def test_released_engram_primes_and_multipliers():
    c = small(**RELEASED)
    primes = ops.engram_primes(c)
    assert primes[0][0][:3] == [16000057, 16000079, 16000081] and primes[0][2][-1] == 16000463
    assert primes[1][0][0] == 16000477 and primes[1][2][-1] == 16000889
    assert [sum(map(sum, layer)) for layer in primes] == [384006168, 384016682]
    assert ops.engram_multipliers(c) == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_released_yarn_ramp_runs_from_15_to_25():
    c = small(**RELEASED)
    stretched = ops.rope_frequencies(c, 2) / ops.rope_frequencies(dataclasses.replace(c, rope_theta=160000.0), 0)
    np.testing.assert_allclose(stretched[:16], 1, rtol=1e-6)
    np.testing.assert_allclose(stretched[25:], 1 / 16, rtol=1e-6)
    np.testing.assert_allclose(stretched[20], 0.5 + 0.5 / 16, rtol=1e-6)
    np.testing.assert_allclose(ops.rope_frequencies(c, 0)[[0, 16]], [1, 0.01], rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- ops


def test_rotation_undoes_itself_and_leaves_the_front():
    x = np.random.default_rng(0).standard_normal((3, 96)).astype(F32)
    f = ops.rope_frequencies(small(), 1)
    turned = ops.rotate(x, 77, f)
    np.testing.assert_array_equal(turned[:, :64], x[:, :64])
    np.testing.assert_allclose(
        turned[:, 64] + 1j * turned[:, 65], (x[:, 64] + 1j * x[:, 65]) * np.exp(77j * f[0]), rtol=1e-5
    )
    np.testing.assert_allclose(ops.rotate(turned, 77, f, inverse=True), x, atol=1e-6)


def test_sinkhorn_is_doubly_stochastic_and_reads_comb_by_rows():
    c, rng = small(), np.random.default_rng(0)
    streams = rng.standard_normal((4, 64)).astype(F32)
    fn = rng.standard_normal((24, 256)).astype(F32) * F32(0.05)
    base = np.zeros(24, F32)
    base[8 + 4 * 1 + 3] = 4.0  # from stream 1 to stream 3
    pre, post, comb = ops.hyper_coefficients(streams, fn, base, np.full(3, 0.5, F32), c)
    np.testing.assert_allclose(comb.sum(0), 1, atol=1e-5)
    np.testing.assert_allclose(comb.sum(1), 1, atol=1e-2)
    assert comb[1].argmax() == 3 and comb[1, 3] > 0.5
    assert ((0 < pre) & (pre < 1.001)).all() and ((0 < post) & (post < 2)).all()


def test_attention_sink_and_empty_cases():
    q = np.ones((2, 4), F32)
    sink = np.array([0.0, 3.0], F32)
    np.testing.assert_array_equal(ops.attend(q, np.zeros((0, 4), F32), sink, np.asarray), np.zeros((2, 4)))
    key = np.array([[1, 2, 3, 4]], F32)  # logit 10/2 = 5
    out = ops.attend(q, key, sink, np.asarray)
    np.testing.assert_allclose(out, key * (np.exp(5) / (np.exp(5) + np.exp(sink)))[:, None], rtol=1e-6)
    many = np.random.default_rng(0).standard_normal((200, 4)).astype(F32)
    p = np.exp(q @ many.T / 2)
    want = p @ many / (p.sum(1) + np.exp(sink))[:, None]
    np.testing.assert_allclose(ops.attend(q, many, sink, np.asarray), want, rtol=1e-4, atol=1e-6)


def test_selection_ties_and_missing_entries():
    scores = np.array([1, 3, 3, 3, 0], F32)
    allowed = np.array([1, 1, 1, 1, 1], bool)
    np.testing.assert_array_equal(ops.select_entries(scores, allowed, 2), [1, 2])
    allowed[1] = False
    np.testing.assert_array_equal(ops.select_entries(scores, allowed, 3), [0, 2, 3])
    np.testing.assert_array_equal(ops.select_entries(scores, allowed, 6), [0, 2, 3, 4, -1, -1])
    np.testing.assert_array_equal(ops.select_entries(np.zeros(0, F32), np.zeros(0, bool), 2), [-1, -1])


def test_candidates_keep_the_newest_block_first():
    c = small(candidate_block_size=2, candidate_topk_blocks=2)
    scores = np.array([9, 9, 1, 5, 9, 2, -7], F32)  # blocks 9, 5, 9, -7 (half filled, newest)
    np.testing.assert_array_equal(ops.candidate_mask(scores, c), [1, 1, 0, 0, 0, 0, 1, 1])  # a tie of 0 and 2: block 0


def test_routing_weights_are_unbiased_and_scaled():
    gate = np.array([[-40.0], [90.0], [1.0], [1.0]], F32)
    ids, w = ops.route(np.ones(1, F32), gate, np.array([20, 0, 0, 0], F32), 3, 1.5)
    assert list(ids) == [0, 1, 2]  # the bias lifts expert 0; experts 2 and 3 tie
    score = np.sqrt(np.log1p(np.exp(np.array([-40.0, 90.0, 1.0]))))
    np.testing.assert_allclose(w, 1.5 * score / score.sum(), rtol=1e-5)


def test_engram_rows_pad_before_the_start():
    rows = ops.engram_rows([5], 3, [7, 11, 13], [[17, 19], [23, 29]])
    bigram = 5 * 7 ^ 3 * 11
    trigram = bigram ^ 3 * 13
    assert rows == [bigram % 17, bigram % 19 + 17, trigram % 23 + 36, trigram % 29 + 59]


# ------------------------------------------------------------------------------------------------- whole small models


def test_checkpoint_round_trip(tmp_path):
    folder = write_checkpoint(tmp_path / "c", GEOMETRIES["odd_sizes"], seed=3)
    made, read = make(GEOMETRIES["odd_sizes"], seed=3), weights.read_safetensors(folder / "model.safetensors")
    assert list(made) == list(read)
    for name, array in made.items():
        assert array.dtype == read[name].dtype and array.tobytes() == read[name].tobytes(), name
    with safetensors.safe_open(folder / "model.safetensors", "numpy") as f:
        assert set(f.keys()) == set(made)
        np.testing.assert_array_equal(f.get_tensor("layers.0.hc_attn_fn"), made["layers.0.hc_attn_fn"])


def test_two_full2_reads_the_right_sources():
    """Each layer's indices come from its own source, and REINDEX layers stay inside the candidates once those bind."""
    model = model_for(GEOMETRIES["two_full2"], 0, "float32")
    out = record(model, np.random.default_rng(1).integers(0, 320, 40))
    assert not np.array_equal(out["topk_2"], out["topk_4"])
    for layer in (8, 10, 11):
        for mask, picked in zip(out["candidates"], out[f"topk_{layer}"]):
            assert mask[picked[picked >= 0]].all()
    assert (out["candidates"].sum(1) == 16).sum() >= 20  # 4 blocks of 4 out of up to 40
    free = [(~out["candidates"][t][out["topk_6"][t]]).any() for t in range(20, 40)]
    assert any(free)  # the source itself is not restricted
    assert out["compressed_kv_2"].shape == (20, 64) and out["compressed_kv_6"].shape == (40, 64)


def test_few_candidates_end_in_minus_one():
    model = model_for(GEOMETRIES["few_candidates"], 0, "float32")
    out = record(model, np.random.default_rng(1).integers(0, 320, 24))
    missing = (out["topk_3"] == -1).sum(1)
    np.testing.assert_array_equal(missing[8:], [3 - t % 4 for t in range(8, 24)])
    assert (out["topk_2"][8:] >= 0).all()


@pytest.mark.parametrize("precision", ["float32", "released"])
def test_odd_prompts_leave_one_token_pending(precision):
    """A prompt stopped at an odd length goes on as if it had not stopped; a copy of its state lives on its own."""
    model = model_for(GEOMETRIES["released_head"], 0, precision)
    ids = np.random.default_rng(2).integers(0, 320, 21)
    whole = np.stack([o.logits for o in model.run(ids)])
    state = model.new_state()
    model.run(ids[:7], state)
    assert state.layers[1].pending is not None and len(state.layers[1].compressed) == 3
    other = state.copy()
    model.run([1, 2, 3], other)
    rest = np.stack([o.logits for o in model.run(ids[7:], state)])
    np.testing.assert_array_equal(rest, whole[7:])
    assert np.abs(whole).max() < 30 and whole.std() > 0.3


@pytest.mark.parametrize(
    "name,precision", [*itertools.product(["few_candidates", "odd_sizes"], ["float32", "released"])]
)
def test_speculation_changes_nothing(name, precision):
    model = model_for(GEOMETRIES[name], 4, precision)
    prompt = [5, 9, 200, 11, 7]
    want = greedy(model, prompt, 16)
    size = model.c.dspark_block_size
    assert speculative_greedy(model, prompt, 16, size)[0] == want
    rng = np.random.default_rng(0)

    def partly_right(windows, anchor, position):
        """The first rng.integers drafts are the target's own choices, the next one is not."""
        right = rng.integers(0, size + 1)
        at = position - len(prompt) + 1
        drafts = (want + [0] * (size + 1))[at : at + size]
        return [d if i != right else (d + 1) % model.c.vocab_size for i, d in enumerate(drafts)]

    tokens, accepted = speculative_greedy(model, prompt, 16, size, partly_right)
    assert tokens == want
    assert len(set(accepted)) >= 3


def test_accepted_prefix():
    assert accepted_prefix([1, 2, 3], [1, 2, 9, 4]) == 2
    assert accepted_prefix([1, 2], [1, 2, 3]) == 2
    assert accepted_prefix([], [7]) == 0


def test_proposal_without_context_and_after_the_window_wraps():
    """The first proposal sees only its own block; a draft depends on nothing older than the window."""
    model = model_for(GEOMETRIES["odd_sizes"], 0, "float32")
    drafter = Drafter(model)
    alone = drafter.propose(drafter.new_windows(), 3, 0)
    assert np.isfinite(alone.logits).all() and len(alone.ids) == 3
    features = np.random.default_rng(0).standard_normal((9, 2 * 96)).astype(F32)
    all_nine, last_five = drafter.new_windows(), drafter.new_windows()
    for position in range(9):
        drafter.commit(all_nine, features[position], position)
        if position >= 4:
            drafter.commit(last_five, features[position], position)
    a, b = (drafter.propose(w, 3, 9) for w in (all_nine, last_five))
    np.testing.assert_array_equal(a.logits, b.logits)
    assert np.abs(a.logits - alone.logits).max() > 1e-3
