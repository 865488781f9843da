# ruff: noqa: F401, F811 (fixtures are imported by name)
"""inspect, make-checkpoint, demo and the program itself."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cli_harness import SHORT, assert_refused, broken, run, short

from dsv41_jax.checkpoint_listing import SINGLE
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.presets import TINY


def test_inspect_names_the_totals_of_the_release(run):
    code, out, err = run("inspect", "--preset", "flash", "--batch", 64, "--context", 32768, "--ranks", 4)
    assert code == 0 and err == ""
    assert "552 B backbone + 197 B engram" in out and "890 B per context token" in out
    for part in ("24", "REINDEX", "within candidates", "routed experts", "73,999,319,040", "h200", "b300", "fits", "sparse_attention"):
        assert part in out, part


def test_inspect_json_of_a_checkpoint(run, short):
    code, out, _ = run("inspect", "--checkpoint", short, "--json", "--batch", 2)
    facts = json.loads(out)
    assert code == 0 and facts["checkpoint_problems"] == []
    assert facts["workload"] == {"batch_per_rank": 2, "context": 64, "ranks": 1}
    assert facts["config"]["num_hidden_layers"] == 2 and [s["kind"] for s in facts["schedule"]] == ["SWA", "FULL1", "SWA"]


def test_inspect_shows_a_broken_checkpoint_and_fails(run, broken):
    (broken / SINGLE).write_bytes((broken / SINGLE).read_bytes()[:-1])
    code, out, err = run("inspect", "--checkpoint", broken)
    assert code == 2 and "Layer schedule" in out and err.count("\n") == 1 and "truncated" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect"], "one of the arguments --checkpoint --preset is required"),
        (["inspect", "--preset", "huge"], "--preset: expected one of ['flash', 'tiny'], got 'huge'"),
        (["inspect", "--preset", "flash", "--ranks", "7"], "ranks: expected a divisor of n_routed_experts = 384, got 7"),
        (["inspect", "--preset", "tiny", "--context", "9999"], "context: expected at most 4096 tokens, got 9999"),
        (["inspect", "--checkpoint", "/nowhere"], "no such checkpoint folder"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_bad_commands(run, argv, message):
    assert_refused(run(*argv), message)


def test_make_checkpoint(run, tmp_path):
    code, out, err = run("make-checkpoint", "--preset", "tiny", "--seed", 4, "--out", tmp_path / "made")
    assert code == 0 and out == "" and "MB" in err
    want = make_checkpoint(TINY, tmp_path / "direct", seed=4)
    assert (tmp_path / "made" / SINGLE).read_bytes() == (want / SINGLE).read_bytes()
    code, _, _ = run("make-checkpoint", "--config", tmp_path / "made" / "config.json", "--seed", 4, "--out", tmp_path / "again")
    assert code == 0 and (tmp_path / "again" / SINGLE).read_bytes() == (want / SINGLE).read_bytes()


def test_bad_make_checkpoint_leaves_nothing(run, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    target = ["--out", tmp_path / "x"]
    assert_refused(run("make-checkpoint", "--preset", "tiny", "--out", tmp_path / "there"), "exists already")
    assert_refused(run("make-checkpoint", "--preset", "none", *target), "--preset: expected one of")
    assert_refused(run("make-checkpoint", "--config", tmp_path / "bad.json", *target), "must name every size")
    assert_refused(run("make-checkpoint", "--preset", "tiny", "--seed", "-1", *target), "--seed: expected an integer >= 0")
    assert_refused(run("make-checkpoint", "--preset", "tiny", "--shard-gb", "0", *target), "--shard-gb: expected > 0")
    assert_refused(run("make-checkpoint", "--preset", "tiny"), "--out")
    assert sorted(os.listdir(tmp_path)) == ["bad.json", "there"]


def test_demo_is_generate_on_a_fresh_tiny_checkpoint(run, monkeypatch):
    from dsv41_jax import make_checkpoint as module

    made = []

    def make_short(config, out, *, seed):
        assert config == TINY
        made.append(make_checkpoint(SHORT, out, seed=seed))
        return made[-1]

    monkeypatch.setattr(module, "make_checkpoint", make_short)  # two layers compile sooner than eight
    code, out, err = run("demo", "--max-new-tokens", 5, "--prompt", "the sea")
    assert code == 0 and out.endswith("\n") and "5 tokens; " in err and "random weights" in err
    assert not made[0].exists()


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "dsv41_jax.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for command in ("generate", "score", "inspect", "make-checkpoint", "demo"):
        assert command in done.stdout


@pytest.mark.parametrize("argv", [["inspect", "--preset", "tiny"], ["--help"], ["make-checkpoint", "--preset", "tiny", "--out", "made"]])
def test_closed_output_is_a_reader_that_went_away(tmp_path, argv):
    command = f"exec {sys.executable} -m dsv41_jax.cli {' '.join(argv)} >&-"
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == (["made"] if "made" in argv else [])


def test_a_disk_that_is_too_small_keeps_no_folder(run, tmp_path, monkeypatch):
    """Neither when that is known before anything is written, nor when it shows while writing."""
    from dsv41_jax import make_checkpoint as module

    target = ["make-checkpoint", "--preset", "tiny", "--out", tmp_path / "a" / "b" / "made"]
    full = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_weights", full)
        assert_refused(run(*target), "No space left on device")
    assert os.listdir(tmp_path) == []
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=5))
    assert_refused(run(*target), "5 are free")
    assert os.listdir(tmp_path) == []


IMPLEMENTATIONS = {
    "no default": ("DSV41_IMPL", "garbage", "DSV41_IMPL: expected auto or reference, got 'garbage'"),
    "no implementation": ("DSV41_IMPL_ROUTER", "fast", "DSV41_IMPL_ROUTER: expected one of auto, "),
    "of a GPU": ("DSV41_IMPL_HYPER_COEFFICIENTS", "one_kernel", "one_kernel is for sm_90, sm_100, sm_103, this device is cpu"),
    "no operator": ("DSV41_IMPL_SOFTMAX", "reference", "DSV41_IMPL_SOFTMAX: expected one of DSV41_IMPL_"),
}


@pytest.mark.parametrize("case", IMPLEMENTATIONS)
def test_implementations_are_checked_before_weights_are_loaded(run, short, tmp_path, monkeypatch, case):
    name, value, message = IMPLEMENTATIONS[case]
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("dsv41_jax.checkpoint.load", lambda *_, **__: pytest.fail("weights were loaded"))
    np.save(tmp_path / "ids.npy", np.ones((1, 3), np.int32))
    for argv in (
        ["inspect", "--preset", "tiny"],
        ["generate", "--checkpoint", short, "--prompt-ids", "5"],
        ["score", "--checkpoint", short, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz"],
    ):
        assert_refused(run(*argv), message)
