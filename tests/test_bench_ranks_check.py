"""The check of the step over ranks: what it compares is found when it differs; one run over two CPU devices, every bit equal."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from test_bench_ranks import FLAGS

from bench import ranks_check
from bench.ranks_check import Record


@dataclasses.dataclass
class Output:
    tokens: np.ndarray
    count: np.ndarray
    accepted: np.ndarray
    finite: np.ndarray
    confidence: np.ndarray


def output(token: int = 5, confidence: float = 0.5) -> Output:
    return Output(np.array([[token, 1]]), np.array([2]), np.array([1]), np.array([True]), np.array([[confidence]], np.float32))


def test_one_bit_of_one_page_is_seen():
    pools = [jnp.arange(60, dtype=jnp.uint8).reshape(3, 20), jnp.ones((4, 2, 3), jnp.float32), jnp.arange(4, dtype=jnp.int32)]
    changed = [pools[0].at[1, 7].add(1), pools[1].at[2, 1, 0].set(1 + 2**-23), pools[2]]
    a, b = (ranks_check._digest()(p) for p in (pools, changed))
    assert [list(np.flatnonzero(x != y)) for x, y in zip(a, b, strict=True)] == [[1], [2], []]


def test_differences_are_counted():
    digests = [np.arange(4, dtype=np.uint32)]
    want = Record([output(), output()], digests)
    same = ranks_check.compare(want, Record([output(), output()], digests))
    assert (same["steps_with_equal_tokens"], same["equal_slots_and_pages"], same["tokens"], same["accepted_drafts"]) == (2, 1.0, 4, 2)
    other = ranks_check.compare(want, Record([output(), output(token=6, confidence=0.75)], [digests[0] + [0, 0, 0, 1]]))
    assert (other["steps_with_equal_tokens"], other["equal_slots_and_pages"]) == (1, 0.75)
    assert other["largest_confidence_difference"] == 0.25


def test_wrong_ranks_are_refused():
    with pytest.raises(ValueError, match="at least 64 devices for 64 ranks"):
        ranks_check.main(["--ranks", "64"])
    with pytest.raises(ValueError, match="layers: expected"):
        ranks_check.main(["--ranks", "1", "--layers", "99"])


@pytest.mark.slow
def test_two_ranks_equal_one_device_in_every_bit(tmp_path):
    path = tmp_path / "check.json"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS.replace("=4", "=2"))
    command = [sys.executable, "-m", "bench.ranks_check", "--preset", "tiny", "--layers", "3", "--ranks", "2",
               "--exchanges", "gather/2", "--out", str(path)]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    got = json.loads(path.read_text())
    r = got["result"]["gather/2"]
    assert (r["steps"], r["steps_with_equal_tokens"], r["equal_slots_and_pages"]) == (3, 3, 1.0)
    assert r["largest_confidence_difference"] == 0.0 and r["all_finite"] and r["tokens"] > 9
    assert got["protocol"]["precision"] == "released"
