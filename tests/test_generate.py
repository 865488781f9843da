"""Prompt in, tokens out, on a small network: batches, chunks, drafts, stops, errors."""

import functools

import numpy as np
import pytest
from dsv41_jax import checkpoint
from dsv41_jax.config import ModelConfig
from dsv41_jax.generate import generate
from dsv41_jax.sampling import SamplingParams
from reference import random_weights
from reference.geometries import GEOMETRIES

PROMPTS = [[5, 9, 200, 31], [77], list(range(3, 22))]
NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    random_weights.write_checkpoint(folder, GEOMETRIES["all_kinds"], seed=1)
    return checkpoint.load(folder, progress=False), ModelConfig.from_file(folder)


@pytest.fixture(scope="module")
def run(model):
    params, config = model

    @functools.cache
    def cached(prompts, **kwargs):
        return generate(params, config, [list(p) for p in prompts], max_new_tokens=NEW, **kwargs)

    return lambda prompts, **kwargs: cached(tuple(map(tuple, prompts)), **kwargs)


GREEDY = SamplingParams(ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)


def test_greedy_is_the_same_alone_in_a_batch_in_chunks_and_with_drafts(run):
    batch = run(PROMPTS, sampling=GREEDY, precision="float32", gamma=0)
    assert all(len(r.token_ids) == NEW and r.finish_reason == "length" for r in batch)
    alone = run(PROMPTS[2:], sampling=GREEDY, precision="float32", gamma=0)
    chunked = run(PROMPTS, sampling=GREEDY, precision="float32", chunk=3)
    assert alone[0].token_ids == batch[2].token_ids
    assert [r.token_ids for r in chunked] == [r.token_ids for r in batch]
    assert sum(r.drafted for r in chunked) > 0


def test_sampling_depends_on_the_seed_and_not_on_the_batch(run):
    first = run(PROMPTS, sampling=SAMPLED, precision="float32", chunk=3)
    params_of = (SamplingParams(temperature=0.8, top_p=0.9, seed=12, ignore_eos=True), GREEDY, SAMPLED)
    mixed = run(PROMPTS, sampling=params_of, precision="float32", chunk=3)
    assert mixed[2].token_ids == first[2].token_ids
    assert mixed[0].token_ids != first[0].token_ids
    assert mixed[1].token_ids == run(PROMPTS, sampling=GREEDY, precision="float32", chunk=3)[1].token_ids


def test_stop_ids_end_the_output_and_are_kept(run, model):
    params, config = model
    tokens = run(PROMPTS, sampling=GREEDY, precision="float32", chunk=3)[0].token_ids
    stop = tokens[4]
    stopped = SamplingParams(ignore_eos=True, stop_ids=(stop,))
    out = generate(params, config, PROMPTS, max_new_tokens=NEW, sampling=stopped, precision="float32", chunk=3)[0]
    assert out.finish_reason == "stop"
    assert out.token_ids == tokens[: tokens.index(stop) + 1]


def test_output_ends_at_the_context(run, model):
    params, config = model
    want = run(PROMPTS, sampling=GREEDY, precision="float32", chunk=3)[2].token_ids
    out = generate(params, config, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, precision="float32", chunk=3,
                   max_context=len(PROMPTS[2]) + 5)[2]  # fmt: skip
    assert (out.finish_reason, out.token_ids) == ("context", want[:5])


def test_callback_sees_every_token_in_order(model):
    params, config = model
    seen = {0: [], 1: [], 2: []}
    results = generate(params, config, PROMPTS, max_new_tokens=5, sampling=GREEDY, chunk=3, precision="float32",
                       on_token=lambda r, ids: seen[r].extend(ids))  # fmt: skip
    assert list(seen.values()) == [r.token_ids for r in results]


@pytest.mark.parametrize(
    ("prompts", "kwargs", "message"),
    [
        ([], {}, "prompts: expected at least one"),
        ([[1], []], {}, "prompt 1: expected at least one token"),
        ([[1, 320]], {}, "prompt 0: expected ids 0..319, got 320 at position 1"),
        ([[1, 318]], {}, "prompt 0: id 318 at position 1 is a reserved image id"),
        ([[1]], {"chunk": 0}, "chunk: expected >= 1"),
        ([[1] * 40], {"max_context": 40}, "prompt 0: expected fewer tokens than the context of 40"),
        ([[1]], {"max_context": 5000}, "max_context: expected 1..512"),
        ([[1]], {"gamma": 6}, "gamma: expected 0..5"),
        ([[1]], {"precision": "fp8"}, "precision: expected one of"),
        ([[1]], {"sampling": [GREEDY] * 2}, "sampling: expected one per prompt"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model, prompts, kwargs, message):
    params, config = model
    with pytest.raises(ValueError, match=message):
        generate(params, config, prompts, max_new_tokens=3, **kwargs)


def test_a_poisoned_weight_ends_the_request_with_an_error(model):
    import jax

    params, config = model
    leaves, treedef = jax.tree.flatten(params)
    poisoned = jax.tree.unflatten(treedef, leaves)
    poisoned.embed[...] = np.asarray(params.embed[...]).copy()
    poisoned.embed[...] = poisoned.embed[...].at[77].set(np.nan)
    out = generate(poisoned, config, [[77], [5, 9], [8] * 19], max_new_tokens=4, sampling=GREEDY, precision="float32", chunk=3)
    assert out[0].finish_reason == "error" and out[0].token_ids == []
    assert out[1].finish_reason == "length" and len(out[1].token_ids) == 4
