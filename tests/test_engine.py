"""The engine against `generate`: whatever the schedule, every request gets the tokens that it gets alone."""

import dataclasses
import pathlib
import re
import types

import engine_harness as harness
import jax
import jax.numpy as jnp
import model_harness
import numpy as np
import pytest
from engine_harness import GREEDY, PAGE, prompt

from bench.decode import CompileWatch
from dsv41_jax.cache import PageTables
from dsv41_jax.sampling import SamplingParams


@pytest.fixture(scope="module")
def served():
    """One engine for the tests that leave it empty: compiled once, warmed up."""
    engine = harness.engine()
    engine.warm_up()
    return engine


def sampled(seed: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True, **more)


@pytest.mark.slow
def test_random_schedules(served):
    """Two hundred requests that arrive, are cancelled and run out of pages at random: every finished output is the
    request's own, every cancelled one the beginning of it, and at the end every page is free."""
    cases = harness.random_requests(200, seed=5)
    want = harness.run_alone(cases)
    before = served.metrics
    requests = harness.drive(served, cases, np.random.default_rng(7))
    after = served.metrics
    harness.check_outcomes(requests, want)
    # the schedule was as wild as it was meant to be
    assert {r.finish_reason for r in requests} == {"cancelled", "stop", "length", "context"}
    assert after.preemptions - before.preemptions >= 2
    assert after.prefix_hits - before.prefix_hits >= 5 and after.prefix_evicted > before.prefix_evicted
    assert after.batch_fill > 0.5 and sum(after.accepted) > 0
    assert len({tuple(ids) for ids, _ in want}) > 150
    harness.check_all_free(served)


def test_a_preempted_request_is_recomputed_with_the_same_output(served):
    """Three requests that fit when they start and not when they have grown: the newest gives way and comes back."""
    cases = [(prompt(30, 1), sampled(3), 50), (prompt(31, 2), GREEDY, 50), (prompt(29, 3), sampled(4), 50),
             (prompt(9, 4), GREEDY, 5)]  # fmt: skip
    requests = [served.submit(p, s, max_new_tokens=n) for p, s, n in cases]
    served.run()
    assert [harness.outcome(r) for r in requests] == harness.run_alone(cases)
    assert requests[0].preemptions == 0 and sum(r.preemptions for r in requests) > 0
    harness.check_all_free(served)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_cached_prefix_changes_nothing(on_host):
    """A request that starts from a snapshot gets a cold run's tokens; hits and bytes are counted."""
    served = harness.engine(prefix_on_host=on_host)
    text = prompt(48, 11)
    cases = [(text, sampled(1), 6), (text + prompt(9, 12), GREEDY, 12), (text[:40] + prompt(20, 13), sampled(5), 12),
             (text, sampled(1), 6), (prompt(48, 14), GREEDY, 4)]  # fmt: skip
    requests = []
    for p, s, n in cases:
        requests.append(served.submit(p, s, max_new_tokens=n))
        served.run()
    assert [harness.outcome(r) for r in requests] == harness.run_alone(cases)
    # snapshots lie at 16, 32, 48; a prompt that is one whole prefix still has a last token to run
    assert [r.cached_tokens for r in requests] == [0, 48, 32, 32, 0]
    m = served.metrics
    assert (m.prefix_lookups, m.prefix_hits, m.prefix_tokens) == (5, 3, 112) and m.prefix_hit_rate == 0.6
    assert m.prefix_bytes == m.prefix_entries * served._loop.snapshot_bytes and m.pages_used == m.pages_cached > 0
    entry = next(iter(served._loop.scheduler.ranks[0].prefixes._entries.values()))
    assert isinstance(jax.tree.leaves(entry.snapshot)[0], np.ndarray if on_host else jax.Array)
    harness.check_all_free(served)


def test_a_restored_state_is_the_cold_state_bit_for_bit(served):
    """Everything a later step can read, after a prefill from a snapshot and after a cold one."""
    text = prompt(61, 21)
    seen = []
    for hit in (False, True):
        served.drop_prefixes()
        if hit:
            served.submit(text[:48] + prompt(3, 22), max_new_tokens=1)
            served.run()
            served.submit(prompt(40, 23), max_new_tokens=3)  # other requests have used the slot since
            served.run()
        request = served.submit(text, max_new_tokens=1)
        served.step()
        seat = request.seat
        while request.seat is not None:
            served.step()
        assert request.cached_tokens == (48 if hit else 0)
        tables = PageTables.shared(jnp.asarray(seat.table[None]), harness.CONFIG)
        seen.append(model_harness.visible(served._loop.state, seat.slot, len(text), tables, 0, harness.CONFIG))
    cold, warm = seen
    assert cold.keys() == warm.keys() and len(cold) > 8
    for name in cold:
        np.testing.assert_array_equal(cold[name], warm[name], err_msg=name)
    harness.check_all_free(served)


def test_running_requests_share_pages(served):
    text = prompt(40, 31)
    first = served.submit(text, GREEDY, max_new_tokens=30)
    while not first.token_ids:
        served.step()
    others = [served.submit(text + prompt(3, 32 + i), sampled(i), max_new_tokens=12) for i in range(3)]
    served.step()
    pages = [set(r.seat.pages) for r in (first, *others)]
    assert all(len(pages[0] & p) == 40 // PAGE for p in pages[1:])
    assert served.metrics.pages_used == len(set.union(*pages))
    served.run()
    want = harness.run_alone([(r.prompt, r.sampling, r.max_new_tokens) for r in (first, *others)])
    assert [harness.outcome(r) for r in (first, *others)] == want
    harness.check_all_free(served)


def test_the_least_recently_used_prefix_goes_first():
    size = harness.engine()._loop.snapshot_bytes
    served = harness.engine(prefix_bytes=3 * size)
    run = lambda ids: (served.submit(ids, GREEDY, max_new_tokens=1), served.run())[0]
    a, b, c, d = (prompt(16, 40 + i) for i in range(4))
    for ids in (a, b, c):
        run(ids + [9])
    assert run(a + [8]).cached_tokens == 16  # used again: now b is the oldest
    run(d + [9])
    m = served.metrics
    assert (m.prefix_entries, m.prefix_bytes) == (3, 3 * size)
    assert [run(x + [7]).cached_tokens for x in (a, c, d)] == [16, 16, 16] and run(b + [7]).cached_tokens == 0
    assert not harness.engine(prefix_bytes=size - 1)._loop.keeps_prefixes
    harness.check_all_free(served)


def test_a_step_is_dispatched_before_the_last_one_is_read(served, monkeypatch):
    """Steady state: no implicit transfer, nothing sent to the device unless pages grow, tokens read one step late."""
    events = []
    decode, read = served._loop.steps.decode, jax.device_get
    monkeypatch.setattr(served._loop.steps, "decode", lambda *a: (events.append("dispatch"), decode(*a))[1])
    monkeypatch.setattr(jax, "device_get", lambda x: (events.append("read"), read(x))[1])
    requests = [served.submit(prompt(8 * (i + 1), 50 + i), GREEDY, max_new_tokens=40) for i in range(2)]
    while not all(len(r.token_ids) > 3 for r in requests):
        served.step()
    events.clear()
    before = served.metrics
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="transfer"):
            jnp.zeros(3) + np.arange(3)  # the guard is real
        for _ in range(12):
            served.step()
    after = served.metrics
    assert events == ["dispatch", "read"] * 12
    assert len(served._loop.flights) == 1  # one step is always out
    grown = sum(len(r.token_ids) for r in requests) // PAGE + 2
    assert after.batches_built - before.batches_built <= grown and after.batches_reused > before.batches_reused
    for r in requests:
        r.cancel()
    served.run()
    harness.check_all_free(served)


def test_reused_batches_change_nothing(served):
    """Batches kept on the device, and batches sent anew in every step: the same tokens."""
    cases = harness.random_requests(10, seed=8)
    outcomes = []
    for reuse in (True, False):
        engine = harness.engine(reuse_batches=reuse)
        requests = [engine.submit(p, s, max_new_tokens=n) for p, s, n in cases]
        engine.run()
        outcomes.append([harness.outcome(r) for r in requests])
        m = engine.metrics
        assert m.batches_built + m.batches_reused == m.decode_steps and (m.batches_reused > 0) == reuse
    assert outcomes[0] == outcomes[1]


def test_packed_batches_arrive_as_they_were(served):
    """Every field of the sampling parameters and every table entry survives the one transfer."""
    request = served.submit(prompt(20, 61), SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, seed=2**32 - 1,
                            stop_ids=(7, 8), min_tokens=3, forced=True), max_new_tokens=4)  # fmt: skip
    served.step()
    batch = jax.device_get(served._loop.batches.decode([None, request.seat], 5))
    want = model_harness.pack_sampling([None, request.sampling], [0, 20], harness.CONFIG.eos_token_id)
    for field in dataclasses.fields(want):
        np.testing.assert_array_equal(getattr(batch.sampling, field.name), getattr(want, field.name), err_msg=field.name)
    assert batch.slots.tolist() == [-1, request.seat.slot]
    for table in (*batch.tables.global_kv.values(), *batch.tables.index.values()):
        assert table.tolist() == [[0] * 5, [*request.seat.pages, 0, 0][:5]]
    served.run()


def test_nothing_compiles_after_warm_up(served):
    """Batches of every size, prompts of every length, prefix hits, preemption, cancels, a reload."""
    served.drop_prefixes()
    watch = CompileWatch()
    requests = [served.submit(p, s, max_new_tokens=n) for p, s, n in harness.random_requests(14, seed=3)]
    requests += [served.submit(prompt(30, i), sampled(i), max_new_tokens=50) for i in range(3)]
    for i in range(30):
        served.step()
        if i == 6:
            requests[2].cancel()
        if i == 12:
            served.reload(harness.params())
    served.run()
    again = served.submit(prompt(30, 0) + [5], GREEDY, max_new_tokens=3)
    served.run()
    assert again.cached_tokens > 0 and sum(r.preemptions for r in requests) > 0
    assert watch.count == 0
    harness.check_all_free(served)


def test_greedy_batches_have_their_own_programs():
    """With `greedy_steps` a batch without a stochastic row runs without sampling code, and changes over when one joins."""
    served = harness.engine(greedy_steps=True, batch_buckets=(4,))
    served.warm_up()
    watch = CompileWatch()
    cases = [(prompt(9, 71), GREEDY, 14), (prompt(12, 72), sampled(2), 4), (prompt(9, 73), GREEDY, 9)]
    first = served.submit(*cases[0][:2], max_new_tokens=14)
    variants = set()
    decode = served._loop.steps.decode
    served._loop.steps.decode = lambda state, batch: (variants.add(batch.sampling.draws), decode(state, batch))[1]
    for _ in range(4):
        served.step()
    assert variants == {False}
    rest = [served.submit(p, s, max_new_tokens=n) for p, s, n in cases[1:]]
    served.run()
    assert variants == {False, True} and watch.count == 0
    assert [harness.outcome(r) for r in (first, *rest)] == harness.run_alone(cases)


def test_prefill_does_not_starve_decoding(served):
    """While prompts of many chunks run, every step still gives the running request its turn; and the other way round."""
    running = served.submit(prompt(5, 81), GREEDY, max_new_tokens=60)
    while len(running.token_ids) < 2:
        served.step()
    long = served.submit(prompt(90, 82), GREEDY, max_new_tokens=2)
    before, count = served.metrics, len(running.token_ids)
    while not long.token_ids:
        served.step()
    after = served.metrics
    steps = after.steps - before.steps
    assert after.prefill_steps - before.prefill_steps == 6 and steps <= 8
    assert len(running.token_ids) - count >= steps
    for r in (running, long):
        r.cancel()
    served.run()
    harness.check_all_free(served)


def test_the_loop_in_the_readme(capsys):
    """It runs as it stands, but for the sizes."""
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Engine(" in block)
    sizes = "max_requests=64, max_context=32768, pages=8192"
    assert code.count(sizes) == 1 and len(code.splitlines()) <= 20
    names = {"DIR": harness.folder(), "SHAPE": harness.SHAPE}
    exec(code.replace(sizes, "**SHAPE"), names)
    reasons = [r.finish_reason for r in names["requests"]]
    assert (
        reasons[0] in ("length", "stop", "context")
        and reasons[1] in ("cancelled", "stop")
        and all(r.error is None for r in names["requests"])
    )
    assert "dsv41_tokens_per_s" in capsys.readouterr().out


def test_the_benchmark_measures_steady_steps(monkeypatch):
    """`bench.engine` on this engine: tokens and batches add up, and lost tokens or a compile are refused."""
    from bench import engine as bench_engine

    def build(args, workload, params, reuse):
        served = harness.engine(reuse_batches=reuse)
        for i in range(2):
            served.submit(prompt(PAGE, 90 + i), SamplingParams(forced=True, ignore_eos=True))
        while served.metrics.decode_steps < 3:
            served.step()
        return served

    monkeypatch.setattr(bench_engine, "build", build)
    args = types.SimpleNamespace(steps=5, rounds=2, warmup=1, gamma=harness.CONFIG.dspark_block_size)
    workload = types.SimpleNamespace(batch=2)
    reused = bench_engine.measure(args, workload, None, CompileWatch(), True)
    anew = bench_engine.measure(args, workload, None, CompileWatch(), False)
    assert reused["batches_sent"] + reused["batches_reused"] == 10 == anew["batches_sent"] and reused["batches_reused"] >= 2
    assert 0 < reused["host_ms_per_step"] < reused["step_ms_max"]
    with pytest.raises(SystemExit, match="expected 60 tokens a round, got .40, 40."):
        bench_engine.measure(args, types.SimpleNamespace(batch=3), None, CompileWatch(), True)
