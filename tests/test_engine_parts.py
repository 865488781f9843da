"""The engine's host parts without a network: prefix cache, stop conditions, limits, metrics."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax.engine.limits import Limits, smallest
from dsv41_jax.engine.metrics import EngineMetrics
from dsv41_jax.engine.pages import PageAllocator
from dsv41_jax.engine.prefix import PrefixCache
from dsv41_jax.engine.request import Request
from dsv41_jax.presets import TINY
from dsv41_jax.sampling import SamplingParams

PAGE = 4

# prefix cache ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["run", "run", "end", "reclaim", "find"]), st.integers(0, 1), st.integers(1, 6),
                  st.integers(0, 40)), max_size=60),
    budget=st.integers(0, 50),
)  # fmt: skip
def test_prefixes_own_their_pages_and_no_others(operations, budget):
    """Requests start from what is cached, cache every page boundary, end in any order, while entries are evicted: a hit is
    always on the pages that held those ids, and at the end every page is free."""
    allocator = PageAllocator(25)
    cache, running = PrefixCache(allocator, budget), []
    content = {}  # page -> (the ids up to its end), as written by whoever took it
    for kind, family, pages, pick in operations:
        # two families of texts, each with branches at every page
        ids = [family] * (PAGE * (pages - 1)) + [10 + pick % 3] * PAGE + [9]
        if kind == "run":
            entry = cache.find(ids)
            shared = list(entry.pages) if entry else []
            if entry:
                assert ids[: entry.length] == entry.ids.tolist() and entry.length < len(ids)
                assert [content[p] for p in shared] == [tuple(ids[: PAGE * (i + 1)]) for i in range(len(shared))]
                cache.touch(entry)
            allocator.share(shared)
            need = pages - len(shared)
            if not cache.reclaim(need):
                assert cache.reclaimable() == 0 and allocator.free < need
                allocator.release(shared)
                continue
            own = shared + allocator.take(need)
            for i, p in enumerate(own):
                content[p] = tuple(ids[: PAGE * (i + 1)])
            for i in range(len(shared), pages):
                cache.add(ids[: PAGE * (i + 1)], own[: i + 1], object(), 5)
            assert cache.nbytes <= budget
            running.append(own)
        elif kind == "end" and running:
            allocator.release(running.pop(pick % len(running)))
        elif kind == "reclaim":
            could = allocator.free + cache.reclaimable()
            assert cache.reclaim(pick) == (pick <= could)
        elif kind == "find":
            entry = cache.find(ids)
            keys = [e for e in cache._entries.values() if e.length < len(ids) and ids[: e.length] == e.ids.tolist()]
            assert entry is max(keys, key=lambda e: e.length, default=None)
        owned = {p for own in running for p in own} | {p for e in cache._entries.values() for p in e.pages}
        assert allocator.used == len(owned) and cache.nbytes == 5 * len(cache)
    for own in running:
        allocator.release(own)
    assert allocator.used == cache.pages
    cache.clear()
    assert (allocator.free, cache.nbytes, len(cache)) == (24, 0, 0) and cache.find([0] * 30) is None


def test_lookups_compare_ids_not_only_hashes(monkeypatch):
    cache = PrefixCache(PageAllocator(9), 100)
    monkeypatch.setattr("hashlib.blake2b", lambda *a, **k: Constant())
    cache.add([1, 2, 3, 4], cache._allocator.take(1), object(), 5)
    assert cache.find([1, 2, 3, 4, 5]).length == 4
    assert cache.find([4, 3, 2, 1, 5]) is None


class Constant:
    def update(self, data):
        pass

    def copy(self):
        return self

    def digest(self):
        return b"same"


# stop conditions ------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose id i is the i-th letter; id 30 is half a character, 31 the other half."""

    def stream(self):
        return self

    held = ""

    def push(self, ids):
        out = ""
        for i in ids:
            if i == 30:
                self.held = "?"
            elif i == 31:
                out, self.held = out + "é", ""
            else:
                out += chr(ord("a") + i)
        return out

    def finish(self):
        return self.held


def request(max_new_tokens=100, stop_strings=(), **sampling):
    r = Request(None, 0, [5, 6], SamplingParams(**sampling), max_new_tokens, stop_strings)
    r.check(TINY, 50, 4, 0, Letters())
    return r


@pytest.mark.parametrize(
    ("made", "steps", "tokens", "reason", "text"),
    [
        (request(), [[4, 5, 1, 6]], [4, 5, 1], "stop", None),
        (request(ignore_eos=True), [[4, 1]], [4, 1], None, None),
        (request(stop_ids=(9,)), [[4], [5, 9, 1]], [4, 5, 9], "stop", None),
        (request(3), [[4, 5], [6, 7, 8]], [4, 5, 6], "length", None),
        (request(2, stop_ids=(5,)), [[4, 5]], [4, 5], "stop", None),
        (request(), [[7] * 40, [7] * 40], [7] * 48, "context", None),
        (request(48), [[7] * 60], [7] * 48, "length", None),
        (request(stop_strings=["fe"]), [[4, 5, 4, 7]], [4, 5, 4], "stop", "ef"[:1]),
        (request(stop_strings=["xyz", "def"]), [[2, 3], [4], [5, 6]], [2, 3, 4, 5], "stop", "c"),
        (request(stop_strings=["ef", "def"]), [[2, 3, 4, 5]], [2, 3, 4, 5], "stop", "c"),
        (request(stop_strings=["é"]), [[4, 30], [31, 5]], [4, 30, 31], "stop", "e"),
        (request(stop_strings=["e"], min_tokens=3), [[4, 4, 4], [3, 4]], [4, 4, 4, 3, 4], "stop", "eeed"),
        (request(3, stop_strings=["x"]), [[4, 5, 30]], [4, 5, 30], "length", "ef?"),
    ],
)  # fmt: skip
def test_output_ends_at_the_first_reason(made, steps, tokens, reason, text):
    appended = []
    for step in steps:
        if made.finish_reason is None:
            appended += made.take(step, 50)
    assert (made.token_ids, made.finish_reason, appended) == (tokens, reason, tokens)
    made.close()
    assert made.text == text


# limits ---------------------------------------------------------------------------------------------------------------


def test_defaults_follow_from_the_model():
    limits = Limits(max_requests=6, max_context=1000).resolved(TINY, gamma=5)
    assert limits.batch_buckets == (1, 2, 4, 6) and limits.prefill_buckets == (1, 2, 4)
    assert (limits.pages, limits.context_columns(), limits.token_budget) == (49, (8,), 6 * 6 + 4 * 256)
    assert Limits().resolved(TINY, 5).max_context == TINY.max_position_embeddings
    assert Limits(max_context=100).resolved(TINY, 5).chunk == 100
    assert [smallest(limits.batch_buckets, n) for n in range(7)] == [1, 1, 2, 4, 4, 6, 6]
    assert Limits(max_requests=1).resolved(TINY, 0).batch_buckets == (1,)
    assert limits.geometry(5).span == 256 and Limits(chunk=2).resolved(TINY, 5).geometry(5).span == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_requests": 0}, "max_requests expected >= 1, got 0"),
        ({"max_context": 5000}, "max_context expected 2..4096, got 5000"),
        ({"pages": 1}, "pages expected >= 2"),
        ({"page_tokens": 7}, "page_tokens expected even"),
        ({"page_tokens": 0}, "page_tokens expected >= 2, got 0"),
        ({"chunk": 0}, "chunk expected >= 1"),
        ({"token_budget": 0}, "token_budget expected >= 1"),
        ({"batch_buckets": (1, 4)}, "batch_buckets expected the largest to be 8"),
        ({"context_buckets": (64,)}, "context_buckets expected the largest to be 4096"),
        ({"prefill_buckets": ()}, "prefill_buckets expected sizes >= 1"),
        ({"prefix_bytes": -1}, "prefix_bytes expected >= 0"),
    ],
)
def test_bad_limits_are_named(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Limits(**wrong).resolved(TINY, 5)


# metrics --------------------------------------------------------------------------------------------------------------


def test_prometheus_text():
    m = EngineMetrics(submitted=3, finished={"stop": 2, "error": 1}, drafted=[0, 0], accepted=[0, 0], output_tokens=30, busy_s=2.0,
                      decode_rows=3, decode_rows_padded=4)  # fmt: skip
    m.count_drafts(1)
    m.count_drafts(2)
    m.inter_token.add(0.002, 3)
    m.inter_token.add(5.0)
    assert (m.acceptance, m.tokens_per_s, m.batch_fill) == ([1.0, 0.5], 15.0, 0.75)
    lines = m.prometheus().splitlines()
    for line in ('dsv41_requests_finished_total{reason="stop"} 2', 'dsv41_accepted_total{position="1"} 1', "dsv41_batch_fill 0.75",
                 'dsv41_inter_token_latency_seconds_bucket{le="0.003"} 3', 'dsv41_inter_token_latency_seconds_bucket{le="1.0"} 3',
                 'dsv41_inter_token_latency_seconds_bucket{le="+Inf"} 4', "dsv41_inter_token_latency_seconds_count 4",
                 "# TYPE dsv41_inter_token_latency_seconds histogram", "dsv41_tokens_per_s 15.0"):  # fmt: skip
        assert line in lines, line
    # every sample belongs to a series that was announced, and no series is announced twice
    series = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(series)) == len(series)
    for line in (x for x in lines if not x.startswith("#")):
        name = re.fullmatch(r"([a-z0-9_]+)(\{[a-z]+=\"[^\"]+\"\})? [-+0-9.e]+", line)[1]
        assert name in series or re.sub(r"_(bucket|sum|count)$", "", name) in series, line


@pytest.mark.parametrize(("field", "value"), [("max_requests", 1.5), ("pages", "25"), ("chunk", None), ("end_ids", True),
                                              ("prefill_buckets", (1.5,))])  # fmt: skip
def test_sizes_are_integers(field, value):
    with pytest.raises(ValueError, match=f"engine: {field} expected"):
        Limits(**{field: value}).resolved(TINY, 5)
