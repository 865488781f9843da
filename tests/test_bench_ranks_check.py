"""The check of the step over ranks: what it compares is found and located when it differs; runs over two CPU devices."""

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
from dsv41_jax.cache import PageTables, State
from dsv41_jax.step import DecodeBatch


@dataclasses.dataclass
class Output:
    tokens: np.ndarray
    count: np.ndarray
    accepted: np.ndarray
    finite: np.ndarray
    confidence: np.ndarray


def output(token: int = 5, confidence: float = 0.5) -> Output:
    """Of two requests."""
    two = lambda x, dtype=np.int32: np.array([x, x], dtype)
    tokens = np.array([[5, 1], [token, 1]], np.int32)
    return Output(tokens, two(2), two(1), two(True, bool), np.array([[0.5], [confidence]], np.float32))


def test_one_bit_of_one_page_is_seen():
    pools = [jnp.arange(60, dtype=jnp.uint8).reshape(3, 20), jnp.ones((4, 2, 3), jnp.float32), jnp.arange(4, dtype=jnp.int32)]
    changed = [pools[0].at[1, 7].add(1), pools[1].at[2, 1, 0].set(1 + 2**-23), pools[2]]
    a, b = (ranks_check._digest()(p) for p in (pools, changed))
    assert [list(np.flatnonzero(x != y)) for x, y in zip(a, b, strict=True)] == [[1], [2], []]
    later = ranks_check._digest()([p[1:] for p in pools])  # a row's hash does not depend on where it is
    assert all(np.array_equal(x[1:], y) for x, y in zip(a, later, strict=True))


def test_differences_are_counted_and_located():
    def state(page=0, slot=0):
        """Hashes of three slots and five pages."""
        rows = lambda *a: np.array(a, np.uint32)
        none = rows(0, 0, 0)
        return State((none, rows(slot, 0, 0)), (), {}, {1: rows(0, 0, 0, 0, page)}, {}, rows(0, slot, 0), none, none, none)

    slots, table = np.array([1, 0], np.int32), np.array([[3, 2], [1, 4]], np.int32)
    batch = DecodeBatch(slots, PageTables({2: table}, {2: table}), None)
    want = Record([output(), output()], [state(), state()])
    same = ranks_check.compare(want, want, batch)
    assert same["equal"] and same["first_difference"] is None and (same["tokens"], same["accepted_drafts"]) == (8, 4)
    assert (same["steps_with_equal_tokens"], same["requests_with_equal_tokens"], same["equal_slots_and_pages"]) == (2, 2, 1.0)
    got = Record([output(), output(token=6, confidence=0.75)], [state(page=7), state(page=7, slot=9)])
    other = ranks_check.compare(want, got, batch)
    assert (other["equal"], other["steps_with_equal_tokens"], other["requests_with_equal_tokens"]) == (False, 1, 1)
    assert (other["equal_slots_and_pages"], other["largest_confidence_difference"]) == (round(1 - 3 / 23, 6), 0.25)
    first = other["first_difference"]
    assert first == {"step": 0, "leaf": "index[1]", "row": 4, "request": 1, "leaves": {"index[1]": "1 of 5"}}
    later = ranks_check.compare(want, Record(got.outputs, [state(), state(page=7, slot=9)]), batch)["first_difference"]
    # as a step computes them: the drafts, layer 1, the registers, the tokens
    assert list(later["leaves"]) == ["confidence", "window[1]", "index[1]", "length", "tokens"] and later["step"] == 1
    assert ranks_check._request("window[1]", 0, batch) == 1 and ranks_check._request("length", 2, batch) is None


def test_wrong_ranks_are_refused():
    with pytest.raises(ValueError, match="at least 64 devices for 64 ranks"):
        ranks_check.main(["--ranks", "64"])
    with pytest.raises(ValueError, match="layers: expected"):
        ranks_check.main(["--ranks", "1", "--layers", "99"])


# The command, and in the same process (nothing compiles again) the ranks with two experts of rank 1 exchanged.
TWO_RANKS = """
import json, sys
import jax, numpy as np
from bench import ranks_check
from dsv41_jax.params import flat_paths

argv = ["--preset", "tiny", "--layers", "3", "--ranks", "2", "--exchanges", "gather/2", "--out", sys.argv[1]]
ranks_check.main(argv)
check = ranks_check.Check(ranks_check.parse(argv))
want, params = check.alone(check.params()), check.params(check.mesh)
leaves = flat_paths(params)
for path in [p for p in leaves if p.startswith("layers.0.ffn.experts.")]:
    a, n = np.array(leaves[path]), len(leaves[path])
    a[[n // 2, n // 2 + 1]] = a[[n // 2 + 1, n // 2]]
    leaves[path] = jax.device_put(a, leaves[path].sharding)
wrong = jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))
slots = [b.slots.tolist() for b in check.batches()]
print(json.dumps({"slots": slots, **check.compare(want, check.ranks("gather/2", wrong))}))
"""


@pytest.mark.slow
def test_two_ranks_give_what_one_device_gives_each_and_a_wrong_expert_is_found(tmp_path):
    path = tmp_path / "check.json"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS.replace("=4", "=2"))
    command = [sys.executable, "-c", TWO_RANKS, str(path)]
    done = subprocess.run(command, env=env, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    got = json.loads(path.read_text())
    assert got["protocol"]["precision"] == "released"
    result = got["result"]["gather/2"]
    assert result["equal"] and len(result["ranks"]) == 2 and result["equal_slots_and_pages"] == 1.0
    assert result["tokens"] == sum(r["tokens"] for r in result["ranks"]) > 9 and result["requests"] == 4
    for r in result["ranks"]:
        assert (r["equal"], r["steps"], r["steps_with_equal_tokens"], r["equal_slots_and_pages"]) == (True, 3, 3, 1.0)
        assert r["requests_with_equal_tokens"] == r["requests"] == 2
        assert r["largest_confidence_difference"] == 0.0 and r["all_finite"] and r["first_difference"] is None
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert not wrong["equal"] and wrong["equal_slots_and_pages"] < 1
    for r, slots in zip(wrong["ranks"], wrong["slots"], strict=True):
        # layer 0's experts are wrong, so the first cache that shows it is layer 1's, in the step that first asks for one
        first = r["first_difference"]
        assert (r["equal"], first["leaf"]) == (False, "window[1]") and first["step"] in (0, 1)
        assert slots[first["request"]] == first["row"] and "window[0]" not in first["leaves"]


def test_the_command_fixes_what_products_are_chosen_by(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    ranks_check._fix_products()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=4 --xla_gpu_enable_triton_gemm=false"
