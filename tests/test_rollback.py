"""Rejected drafts leave nothing behind, and speculation changes no token (spec/model.md section 12).

Drafts are planned by the tests: the continuation that greedy decoding without drafts gives, made wrong at a
chosen place.
The plan travels as the request's logit-bias ids (with biases of zero), so that it changes without recompiling.
"""

import dataclasses

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax import speculative

NAME, GAMMA = "all_kinds", 5
PROMPTS = [harness.prompt(n, seed=n) for n in (5, 12, 30)]  # odd and even, shorter and longer than the window
SLOTS = [2, 0, 4]
COUNT = 64  # tokens per run: the window ring (24 rows) and the pending ring (8) wrap
LONG = 200
PLAN_WIDTH = 16 * harness.COLUMNS


@pytest.fixture(scope="module", autouse=True)
def plannable_drafts():
    """Where a batch carries bias ids, the draft for position p of row b is bias_ids[b, p]."""
    drafted = speculative.draft_choice

    def choice(first, batch):
        if not batch.bias_ids.shape[1]:
            return drafted(first, batch)
        return lambda logits, i: jnp.take_along_axis(batch.bias_ids, first[:, None] + i, 1)[:, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "draft_choice", choice)
        yield


def tables_for(steps):
    return harness.page_tables([15, 15, 15], steps.net.config, shuffle=1)


@dataclasses.dataclass
class Clean:
    """Greedy decoding without drafts: tokens [rows][LONG + GAMMA + 1], the visible state after COUNT tokens
    and the logits of the forced tokens that follow."""

    tokens: list
    visible: list
    logits: np.ndarray


def following_logits(steps, state, rows_tokens):
    """f32[B, 6, V] of six given tokens after COUNT, and the state behind them."""
    start = np.array([len(p) + COUNT - 1 for p in PROMPTS])
    tokens = np.stack([t[COUNT - 1 : COUNT + 5] for t in rows_tokens])
    state, logits, _ = steps.forward(state, harness.chunk_of(tokens, start, [6] * 3, SLOTS, tables_for(steps)))
    return np.asarray(logits), state


def visible_rows(steps, state):
    c, tables = steps.net.config, tables_for(steps)
    return [harness.visible(state, s, len(p) + COUNT - 1, tables, b, c) for b, (s, p) in enumerate(zip(SLOTS, PROMPTS))]


def planned(plans):
    """Greedy sampling whose drafts are plans i32[B, PLAN_WIDTH]."""
    zeros = np.zeros(plans.shape, np.float32)
    return dataclasses.replace(harness.greedy_sampling(len(plans)), bias_ids=plans, bias=zeros)


@pytest.fixture(scope="module")
def clean():
    """Plain decoding, one row a step."""
    made = {}

    def run(precision: str) -> Clean:
        if precision not in made:
            steps = harness.compiled(NAME, precision)
            tables = tables_for(steps)
            state, first = harness.prefill(steps, harness.blank_state(steps), PROMPTS, SLOTS, tables)
            state, head = harness.decode(steps, state, SLOTS, tables, COUNT - 1)
            seen, kept = visible_rows(steps, state), jax.tree.map(jnp.copy, state)
            _, tail = harness.decode(steps, state, SLOTS, tables, LONG + GAMMA + 1 - COUNT)
            tokens = [[int(f), *h, *t] for f, h, t in zip(first, head, tail, strict=True)]
            assert [len(t) for t in tokens] == [LONG + GAMMA + 1] * 3  # one token a step
            made[precision] = Clean(tokens, seen, following_logits(steps, kept, tokens)[0])
        return made[precision]

    return run


def plan_row(truth, done: int, reject: int, gamma: int, start: int, rng):
    """i32[PLAN_WIDTH]: drafts after `done` tokens: right before `reject`, wrong there, anything behind it."""
    plan = rng.integers(3, 318, PLAN_WIDTH).astype(np.int32)
    for i in range(min(reject + 1, gamma)):
        right = truth[done + i]
        plan[start + done + i] = right if i < reject else (right + 1) % 318
    return plan


def run_planned(steps, truth, count: int, pick):
    """Decode `count` tokens per row with drafts rejected at pick(row, step) (gamma = none) -> (state, tokens,
    rejects)."""
    gamma, tables, rng = steps.gamma, tables_for(steps), np.random.default_rng(0)
    state, first = harness.prefill(steps, harness.blank_state(steps), PROMPTS, SLOTS, tables)
    rows, used, step = [[int(f)] for f in first], set(), 0
    while any(len(r) < count for r in rows):
        slots, plans, wanted = [], [], []
        for b, row in enumerate(rows):
            left = count - len(row)
            reject = min(pick(b, step), gamma, left - 1) if left else 0
            slots.append(SLOTS[b] if left else -1)  # a finished row is padding from here on
            plans.append(plan_row(truth[b], len(row), reject, gamma, len(PROMPTS[b]), rng))
            wanted.append(reject)
            used |= {reject} if left else set()
        state, out = steps.decode(state, harness.decode_batch(slots, tables, planned(np.stack(plans))))
        accepted, tokens, counts = (np.asarray(x) for x in (out.accepted, out.tokens, out.count))
        for b, row in enumerate(rows):
            if slots[b] >= 0:
                assert tokens[b, : counts[b]].tolist() == truth[b][len(row) : len(row) + wanted[b] + 1], (b, step)
                assert accepted[b] == wanted[b]
            row.extend(tokens[b, : counts[b]].tolist())
        step += 1
    return state, rows, used


def check_state(steps, state, clean: Clean):
    """Visible caches, registers and the logits of what follows are those of the run without drafts, bit for bit."""
    for got, want in zip(visible_rows(steps, state), clean.visible, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    logits, _ = following_logits(harness.compiled(NAME, steps.net.precision.name), state, clean.tokens)
    np.testing.assert_array_equal(logits, clean.logits)


@pytest.mark.slow
@pytest.mark.parametrize("reject", range(GAMMA + 1))
def test_rejection_at_one_place_leaves_the_clean_state(reject, clean):
    """Every step rejects its draft number `reject` (5 = accepts all)."""
    steps, want = harness.compiled(NAME, "float32", gamma=GAMMA), clean("float32")
    state, rows, used = run_planned(steps, want.tokens, COUNT, lambda row, step: reject)
    assert rows == [t[:COUNT] for t in want.tokens] and reject in used
    check_state(steps, state, want)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "released"])
def test_rejections_everywhere(precision, clean):
    """Each row rejects at its own random place in every step."""
    steps, want = harness.compiled(NAME, precision, gamma=GAMMA), clean(precision)
    pick = lambda row, step: int(np.random.default_rng([row, step]).integers(0, GAMMA + 1))
    state, rows, used = run_planned(steps, want.tokens, COUNT, pick)
    assert rows == [t[:COUNT] for t in want.tokens] and used == set(range(GAMMA + 1))
    check_state(steps, state, want)
    _, rows, _ = run_planned(steps, want.tokens, LONG, pick)
    assert rows == [t[:LONG] for t in want.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_every_gamma(gamma, clean):
    steps, want = harness.compiled(NAME, "released", gamma=gamma), clean("released")
    pick = lambda row, step: (row + step) % (gamma + 1)
    state, rows, used = run_planned(steps, want.tokens, COUNT, pick)
    assert rows == [t[:COUNT] for t in want.tokens] and used == set(range(gamma + 1))
    check_state(steps, state, want)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "released"])
def test_drafts_change_no_token(precision):
    """The drafter's own drafts, three sets of weights, 200 tokens after three prompts each."""
    drafting = harness.compiled(NAME, precision, gamma=GAMMA)
    plain = harness.compiled(NAME, precision)
    tables = tables_for(plain)
    distinct = set()
    try:
        for seed in (0, 1, 2):
            for steps in (drafting, plain):
                steps.reload(harness.params(NAME, seed))
            want = harness.generate(plain, PROMPTS, SLOTS, tables, LONG)
            assert harness.generate(drafting, PROMPTS, SLOTS, tables, LONG) == want
            distinct |= {tuple(w) for w in want}
    finally:
        for steps in (drafting, plain):
            steps.reload(harness.params(NAME, 0))
    assert len(distinct) == 9
