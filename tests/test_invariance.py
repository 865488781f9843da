"""What a token is does not depend on chunks, on the batch around it, on pages, or on what lies in memory it
does not own."""

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax.cache import CacheGeometry

NAME = "all_kinds"
CHUNKS, PREFILLS = (1, 2, 3, 5, 6, 13, 48), (1, 7, 13)
LENGTH = 83  # the window ring (56 rows at a span of 48) and the pending ring (8) both wrap
WIDE = CacheGeometry(slots=2, pages=13, page_tokens=16, span=48)


def forward(steps, pieces, ids, tables, state=None, slots=(0, 1)):
    """Teacher-forced: logits f32[B, L, V] of `ids` in chunks of pieces = [(start, count, rows)], and the last state."""
    state = harness.blank_state(steps) if state is None else state
    out = np.zeros((*ids.shape, steps.net.config.vocab_size), np.float32)
    n = len(ids)
    for start, count, rows in pieces:
        tokens = np.full((n, rows), 5, np.int32)  # rows beyond `count` hold a real token: it must not matter
        tokens[:, :count] = ids[:, start : start + count]
        chunk = harness.chunk_of(tokens, np.full(n, start), np.full(n, count), slots, tables)
        state, logits, _ = steps.forward(state, chunk)
        out[:, start : start + count] = np.asarray(logits)[:, :count]
    return out, state


def pieces_of(first: int, size: int, length: int = LENGTH):
    rest = [(s, min(size, length - s), size) for s in range(first, length, size)]
    return [(0, first, first), *rest]


def texts():
    return np.stack([harness.prompt(LENGTH, seed) for seed in (1, 2)])


@pytest.fixture(scope="module")
def one_at_a_time():
    steps = harness.compiled(NAME, "float32", geometry=WIDE)
    tables = harness.page_tables([6, 6], steps.net.config, columns=6, pages=13)
    return forward(steps, pieces_of(1, 1), texts(), tables)[0]


@pytest.mark.slow
@pytest.mark.parametrize("first", PREFILLS)
@pytest.mark.parametrize("size", CHUNKS)
def test_chunks_change_nothing(size, first, one_at_a_time):
    steps = harness.compiled(NAME, "float32", geometry=WIDE)
    tables = harness.page_tables([6, 6], steps.net.config, columns=6, shuffle=size, pages=13)
    logits, _ = forward(steps, pieces_of(first, size), texts(), tables)
    assert np.ptp(logits[:, -1]) > 0.5
    np.testing.assert_allclose(logits, one_at_a_time, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_released_chunks_and_batches_change_no_bit():
    """One token at a time, in chunks, alone and with another request: logits and caches bit for bit."""
    steps = harness.compiled(NAME, "released", geometry=WIDE)
    c = steps.net.config
    tables = harness.page_tables([6, 6], c, columns=6, shuffle=1, pages=13)
    ids = texts()
    want, clean = forward(steps, pieces_of(1, 1), ids, tables)
    chunked, state = forward(steps, pieces_of(13, 6), ids, tables)
    np.testing.assert_array_equal(chunked, want)
    for row in range(2):
        kept = [harness.visible(s, row, LENGTH, tables, row, c) for s in (clean, state)]
        for name in kept[0]:
            np.testing.assert_array_equal(kept[1][name], kept[0][name], err_msg=name)
    own = jax.tree.map(lambda t: t[1:], tables)
    alone, _ = forward(steps, pieces_of(1, 1), ids[1:], own, slots=(0,))
    np.testing.assert_array_equal(alone[0], want[1])


# ----------------------------------------------------------------------------------------------- requests in a batch

PROMPTS = [harness.prompt(n, seed=10 + n) for n in (29, 1, 14, 40)]
TOKENS = 24


@pytest.fixture(scope="module", params=["float32", "released"])
def decoder(request):
    return harness.compiled(NAME, request.param, gamma=5)


@pytest.fixture(scope="module")
def alone(decoder):
    """Every prompt in row 0 of a batch whose other rows are padding, on ascending pages and a zeroed state."""
    tables = harness.page_tables([5, 0, 0, 0], decoder.net.config)
    pads = [None] * 3
    return [harness.generate(decoder, [p, *pads], [0, -1, -1, -1], tables, TOKENS)[0] for p in PROMPTS]


def test_alone_or_with_others(decoder, alone):
    """Four lengths at once, other slots, other rows, a different permutation of physical pages for every pool tag."""
    assert len({tuple(t) for t in alone}) == 4 and all(len(set(t)) > 3 for t in alone)
    order, slots = [2, 0, 3, 1], [4, 1, 0, 2]
    tables = harness.page_tables([5, 6, 5, 4], decoder.net.config, shuffle=3)
    together = harness.generate(decoder, [PROMPTS[i] for i in order], slots, tables, TOKENS)
    assert together == [alone[i] for i in order]


def test_memory_that_is_not_owned_reaches_nobody(decoder, alone):
    """NaN in every page, ring row, pending row and register before the prompt; table columns past the need are
    negative."""
    tables = harness.page_tables([5, 0, 5, 0], decoder.net.config, shuffle=4, rest=-7)
    state = harness.poisoned(harness.blank_state(decoder))
    got = harness.generate(decoder, [PROMPTS[0], None, PROMPTS[3], None], [3, -1, 1, -1], tables, TOKENS, state)
    assert got == [alone[0], [], alone[3], []]


def test_slots_are_reused_without_a_trace(decoder, alone):
    """A short prompt in the slot and the pages of a longer request that has ended."""
    tables = harness.page_tables([5, 0, 0, 0], decoder.net.config)
    pads, slots = [None] * 3, [0, -1, -1, -1]
    state, _ = harness.prefill(decoder, harness.blank_state(decoder), [PROMPTS[3], *pads], slots, tables)
    state, _ = harness.decode(decoder, state, slots, tables, TOKENS)
    assert harness.generate(decoder, [PROMPTS[1], *pads], slots, tables, TOKENS, state)[0] == alone[1]


def changed(before, after):
    """Names of the state's arrays that differ, bit for bit, with the index of the first axis where they do."""
    out = {}
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, a), b in pairs:
        differs = np.flatnonzero((a.view(np.uint8) != b.view(np.uint8)).reshape(len(a), -1).any(1))
        if differs.size:
            out[jax.tree_util.keystr(path)] = set(differs.tolist())
    return out


def snapshot(state):
    return jax.tree.map(lambda x: np.array(x), state)


def test_padding_requests_change_nothing(decoder):
    """Rows with slot -1 or a slot that does not exist, whose tables point at live pages, through decode and prefill."""
    c = decoder.net.config
    tables = harness.page_tables([5, 5, 5, 5], c, shuffle=5)
    live = [0, 2, 1, 3]
    state, _ = harness.prefill(decoder, harness.blank_state(decoder), PROMPTS, live, tables)
    before = snapshot(state)
    nobody = [-1, 5, -99, 1000]
    state, out = decoder.decode(state, harness.decode_batch(nobody, tables))
    assert changed(before, snapshot(state)) == {}
    assert not np.asarray(out.tokens).any() and not np.asarray(out.count).any() and np.asarray(out.finite).all()
    state, _ = harness.prefill(decoder, state, PROMPTS, nobody, tables)
    assert changed(before, snapshot(state)) == {}


def test_a_step_changes_only_its_own_slots_and_pages(decoder):
    c = decoder.net.config
    tables = harness.page_tables([5, 5, 5, 5], c, shuffle=6)
    state, _ = harness.prefill(decoder, harness.blank_state(decoder), PROMPTS, [0, 2, 1, 3], tables)
    before = snapshot(state)
    state, _ = decoder.decode(state, harness.decode_batch([-1, 2, 7, -1], tables))  # only row 1 lives, in slot 2
    got = changed(before, snapshot(state))
    assert {".length", ".anchor", ".history", ".window[0]", ".draft_window[0]"} <= set(got)
    for name, where in got.items():
        pooled = name.startswith((".global_kv", ".index"))
        if not pooled:
            assert where == {2}, name
            continue
        layer = next(s for s in c.layers if f"[{s.index}]" in name)
        table = (tables.global_kv if name.startswith(".global_kv") else tables.index)[layer.ratio]
        assert where <= set(np.asarray(table)[1, :5].tolist()), name


# ---------------------------------------------------------------------------------------- pages that are not there

UNALLOCATED = (0, -1, -7, -99, 48, 4096)


def run_with_column(steps, value: int, column: int = 1):
    """Two texts of 40 tokens; the first one's pages of `column` are replaced by `value` in every tag."""
    tables = harness.page_tables([3, 3], steps.net.config, columns=6, pages=13)
    holed = jax.tree.map(lambda t: t.at[0, column].set(value), tables)
    ids = texts()[:, :40]
    return *forward(steps, pieces_of(13, 6, 40), ids, holed), forward(steps, pieces_of(13, 6, 40), ids, tables)[0]


def test_unallocated_pages_are_skipped_and_masked():
    """Every id <= 0 or outside the pool does the same; logits stay finite, the other request sees nothing of it."""
    steps = harness.compiled(NAME, "float32", geometry=WIDE)
    first = None
    for value in UNALLOCATED:
        logits, state, whole = run_with_column(steps, value if value != 48 else WIDE.pages)
        assert np.isfinite(logits).all()
        np.testing.assert_array_equal(logits[1], whole[1])
        np.testing.assert_array_equal(logits[0, :16], whole[0, :16])
        assert np.abs(logits[0, 20:] - whole[0, 20:]).max() > 1e-3  # entries are missing there
        # page 0 and the page that lost its owner (2) stay blank
        for pool in (*state.global_kv.values(), *state.index.values()):
            assert not np.asarray(pool)[[0, 2]].any()
        first = (logits, snapshot(state)) if first is None else first
        np.testing.assert_array_equal(logits, first[0])
        assert changed(first[1], snapshot(state)) == {}


@pytest.mark.slow
def test_a_table_that_is_too_small_is_never_clamped():
    """Positions past the last column write nothing, to no live page either; what the table holds is as in a wider one.
    (Beyond it the two differ: a wider table's unallocated entries score 0 and may be selected, as masked keys.)"""
    steps = harness.compiled(NAME, "float32", geometry=WIDE)
    wide = harness.page_tables([2, 2], steps.net.config, columns=6, pages=13)
    narrow = jax.tree.map(lambda t: t[:, :2], wide)
    ids, held = texts()[:, :48], 2 * WIDE.page_tokens
    want, state = forward(steps, pieces_of(13, 6, 48), ids, wide)
    got, small = forward(steps, pieces_of(6, 6, 48), ids, narrow)
    assert np.isfinite(got).all() and np.isfinite(want).all()
    np.testing.assert_allclose(got[:, :held], want[:, :held], rtol=0, atol=2e-5)
    for pools, others in ((state.global_kv, small.global_kv), (state.index, small.index)):
        for layer, pool in pools.items():
            np.testing.assert_allclose(others[layer], pool, rtol=0, atol=2e-5)
    assert jnp.all(small.length == 48)
