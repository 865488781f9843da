"""Sampling: parameters, the target distribution against numpy, random numbers that belong to a request."""

import jax.numpy as jnp
import numpy as np
import pytest
from dsv41_jax import sampling
from dsv41_jax.sampling import ACCEPT, DRAFT, TARGET, SamplingParams, pack_sampling
from pallas_kernels.ordering import argmax


def _numpy_target(logits, s: SamplingParams):
    """Serving order, one row, float64: /temperature, min-p, top-k, top-p, softmax; lowest id first among equals."""
    x = logits.astype(np.float64) / s.temperature
    p = np.exp(x - x.max())
    keep = p >= s.min_p * p.max() if s.min_p else np.ones_like(p, bool)
    order = np.lexsort((np.arange(len(x)), -np.where(keep, x, -np.inf)))
    if s.top_k:
        keep[order[s.top_k :]] = False
    p = np.where(keep, p, 0) / np.where(keep, p, 0).sum()
    mass = 0.0
    for token in order:
        if mass >= s.top_p - 1e-12:
            keep[token] = False
        mass += p[token]
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "s",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(temperature=0.9, min_p=0.2),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.8, min_p=0.02),
    ],
)
def test_target_distribution_equals_numpy(s):
    logits = np.random.default_rng(3).normal(0, 2, (2, 3, 50)).astype(np.float32)
    logits[0, 0, 10:14] = logits[0, 0].max() + 1  # ties at the top: the lowest ids stay
    got = np.exp(sampling.target_log_probs(jnp.asarray(logits), pack_sampling([s, s], [0, 0], eos=1)))
    want = np.stack([[_numpy_target(row, s) for row in request] for request in logits])
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("temperature", [2e-38, 1e-6, 3e38])
def test_extreme_temperatures_give_a_distribution(temperature):
    """Next to 0 it is the arg max, far up it is uniform; never NaN, also where logits divided by it overflow."""
    s = SamplingParams(temperature=temperature)
    logits = jnp.asarray([[[30.0, 31.0, -40.0, 29.0]]])
    p = np.exp(sampling.target_log_probs(logits, pack_sampling([s], [0], eos=1)))[0, 0]
    np.testing.assert_allclose(p, [0, 1, 0, 0] if temperature < 1 else [0.25] * 4, atol=1e-6)


def test_ties_at_the_top_k_cut_keep_the_lowest_ids():
    s = SamplingParams(temperature=1.0, top_k=3)
    p = np.exp(sampling.target_log_probs(jnp.zeros((1, 1, 9)), pack_sampling([s], [0], eos=1)))
    assert list(np.flatnonzero(p[0, 0])) == [0, 1, 2]


def test_bias_and_banned_ends_reach_only_their_request():
    a = SamplingParams(logit_bias=((4, 3.0), (5, -np.inf)), min_tokens=2, stop_ids=(7,))
    batch = pack_sampling([a, SamplingParams()], [10, 10], eos=1, bias_width=2)
    positions = jnp.asarray([[11, 12], [11, 12]])
    got = np.asarray(sampling.adjust_logits(jnp.zeros((2, 2, 9)), positions, batch))
    assert got[0, 0, 4] == 3 and got[0, 0, 5] == -np.inf
    # positions 10 and 11 are the first two tokens: no end id there
    assert np.all(got[0, 0, [1, 7]] == -np.inf) and np.all(got[0, 1, [1, 7]] == 0)
    assert np.all(got[1] == 0)


def test_random_numbers_are_a_function_of_seed_position_purpose():
    one = np.asarray(sampling.uniforms(jnp.asarray([7], jnp.uint32), jnp.asarray([[5, 6, 7]]), ACCEPT))
    other_row = np.asarray(sampling.uniforms(jnp.asarray([1, 7], jnp.uint32), jnp.asarray([[9, 9], [6, 5]]), ACCEPT))
    assert one[0, 1] == other_row[1, 0] and one[0, 0] == other_row[1, 1]
    draws = {float(sampling.uniforms(jnp.asarray([7], jnp.uint32), jnp.asarray([[5]]), p)[0, 0]) for p in (DRAFT, ACCEPT, TARGET)}
    assert len(draws) == 3 and all(0 < d < 1 for d in draws)


def test_categorical_follows_its_weights():
    weights = np.array([0.5, 0.0, 0.2, 0.3])
    n = 4000
    with np.errstate(divide="ignore"):
        log = jnp.broadcast_to(jnp.asarray(np.log(weights), jnp.float32), (n, 4))
    drawn = sampling.categorical(log, jnp.full((n,), 3, jnp.uint32), jnp.arange(n), TARGET)
    count = np.bincount(np.asarray(drawn), minlength=4)
    assert count[1] == 0
    expected = n * weights[[0, 2, 3]]
    assert ((count[[0, 2, 3]] - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees, p = 0.001


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0),
     ("temperature", 1e39), ("temperature", "hot"), ("top_k", 1.5), ("top_k", 2**31), ("min_p", True),
     ("seed", -1), ("min_tokens", -1), ("logit_bias", ((3, float("nan")),)), ("logit_bias", (5,)), ("logit_bias", {5: 1.0}),
     ("stop_ids", 5), ("stop_ids", ("a",)), ("stop_ids", (5.0,)), ("ignore_eos", "no")],
)  # fmt: skip
def test_bad_parameters_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"sampling: {field} expected"):
        SamplingParams(**{field: value})


def test_defaults_come_from_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "do_sample": true}')
    assert SamplingParams.from_folder(tmp_path) == SamplingParams(temperature=0.6, top_p=0.95)
    assert SamplingParams.from_folder(tmp_path, temperature=0.0).greedy
    assert SamplingParams.from_folder(tmp_path / "none") == SamplingParams()


def test_too_many_biases_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="row 0 expected"):
        pack_sampling([SamplingParams(logit_bias=((1, 1.0),))], [0], eos=1, bias_width=0)


def test_argmax_takes_the_first_of_equals_and_of_nan_and_sees_what_is_not_finite():
    rng = np.random.default_rng(2)
    logits = rng.integers(-3, 4, (7, 2, 700)).astype(np.float32)
    logits[1, 0, 50:] = logits[1, 1, 600] = np.nan
    logits[2, 0, 9], logits[2, 1, 9] = np.inf, -np.inf
    logits[3] = -np.inf
    logits[4, 0], logits[4, 0, 5], logits[4, 0, 4] = -0.0, 0.0, -np.inf
    banned = logits.copy()
    banned[5, 0, logits[5, 0] == 3] = banned[1, 1, 600] = -np.inf
    got, finite = argmax(jnp.asarray(banned), jnp.isfinite(jnp.asarray(logits)))
    np.testing.assert_array_equal(got, np.argmax(banned, -1))  # numpy takes the first NaN too
    np.testing.assert_array_equal(finite, np.isfinite(logits).all(-1))
    assert got.dtype == jnp.int32 and got[1, 0] == 50 and got[4, 0] == 0


def test_end_ids_are_banned_until_their_position_and_ids_outside_are_none():
    requests = [SamplingParams(min_tokens=2, stop_ids=(9, 49)), SamplingParams(ignore_eos=True)]
    batch = pack_sampling(requests, [10, 10], eos=3)
    batch.end_ids[1, :2] = 50, -1
    positions = jnp.asarray([[11, 12], [0, 0]], jnp.int32)
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (2, 2, 50)), jnp.float32)
    got = np.asarray(sampling.adjust_logits(logits, positions, batch))
    want = np.array(logits)
    want[0, 0, [3, 9, 49]] = -np.inf
    np.testing.assert_array_equal(got, want)
