"""The engine over four CPU devices (DP4/EP4): pytest functions that tests/test_sharding.py runs in a process of their own."""

import dataclasses

import jax
import numpy as np
import pytest

from dsv41_jax import checkpoint
from dsv41_jax.engine import Engine
from dsv41_jax.generate import generate
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.presets import TINY
from dsv41_jax.sampling import SamplingParams
from dsv41_jax.tokenizer import reserved_ids
from sharding.load import load_sharded
from sharding.mesh import make_mesh

R = 4
CONFIG = dataclasses.replace(
    TINY, num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=(2, 1, 0), kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1), candidate_source_layer_id=1, candidate_topk_blocks=4, index_topk=8, engram_layer_ids=(1,),
    engram_num_embeddings=(1172,), dspark_target_layer_ids=(0, 1), dspark_block_size=2, n_routed_experts=4,
    num_experts_per_tok=2, dspark_n_routed_experts=4, hc_sinkhorn_iters=2, max_position_embeddings=128,
)  # fmt: skip
CONTEXT, CHUNK = 64, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(CONFIG, tmp_path_factory.mktemp("mesh") / "served", seed=0)


@pytest.fixture(scope="module")
def served(folder):
    mesh = make_mesh(R)
    engine = Engine(load_sharded(folder, mesh, progress=False), CONFIG, max_requests=2, max_context=CONTEXT, pages=12, page_tokens=8,
                    chunk=CHUNK, batch_buckets=(2,), prefill_buckets=(1,), greedy_steps=False, precision="float32", mesh=mesh)  # fmt: skip
    engine.warm_up()
    return engine


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def sampling(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.9 * (i % 2), seed=i, ignore_eos=True)


def test_engine_over_a_mesh(served, folder):
    """Requests spread over the ranks and run out of a rank's pages; ranks idle at the beginning and at the end. Every
    output is the one of a single device; prefixes are found again on the rank that has them."""
    text = prompt(32, 99)
    cases = [(text + prompt(4, 98), sampling(0), 4)]
    cases += [(prompt(3 + 4 * (i % 7), i), sampling(i), 5 + 3 * (i % 9)) for i in range(1, 14)]
    cases += [(text + prompt(5, 97), sampling(1), 6), (prompt(40, 96), sampling(2), 99)]
    params = checkpoint.load(folder, progress=False)
    results = generate(params, CONFIG, [p for p, _, _ in cases], max_new_tokens=40, sampling=[s for _, s, _ in cases],
                       precision="float32", chunk=CHUNK, max_context=CONTEXT)  # fmt: skip
    want = [r.token_ids[:n] for r, (_, _, n) in zip(results, cases, strict=True)]
    # one request alone: three ranks are empty
    requests = [served.submit(cases[0][0], cases[0][1], max_new_tokens=cases[0][2])]
    served.run()
    fullest = [0] * R
    requests += [served.submit(p, s, max_new_tokens=n) for p, s, n in cases[1:]]
    compiled = served._loop.steps._mtp._cache_size()
    while served.step():
        fullest = [max(a, len(rank.seats)) for a, rank in zip(fullest, served._loop.scheduler.ranks, strict=True)]
    assert fullest == [2] * R
    assert [r.token_ids for r in requests] == want and all(r.error is None for r in requests)
    assert requests[-2].cached_tokens in (16, 32) and requests[-1].finish_reason == "context"
    assert served._loop.steps._mtp._cache_size() == compiled
    m = served.metrics
    assert m.pages_used == m.pages_cached > 0 and m.running == 0
    served.drop_prefixes()
    assert served.metrics.pages_used == 0


def test_reload_and_cancel_over_a_mesh(served, folder, tmp_path):
    """Weights replaced while ranks are busy and idle; a cancelled request frees its rank's pages."""
    other = make_checkpoint(CONFIG, tmp_path / "other", seed=1)
    requests = [served.submit(prompt(20 + i, 50 + i), sampling(0), max_new_tokens=12) for i in range(3)]
    gone = served.submit(prompt(30, 60), sampling(0))
    while not all(r.token_ids for r in requests):
        served.step()
    gone.cancel()
    served.reload(load_sharded(other, served._loop.steps.mesh, progress=False))
    at = [list(r.token_ids) for r in requests]
    served.run()
    assert gone.finish_reason == "cancelled" and served.metrics.pages_used == served.metrics.pages_cached
    # `generate` takes no prompt with image ids, which a random network may well have produced
    known = [(r, t) for r, t in zip(requests, at, strict=True) if not set(t) & set(reserved_ids(CONFIG))]
    assert known
    results = generate(checkpoint.load(other, progress=False), CONFIG, [*[r.prompt + t for r, t in known], *[prompt(9, 1)] * 8][:8],
                       max_new_tokens=40, sampling=sampling(0), precision="float32", chunk=CHUNK, max_context=CONTEXT)  # fmt: skip
    for (r, t), full in zip(known, results, strict=False):
        assert r.token_ids == t + full.token_ids[: 12 - len(t)]
    assert jax.device_count() == R
