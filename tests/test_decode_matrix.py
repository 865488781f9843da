"""Cases of the test matrix of spec/decode.md section 7 that belong to no one operator's rules: the scorer's grid of shapes, both
sides of the candidates' switch, selections without repetition, the drafter's contexts and committed rows."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax import dspark
from dsv41_jax.presets import FLASH
from dsv41_jax.step import _commit_features
from pallas_kernels.candidate_blocks import candidate_blocks, radix_candidates
from pallas_kernels.index_score import index_score, specs
from pallas_kernels.select_tokens import SlotMap, radix_select, radix_wide, select_tokens
from pallas_kernels.sparse_attention.specs import TINY_SWA
from tests import bits
from tests.index_score_harness import BF16, check, kernel_against_reference, loop_dense
from tests.test_sparse_attention import check as check_attention

# --------------------------------------------------------------------------------------------------- item 3: dense scores

GRID = [(64, 1, 1), (128, 2, 6), (64, 2, 6), (64, 3, 1)]  # entries of a page (128 / ratio), requests, rows of each
LAST = 2053  # visible to the last row: a multiple of neither 8 nor 64


def grid(entries: int, batch: int, span: int, **sizes):
    """(spec, inputs): the last row of a request sees LAST entries, the page that holds them is part filled."""
    spec = specs.Spec("grid", batch, span, page_entries=entries, columns=-(-LAST // entries), context=LAST - span + 1, **sizes)
    return spec, spec.make_inputs(seed=entries + batch)


@pytest.mark.parametrize("entries, batch, span", GRID)
def test_dense_scores_of_the_grid(entries, batch, span):
    spec, inputs = grid(entries, batch, span, heads=4, dim=32)
    assert inputs["visible"].max() == LAST < spec.capacity
    run = jax.jit(lambda kw: index_score(**kw))
    check(run(inputs), loop_dense(inputs, spec), BF16)
    none = np.asarray(run(inputs | {"visible": np.zeros_like(inputs["visible"])}))
    assert np.isneginf(none.astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["all", "none"])
@pytest.mark.parametrize("entries, batch, span", GRID)
def test_dense_scores_of_the_grid_on_a_gpu(entries, batch, span, lengths):
    inputs = grid(entries, batch, span, heads=32, dim=128)[1]
    if lengths == "none":
        inputs["visible"][:] = 0
    kernel_against_reference(inputs, index_score, "auto")


# ----------------------------------------------------------------------------------------------------- item 4: the switch


@pytest.mark.parametrize("visible", [16383, 16384, 16385, 16392])
def test_candidates_mask_nothing_up_to_the_switch(visible):
    """2048 blocks hold 16384 entries: a row that sees no more keeps all it sees, beside longer rows of the same batch. One
    entry more and the weakest block goes, never the newest."""
    width, rng = 16392, np.random.default_rng(visible)
    scores = rng.integers(2, 0x7F80, (2, width)).astype(np.uint16)
    scores[0, 8 * 77 : 8 * 78], scores[0, 16384:] = 1, 0  # the weakest block, and a newest that is weaker still
    arguments = bits.bf16(scores), jnp.asarray([visible, width], jnp.int32)
    ids, count = (np.asarray(x) for x in candidate_blocks(*arguments))
    whole = visible <= 16384
    want = np.arange(2048) if whole else np.delete(np.arange(2049), 77)
    np.testing.assert_array_equal(ids[0], want)
    assert count.tolist() == [2048, 2048]
    for got, defined in zip(radix_candidates.emulated(*arguments, k_blocks=2048), (ids, count), strict=True):
        np.testing.assert_array_equal(got, defined)


# --------------------------------------------------------------------------------------------- items 6, 7: no slot twice


@settings(max_examples=20, deadline=None)
@given(bits.rows(264, 4), st.integers(0, 2**32 - 1))
def test_no_token_and_no_slot_is_selected_twice(scores, seed):
    """Indices ascend strictly, so attention never counts a key twice; where every page is another, slots differ as well."""
    rng = np.random.default_rng(seed)
    table = jnp.asarray(1 + rng.permutation(4 * 34).reshape(4, 34), jnp.int32)
    where = SlotMap(table, jnp.arange(4, dtype=jnp.int32), 16)
    ids = np.stack([np.sort(rng.permutation(66)[:33]) for _ in range(4)]).astype(np.int32)
    end = jnp.asarray(rng.integers(0, 265, 4), jnp.int32)
    sparse = {"block_ids": jnp.asarray(ids), "causal": jnp.asarray(rng.integers(0, 528, 4), jnp.int32)}
    for more in ({}, sparse):
        keywords = {"k": 32, "slot_map": where, **more}
        for run in (select_tokens, radix_select.emulated, radix_wide.emulated):
            for indices, slots in zip(*(np.asarray(x) for x in run(bits.bf16(scores), end, **keywords)), strict=True):
                kept, taken = indices[indices >= 0], slots[slots >= 0]
                assert (np.diff(kept) > 0).all() and (indices[len(kept) :] == -1).all()
                assert len(set(taken.tolist())) == len(taken) == len(kept)


# ------------------------------------------------------------------------------------------------------- item 8: the drafter


@pytest.mark.parametrize("first", [0, 100])
def test_contexts_of_a_draft_block(first):
    """Keys min(prefix, 128) back and the block's own five, for every row alike; never before the first that was committed."""
    prefixes = np.array([0, 1, 127, 128, 129, 16383, 16384, 16385]) + first
    slots = jnp.arange(len(prefixes), dtype=jnp.int32)
    state = types.SimpleNamespace(draft_from=jnp.full(len(prefixes), first, jnp.int32))
    start, end = (np.asarray(x) for x in dspark._context(state, jnp.asarray(prefixes, jnp.int32), slots, 5, FLASH))
    assert start.shape == end.shape == (len(prefixes), 5)
    assert (start == start[:, :1]).all() and (end == prefixes[:, None] + 5).all()
    np.testing.assert_array_equal(prefixes - start[:, 0], [0, 1, 127, 128, 128, 128, 128, 128])


@pytest.mark.parametrize("prefix", [0, 1, 12, 13, 14])
def test_draft_block_reads_round_its_ring(prefix):
    """Contexts of nothing, one row, and at the place where the ring starts over."""
    spec = dataclasses.replace(TINY_SWA, span=5, ring=13, context=prefix)
    inputs = spec.make_inputs(seed=prefix)
    inputs["q"] = inputs["q"].astype(np.float32)
    rows = lambda value: np.full((spec.batch, 5), value, np.int32)
    check_attention(inputs, dataclasses.replace(spec, window=13), 2e-6, window_start=rows(max(0, prefix - 8)),
                    window_end=rows(prefix + 5))  # fmt: skip


def test_committed_rows_of_requests_without_any():
    """Requests that start where another without rows starts, and padding requests: each writes its own rows and no others,
    the same alone and beside others."""
    steps = harness.compiled("all_kinds", "released", 5)
    net, params = steps.net, harness.params("all_kinds")
    counts, slots, starts = np.array([0, 3, 0, 6]), np.array([4, 2, 0, 3]), np.array([9, 9, 30, 30])
    features = jnp.asarray(np.random.default_rng(0).standard_normal((24, 2 * net.config.hidden_size)), jnp.bfloat16)
    tables = harness.page_tables([1] * 4, net.config)
    before = harness.poisoned(harness.blank_state(steps))

    @jax.jit
    def commit(count, slots):
        chunk = harness.chunk_of(np.ones((4, 6)), starts, [6] * 4, [0] * 4, tables)
        chunk = dataclasses.replace(chunk, slots=slots)
        return _commit_features(params, before, types.SimpleNamespace(target=features), chunk, count, net).draft_window

    def rings(counts, slots):
        return [np.asarray(r) for r in commit(jnp.asarray(counts, jnp.int32), jnp.asarray(slots, jnp.int32))]

    whole = rings(counts, slots)
    assert len(whole) == net.config.num_nextn_predict_layers
    for stage, ring in enumerate(whole):
        want = {(int(s), (p + i) % ring.shape[1]) for s, p, n in zip(slots, starts, counts, strict=True) for i in range(n)}
        written = (ring != np.asarray(before.draft_window[stage])).any(-1)
        assert set(zip(*(x.tolist() for x in np.nonzero(written)), strict=True)) == want
    padded = rings(counts, [4, 2, 0, -1])
    for ring, others, alone in zip(whole, padded, rings([0, 3, 0, 0], slots), strict=True):
        assert (others[3] == 0xFF).all() and others.tobytes() == alone.tobytes()
        np.testing.assert_array_equal(np.delete(ring, 3, 0), np.delete(others, 3, 0))
