"""Verification: greedy and forced rules, exactness of rejection sampling, requests that do not disturb each other."""

import functools
import re

import deviceless
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsv41_jax import speculative
from dsv41_jax.sampling import SamplingParams, pack_sampling

V, G = 6, 2


def _logits(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1.5, shape), jnp.float32)


def _one_hot(tokens):
    return 10 * jax.nn.one_hot(jnp.asarray(tokens), V)


def test_greedy_accepts_the_longest_agreeing_prefix():
    target = _one_hot([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = jnp.asarray([[1, 2], [1, 5], [5, 2], [5, 5]], jnp.int32)
    batch = pack_sampling([SamplingParams()] * 4, [0] * 4, eos=0)
    out = speculative.verify(target, drafts, _one_hot(drafts), jnp.zeros(4, jnp.int32), batch)
    assert out.accepted.tolist() == [2, 1, 0, 0]
    assert out.tokens.tolist() == [[1, 2, 3], [1, 2, 0], [1, 0, 0], [1, 0, 0]]
    assert out.finite.all()


def test_forced_accepts_everything_beside_greedy_and_sampled_rows():
    target = _one_hot([[1, 2, 3]] * 3)
    drafts = jnp.asarray([[5, 5]] * 3, jnp.int32)
    batch = pack_sampling(
        [SamplingParams(forced=True), SamplingParams(), SamplingParams(temperature=0.01, seed=1)], [0] * 3, eos=0
    )
    out = speculative.verify(target, drafts, _one_hot(drafts), jnp.zeros(3, jnp.int32), batch)
    assert out.accepted.tolist() == [2, 0, 0]
    assert out.tokens.tolist() == [[5, 5, 3], [1, 0, 0], [1, 0, 0]]


def test_a_logit_that_decides_nothing_may_be_nan():
    target = _one_hot([[1, 2, 3]] * 2).at[0, 2].set(jnp.nan).at[1, 0].set(jnp.nan)
    drafts = jnp.asarray([[5, 2], [1, 2]], jnp.int32)
    batch = pack_sampling([SamplingParams()] * 2, [0] * 2, eos=0)
    out = speculative.verify(target, drafts, _one_hot(drafts), jnp.zeros(2, jnp.int32), batch)
    assert out.finite.tolist() == [True, False]
    assert out.tokens[0].tolist() == [1, 0, 0]
    assert 0 <= int(out.tokens.min()) and int(out.tokens.max()) < V


@functools.partial(jax.jit, static_argnames="n")
def _rounds(target, draft, first, seeds, temperature, top_k, n):
    """n requests with their own seeds through draft + verify with the same logits."""
    batch = pack_sampling([SamplingParams(temperature=1.0)] * n, [0] * n, eos=0)
    batch = jax.tree.map(jnp.asarray, batch)
    import dataclasses

    batch = dataclasses.replace(batch, seed=seeds, temperature=jnp.full(n, temperature), top_k=jnp.full(n, top_k))
    t, d = (jnp.broadcast_to(x, (n, *x.shape)) for x in (target, draft))
    drafts = jnp.stack([speculative.choose_draft(d[:, i], first + i, batch) for i in range(G)], 1)
    return speculative.verify(t, drafts, d, first, batch)


def _chi_square(count, p):
    used = p > 0
    assert count[~used].sum() == 0
    expected = count.sum() * p[used]
    return ((count[used] - expected) ** 2 / expected).sum(), used.sum() - 1


def test_rejection_sampling_gives_the_target_distribution():
    """First and second output token against direct sampling; drafts from a quite different distribution."""
    n = 10000
    limits = {5: 20.5, 2: 13.8}  # chi-square, p = 0.001
    target, draft = _logits(0, G + 1, V), _logits(1, G, V)
    for temperature, top_k in ((0.8, 0), (1.0, 3)):
        out = _rounds(target, draft, jnp.full(n, 11, jnp.int32), jnp.arange(n, dtype=jnp.uint32), temperature, top_k, n)
        tokens, accepted = np.asarray(out.tokens), np.asarray(out.accepted)
        assert 0.05 < (accepted == G).mean() < 0.95 and (accepted == 0).mean() > 0.05  # both branches are exercised
        for column, rows in ((0, slice(None)), (1, accepted >= 1), (2, accepted == 2)):
            x = np.asarray(target[column], np.float64) / temperature
            p = np.exp(x - x.max())
            if top_k:
                p[np.argsort(-x, kind="stable")[top_k:]] = 0
            p /= p.sum()
            statistic, degrees = _chi_square(np.bincount(tokens[rows, column], minlength=V), p)
            assert statistic < limits[degrees], (temperature, top_k, column, statistic)


def test_equal_distributions_accept_always():
    """p == q: every draft is accepted, and an empty residual is never divided by."""
    n = 500
    target = _logits(2, G + 1, V)
    out = _rounds(target, target[:G], jnp.full(n, 3, jnp.int32), jnp.arange(n, dtype=jnp.uint32), 1.0, 0, n)
    assert (np.asarray(out.accepted) == G).mean() > 0.99
    assert out.finite.all()


def test_a_request_decides_the_same_in_any_row():
    target, draft = _logits(4, 1, G + 1, V), _logits(5, 1, G, V)
    s = SamplingParams(temperature=0.9, seed=77)

    def run(requests, row):
        n = len(requests)
        batch = pack_sampling(requests, [0] * n, eos=0)
        first = jnp.full(n, 21, jnp.int32)
        d = jnp.tile(draft, (n, 1, 1))
        drafts = jnp.stack([speculative.choose_draft(d[:, i], first + i, batch) for i in range(G)], 1)
        out = speculative.verify(jnp.tile(target, (n, 1, 1)), drafts, d, first, batch)
        return drafts[row].tolist(), out.tokens[row].tolist(), int(out.accepted[row])

    alone = run([s], 0)
    assert alone == run([SamplingParams(), SamplingParams(temperature=1.5, seed=3), s], 2)


def greedy_case(name: str):
    """`verify` of a greedy batch at released widths, for a compile without a GPU; name: "released"."""
    requests, vocabulary = 64, 129280
    batch = pack_sampling([SamplingParams()] * requests, [0] * requests, eos=1)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    run = lambda logits, drafts, first, batch: speculative.verify(logits, drafts, None, first, batch)
    return run, (jax.ShapeDtypeStruct((requests, 6, vocabulary), jnp.float32), ids(requests, 5), ids(requests), shapes)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
def test_a_greedy_batch_is_verified_in_one_pass_over_the_logits():
    compiled = deviceless.compile_for("sm_90a", "tests.test_speculative:greedy_case", "released")
    entry = compiled.hlo[compiled.hlo.index("\nENTRY") + 1 :].splitlines()[1:]
    (wide,) = [line for line in entry if "129280" in line]  # no mask of the vocabulary beside the logits
    (logits,) = re.findall(r"%(\S+) = f32\[64,6,129280\]\S* parameter", wide)
    assert sum(f"%{logits}," in line or f"%{logits})" in line for line in entry) == 1, "readers"
