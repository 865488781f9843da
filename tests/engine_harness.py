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
    padding = [([3] * CHUNK, GREEDY, 1)] * max(0, 8 - len(requests))
    # outputs of one length together: a batch runs until its longest has ended
    order = sorted(range(len(requests)), key=lambda i: requests[i][2])
    cases = [requests[i] for i in order] + padding
    results = generate(
        params() if weights is None else weights, CONFIG, [p for p, _, _ in cases], max_new_tokens=max(n for _, _, n in cases),
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
