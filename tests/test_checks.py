"""Bad shapes, dtypes and page tables are refused at the boundary, before the state is donated."""

import dataclasses

import jax
import numpy as np
import pytest
from dsv41_jax import checks
from dsv41_jax.cache import CacheGeometry, PageTables, init_state
from dsv41_jax.model import Network
from dsv41_jax.params import Transformer
from dsv41_jax.plan import Chunk
from dsv41_jax.precision import FLOAT32
from dsv41_jax.presets import TINY
from dsv41_jax.sampling import SamplingParams, pack_sampling
from dsv41_jax.step import DecodeBatch, PrefillBatch, Steps

G = CacheGeometry(slots=2, pages=5, page_tokens=16, span=8)


@pytest.fixture(scope="module")
def steps():
    return Steps(Network(TINY, G, FLOAT32), Transformer(TINY))  # placeholders: nothing here may reach the device


def _tables(rows=2, columns=2):
    return PageTables.shared(np.ones((rows, columns), np.int32), TINY)


def _chunk(rows=2, span=4, **changes):
    i32 = lambda *shape: np.zeros(shape, np.int32)
    return dataclasses.replace(Chunk(i32(rows, span), i32(rows), i32(rows), i32(rows), _tables(rows)), **changes)


def _sampling(rows=2):
    return pack_sampling([SamplingParams()] * rows, [0] * rows, eos=1)


def test_page_table_too_small_for_the_context():
    checks.check_tables(_tables(), TINY, G, 2, context=32)
    with pytest.raises(ValueError, match=r"tables.global_kv\[1\]: expected columns for 33 tokens, got 2 columns of 16 tokens = 32"):
        checks.check_tables(_tables(), TINY, G, 2, context=33)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (_chunk(span=9), "chunk.tokens: expected 1..span = 8 rows a request, got 9"),
        (_chunk(start=np.zeros(3, np.int32)), r"chunk.start: expected int32\[2\], got int32\[3\]"),
        (_chunk(count=np.zeros(2, np.int64)), r"chunk.count: expected int32\[2\], got int64\[2\]"),
        (_chunk(tokens=np.zeros(4, np.int32)), r"chunk.tokens: expected i32\[B, S\]"),
        (_chunk(tables=_tables(3)), r"tables.global_kv\[1\]: expected int32\[2, 2\], got int32\[3, 2\]"),
        (_chunk(tables=PageTables({1: np.ones((2, 2), np.int32)}, {})), r"tables.global_kv: expected ratios \[1, 2\], got \[1\]"),
    ],
)
def test_bad_chunks_are_refused_and_the_state_survives(steps, chunk, message):
    state = init_state(TINY, G, FLOAT32)
    with pytest.raises(ValueError, match=message):
        steps.forward(state, chunk)
    batch = PrefillBatch(chunk, _sampling(), np.zeros(2, bool), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=message):
        steps.prefill(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_bad_decode_batches_are_refused(steps):
    state = init_state(TINY, G, FLOAT32)
    slots = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="sampling.temperature: expected"):
        steps.decode(state, DecodeBatch(slots, _tables(), _sampling(3)))
    with pytest.raises(ValueError, match="slots: expected"):
        steps.decode(state, DecodeBatch(slots.astype(np.int64), _tables(), _sampling()))
    with pytest.raises(ValueError, match=r"tables.index\[1\]"):
        tables = PageTables(_tables().global_kv, {r: t.astype(np.float32) for r, t in _tables().index.items()})
        steps.decode(state, DecodeBatch(slots, tables, _sampling()))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_gamma_and_geometry_limits():
    params = Transformer(TINY)
    with pytest.raises(ValueError, match="gamma: expected 0..5"):
        Steps(Network(TINY, G, FLOAT32), params, gamma=6)
    with pytest.raises(ValueError, match=r"gamma \+ 1 <= span = 4"):
        Steps(Network(TINY, dataclasses.replace(G, span=4), FLOAT32), params, gamma=5)
    for field, value in (("slots", 0), ("pages", 1), ("page_tokens", 3), ("span", 0)):
        with pytest.raises(ValueError, match=f"cache: {field} expected"):
            dataclasses.replace(G, **{field: value})
    with pytest.raises(ValueError, match="ranks: expected a divisor of n_routed_experts = 16, got 3"):
        Transformer(TINY, ranks=3)
