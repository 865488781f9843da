"""What the engine's tests share: a two-layer network with every kind of cache, engines of one shape, and the oracle.

The oracle is `generate`: it knows nothing of pages, slots, queues or prefixes. Engines of one shape share their compiled
steps, so a test pays for its own programs only where it asks for another shape.
"""

import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

from dsv41_jax import checkpoint
from dsv41_jax.engine import Engine
from dsv41_jax.generate import generate
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.presets import TINY
from dsv41_jax.sampling import SamplingParams
from dsv41_jax.tokenizer import Tokenizer

# ratio 2 and ratio 1 pages, pending rows, an engram, a draft stage; the window wraps within a test's contexts
CONFIG = dataclasses.replace(
    TINY, num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=(2, 1, 0), kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1), candidate_source_layer_id=1, candidate_topk_blocks=4, index_topk=8, engram_layer_ids=(1,),
    engram_num_embeddings=(1172,), dspark_target_layer_ids=(0, 1), dspark_block_size=3, n_routed_experts=4,
    num_experts_per_tok=2, dspark_n_routed_experts=4, hc_sinkhorn_iters=3, max_position_embeddings=256,
)  # fmt: skip
CONTEXT, PAGE, CHUNK = 96, 8, 16
SHAPE = {"max_requests": 4, "max_context": CONTEXT, "pages": 25, "page_tokens": PAGE, "chunk": CHUNK, "batch_buckets": (2, 4),
         "prefill_buckets": (2,), "precision": "float32", "greedy_steps": False, "prefix_bytes": 1 << 20}  # fmt: skip

GREEDY = SamplingParams(ignore_eos=True)


@functools.cache
def folder(seed: int = 0) -> Path:
    """A random checkpoint, removed when the tests end."""
    root = Path(tempfile.mkdtemp(prefix="dsv41_engine_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_checkpoint(CONFIG, root / "served", seed=seed)


@functools.cache
def params(seed: int = 0):
    return checkpoint.load(folder(seed), CONFIG, progress=False)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(folder())


def engine(weights=None, **changes) -> Engine:
    """An engine of the usual shape; another number of pages or slots is another shape."""
    return Engine(params() if weights is None else weights, CONFIG, tokenizer=tokenizer(), **(SHAPE | changes))


def prompt(length: int, seed: int) -> list[int]:
    """Random ids that are not special."""
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def run_alone(requests, weights=None, precision: str = "float32") -> list[tuple[list[int], str]]:
    """(token ids, reason) that `generate` gives for each (prompt, sampling, max_new_tokens). Its batches do not matter
    (test_generate), and always have eight rows here: one shape."""
    # stochastic: a batch of greedy requests alone would be another program
    padding = [([3] * CHUNK, SamplingParams(temperature=1.0), 1)] * max(0, 8 - len(requests))
    # like lengths together: a batch runs as long as its longest
    order = sorted(range(len(requests)), key=lambda i: (requests[i][2] // 15, len(requests[i][0])))
    cases = [requests[i] for i in order] + padding
    results = generate(
        # a random network writes image ids, which no prompt may hold: for its text to be continued there must be none
        params() if weights is None else weights, dataclasses.replace(CONFIG, image_token_id=-1), [p for p, _, _ in cases], max_new_tokens=max(n for _, _, n in cases),
        sampling=[s for _, s, _ in cases], precision=precision, chunk=CHUNK, max_context=CONTEXT,
    )  # fmt: skip
    out = [None] * len(requests)
    for i, r in zip(order, results):
        n = requests[i][2]
        own = len(r.token_ids) < n or (len(r.token_ids) == n and r.finish_reason == "stop")
        out[i] = r.token_ids[:n], r.finish_reason if own else "length"
    return out


def outcome(request) -> tuple[list[int], str]:
    return request.token_ids, request.finish_reason


def check_all_free(served: Engine) -> None:
    """Nothing is left: no request, no step, no slot; every page is free once the prefixes are gone."""
    m = served.metrics
    assert (m.waiting, m.running) == (0, 0) and not served.step()
    assert m.pages_used == m.pages_cached
    served.drop_prefixes()
    m = served.metrics
    assert (m.pages_used, m.prefix_entries, m.prefix_bytes) == (0, 0, 0)
    for rank in served._loop.scheduler.ranks:
        assert sorted(rank.free_slots) == list(range(served.limits.max_requests))
        assert rank.allocator.free == rank.allocator.capacity


def random_sampling(rng) -> SamplingParams:
    """Greedy, sampled and forced requests; some end at one of many stop ids, some may not end before a minimum."""
    kind = rng.integers(4)
    stops = tuple(rng.choice(np.arange(3, 500), 3, replace=False).tolist()) if rng.random() < 0.6 else ()
    common = {"seed": int(rng.integers(2**32)), "stop_ids": stops, "ignore_eos": bool(rng.random() < 0.5),
              "min_tokens": int(rng.integers(0, 6))}  # fmt: skip
    if kind == 0:
        return SamplingParams(**common)
    if kind == 1:
        return SamplingParams(forced=True, **common)
    return SamplingParams(temperature=float(rng.choice([0.5, 1.0, 3.0])), top_k=int(rng.choice([0, 5])),
                          top_p=float(rng.choice([1.0, 0.9])), min_p=float(rng.choice([0, 0.05])), **common)  # fmt: skip


def random_requests(count: int, seed: int):
    """[(prompt, sampling, max_new_tokens)]: half of the prompts begin with one of three common texts."""
    rng = np.random.default_rng(seed)
    common = [prompt(70, 900 + i) for i in range(3)]
    out = []
    for i in range(count):
        own = prompt(int(rng.integers(1, 40)), seed * 1000 + i)
        begin = common[rng.integers(3)][: int(rng.integers(0, 34))] if rng.random() < 0.5 else []
        ids, new, kind = (begin + own)[: int(rng.integers(1, 33))], int(rng.integers(1, 9)), rng.random()
        if i % 40 >= 33:  # a few in a row that outgrow the pages they start with
            ids, new = ids[:25], int(rng.integers(25, 40))
        elif kind < 0.04:  # runs into the end of the context
            ids, new = (prompt(85, i) + own)[: int(rng.integers(80, 95))], 99
        out.append((ids, random_sampling(rng), new))
    return out


def drive(served: Engine, cases, rng) -> list:
    """Serve (prompt, sampling, max_new_tokens) cases that arrive at random steps; some are cancelled, and somebody else
    takes pages and gives them back, so that the pool has every size. Returns the requests, all of them finished."""
    allocator = served._loop.scheduler.ranks[0].allocator
    requests, tenant, to_come = [], [], list(cases)
    seen: dict[int, list[int]] = {}
    while to_come or served.step():
        for _ in range(min(len(to_come), rng.poisson(0.6))):
            p, s, n = to_come.pop(0)
            requests.append(
                served.submit(p, s, max_new_tokens=n, on_token=lambda r, new: seen.setdefault(r.id, []).extend(new))
            )
        if to_come:
            served.step()
        running = [r for r in requests if not r.finished]
        if running and rng.random() < 0.04:
            running[rng.integers(len(running))].cancel()
        if rng.random() < 0.1 or not to_come:
            allocator.release(tenant)
            tenant = allocator.take(min(allocator.free, int(rng.integers(0, 13)))) if to_come else []
            served._loop.scheduler._blocked = None  # it knows only of pages that its own requests give back
    assert all(seen.get(r.id, []) == r.token_ids for r in requests)
    return requests


def check_outcomes(requests, want) -> None:
    """Every finished output is the wanted one, every cancelled one the beginning of it."""
    assert all(r.finished for r in requests)
    for r, (ids, reason) in zip(requests, want, strict=True):
        if r.finish_reason == "cancelled":
            assert r.token_ids == ids[: len(r.token_ids)]
        else:
            assert outcome(r) == (ids, reason), (r.id, r.sampling, r.error)
