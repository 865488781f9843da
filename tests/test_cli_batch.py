"""`dsv41 generate --prompts --out`: results that survive whatever ends a run, and runs that go on from them."""

import json
import os
import re
import signal

import engine_harness as harness
import jax
import numpy as np
import pytest

from dsv41_jax import checkpoint, cli, engine
from dsv41_jax.sampling import SamplingParams

pytestmark = pytest.mark.timeout(300)
NEW, COUNT = 7, 11
LENGTHS = [9, 3, 16, 1, 12, 16, 5, 8, 2, 14, 6]
PROMPTS = [harness.prompt(n, 100 + n + i) for i, n in enumerate(LENGTHS)]
SAMPLING = SamplingParams(temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def expected():
    results = harness.run_alone([(p, SAMPLING, NEW) for p in PROMPTS])
    assert {reason for _, reason in results} <= {"length", "stop"} and len({tuple(t) for t, _ in results}) == COUNT
    return results


@pytest.fixture(autouse=True)
def interruptible():
    """A shell starts a background job with SIGINT ignored, and python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """run(*more arguments) -> (exit code, stderr) of the command over the usual prompts and OUT = tmp_path/out.jsonl."""
    monkeypatch.setenv("COLUMNS", "140")  # wide enough for the whole progress line
    lines = [json.dumps({"prompt_ids": p}) for p in PROMPTS]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def call(*more, progress: bool = False):
        argv = ["generate", "--checkpoint", harness.folder(), "--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl",
                "--max-new-tokens", NEW, "--temperature", SAMPLING.temperature, "--seed", SAMPLING.seed, "--precision", "float32",
                "--batch", 4, *([] if progress else ["--no-progress"]), *more]  # fmt: skip
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as e:
            code = e.code
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err

    return call


@pytest.fixture
def submitted(monkeypatch):
    """The prompts that were given to an engine."""
    seen, submit = [], engine.Engine.submit

    def spy(self, prompt_ids, *args, **kwargs):
        seen.append(list(prompt_ids))
        return submit(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(engine.Engine, "submit", spy)
    return seen


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def check_complete(tmp_path, expected):
    found = records(tmp_path)
    assert [r["index"] for r in found] == list(range(COUNT)) and [r["prompt_ids"] for r in found] == PROMPTS
    assert [(r["token_ids"], r["finish_reason"]) for r in found] == expected
    assert all(r["text"] == harness.tokenizer().decode(r["token_ids"]) for r in found)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_a_whole_run_and_what_is_left_of_one(run, submitted, expected, tmp_path, monkeypatch):
    code, err = run()
    assert code == 0 and f"{COUNT} requests (" in err and f" {sum(len(t) for t, _ in expected)} tokens in " in err
    check_complete(tmp_path, expected)
    assert len(submitted) == COUNT
    whole = (tmp_path / "out.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    # some lines are missing, the others in any order, the last one cut in half
    (tmp_path / "out.jsonl").write_text("".join([lines[7], lines[2], *lines[8:10], lines[0]]) + lines[4][:50])
    submitted.clear()
    code, err = run(progress=True)
    assert code == 0 and f"out.jsonl: 5 of {COUNT} finished before\n" in err and "6 requests (" in err
    assert re.search(r"generating \S+ 6/6 \d+ tokens/s, 0 running, 0 waiting, \d+% of drafts accepted", err)
    assert submitted == [PROMPTS[i] for i in (1, 3, 4, 5, 6, 10)]
    assert (tmp_path / "out.jsonl").read_text() == whole
    # nothing left to do: no weights are loaded
    monkeypatch.setattr(checkpoint, "load", None)
    code, err = run()
    assert code == 0 and err.splitlines() == [f"{tmp_path}/out.jsonl: {COUNT} of {COUNT} finished before"]
    assert (tmp_path / "out.jsonl").read_text() == whole


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_loses_nothing_that_was_finished(number, code, run, submitted, expected, tmp_path, monkeypatch):
    ends = engine.Request.close

    def close(request):
        ends(request)
        if (tmp_path / "out.jsonl").read_text().count("\n") == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(engine.Request, "close", close)
        got, err = run()
    kept = records(tmp_path)
    assert got == code and 3 <= len(kept) < COUNT
    assert f"dsv41: interrupted; {COUNT - len(kept)} of {COUNT} are left, the same command goes on\n" in err
    assert all((r["token_ids"], r["finish_reason"]) == expected[r["index"]] for r in kept)
    assert signal.getsignal(number) is before
    submitted.clear()
    assert run()[0] == 0 and len(submitted) == COUNT - len(kept)
    check_complete(tmp_path, expected)


def test_a_second_signal_ends_it_at_once(run, expected, tmp_path, monkeypatch):
    """Signals are not swallowed for good: the second one raises, and the lines are still there."""
    ends = engine.Request.close

    def close(request):
        ends(request)
        if request.finish_reason != "cancelled":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Request, "close", close)
        patch.setattr(engine.Engine, "shutdown", lambda self, drain, wait: None)
        code, err = run()
    assert code == 130
    assert err == "dsv41: stopping after this step; once more to stop at once\ndsv41: interrupted\n"
    assert run()[0] == 0
    check_complete(tmp_path, expected)


def test_a_failed_request_is_told_and_run_again(run, submitted, expected, tmp_path, monkeypatch):
    token = next(t for t in PROMPTS[4] if all(t not in p + ids for i, (p, (ids, _)) in enumerate(zip(PROMPTS, expected, strict=True))
                                              if i != 4))  # fmt: skip
    leaves, treedef = jax.tree.flatten(harness.params())
    poisoned = jax.tree.unflatten(treedef, leaves)
    poisoned.embed[...] = harness.params().embed[...].at[token].set(np.nan)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load", lambda *_, **__: poisoned)
        code, err = run()
    assert code == 1 and "dsv41: prompt 4: request 4: a logit that decided a token was not finite\n" in err
    found = records(tmp_path)
    assert found[4]["finish_reason"] == "error" and "not finite" in found[4]["error"] and found[4]["token_ids"] == []
    assert [(r["token_ids"], r["finish_reason"]) for r in found[:4] + found[5:]] == expected[:4] + expected[5:]
    submitted.clear()
    assert run()[0] == 0 and submitted == [PROMPTS[4]]
    check_complete(tmp_path, expected)


FOREIGN = {
    "another file": ("hello\nworld\n", "out.jsonl:1: expected a result of an earlier run to go on from, got hello"),
    "other json": ('{"index": 0}\n{"index": 1}\n', "out.jsonl:1: expected a result of an earlier run"),
    "an index beyond": ('{"index": 11, "prompt_ids": [1], "settings": "x"}\n\n', "out.jsonl:1: expected a result of an earlier run"),
    "another prompt": (json.dumps({"index": 0, "prompt_ids": PROMPTS[1], "settings": "x", "finish_reason": "stop"}) + "\n",
                       "out.jsonl:1: expected results of these prompts with these settings"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_left_alone(name, run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "load", None)
    text, message = FOREIGN[name]
    (tmp_path / "out.jsonl").write_text(text)
    code, err = run()
    assert code == 2 and message in err and err.count("\n") == 1
    assert (tmp_path / "out.jsonl").read_text() == text


def test_other_settings_do_not_mix(run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "load", None)
    from dsv41_jax import cli_batch

    settings = []
    fingerprint = cli_batch._fingerprint
    monkeypatch.setattr(cli_batch, "_fingerprint", lambda *a: settings.append(fingerprint(*a)) or settings[-1])
    monkeypatch.setattr(cli_batch, "_serve", None)
    for more in (
        [],
        ["--seed", 6],
        ["--stop-id", 9],
        ["--gamma", 1],
        ["--max-context", 30],
        ["--top-p", 0.5],
        ["--ignore-eos"],
    ):
        record = {"index": 0, "prompt_ids": PROMPTS[0], "settings": settings[0] if settings else "", "finish_reason": "stop"}
        (tmp_path / "out.jsonl").write_text(json.dumps(record) + "\n")
        code, err = run(*more)
        assert code == 2 and "with these settings, got another run's" in err
    assert len(set(settings)) == 7
