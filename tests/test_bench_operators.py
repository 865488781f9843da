"""The operator benchmark: it knows every operator, and one run on the CPU writes what a result needs."""

import json

import numpy as np
import pytest

from bench import common, operators
from dsv41_jax.options import OPERATORS


def test_every_operator_of_the_step_has_a_benchmark():
    known = {name for o in operators.OPERATORS for name in (o.name, o.function)}
    assert set(OPERATORS) - known == {"experts"}  # bench.experts: one set of weights is 1.8 GB


def test_one_operator_runs_and_writes_its_floor(tmp_path):
    path = tmp_path / "operators.json"
    operators.main(["hyper_coefficients", "--spec", "verify", "--out", str(path)])
    got = json.loads(path.read_text())
    (record,) = got["results"]  # the kernel does not take a CPU
    assert (record["operator"], record["spec"]["rows"], record["implementation"]) == ("hyper_coefficients", 384, "reference")
    assert record["equals_definition"] and record["bytes"] == 4 * (384 * (24 * 4 + 1) + 24 + 3)
    assert record["min_us"] <= record["median_us"] <= record["max_us"]
    assert record["ratio"] == pytest.approx(record["median_us"] / record["floor_us"], rel=1e-2)
    assert record["floor_us"] == pytest.approx(
        max(record["bytes"] / got["peaks"]["copy_gbps"] * 1e-3, record["flops"] / got["peaks"]["bf16_tflops"] * 1e-6), rel=1e-2
    )
    assert {"device", "versions", "commit", "utc"} <= set(got)


def test_pools_are_updated_in_place(tmp_path):
    path = tmp_path / "operators.json"
    operators.main(["global_producer", "--spec", "tiny_r1", "--min-rows", "1", "--out", str(path)])
    (record,) = json.loads(path.read_text())["results"]  # the kernels do not take a CPU
    assert record["implementation"] == "reference" and record["equals_definition"]
    row = 2 * 64 + 4 * 16 + 17 + 36 + 17  # value, angles, targets, its entry and its key
    assert record["bytes"] == 15 * row + 2 * (32 * 64 + 64 + 32)


def test_what_comes_with_the_pools_is_compared_too(monkeypatch):
    plain = operators.Operator.call

    def off(operator, spec, impl):
        """The definition, its queries doubled when it is measured rather than asked."""
        calls.append(impl)
        function = plain(operator, spec, impl)
        return function if len(calls) % 2 else lambda *a, **k: (function(*a, **k)[0], 2 * function(*a, **k)[1])

    producer = next(o for o in operators.OPERATORS if o.name == "qkv_producer")
    calls, spec, peaks = [], producer.module("specs").SPECS[1], common.Peaks(1, 1, 1)
    (record,) = operators.measure(producer, spec, peaks, ["reference"])
    assert record["equals_definition"]
    monkeypatch.setattr(operators.Operator, "call", off)
    calls.clear()
    assert not operators.measure(producer, spec, peaks, ["reference"])[0]["equals_definition"]


def test_agreement_of_pools_counts_what_changed():
    before, want = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    want[:100] = 7
    got = want.copy()
    got[3] = 6
    assert operators.agrees_in_place((got,), (want,), (before,), 0.01)
    assert not operators.agrees_in_place((got,), (want,), (before,), 0.009)
    got[-1] = 1
    assert not operators.agrees_in_place(got, want, before, 0.01)


def test_unknown_operator_is_refused(capsys):
    with pytest.raises(SystemExit):
        operators.main(["ruoter"])
    assert "ruoter" in capsys.readouterr().err


def test_kernel_times_need_a_gpu(capsys):
    with pytest.raises(SystemExit):
        operators.main(["router", "--profile"])
    assert "expected a GPU" in capsys.readouterr().err


def test_implementations_are_chosen_by_name(capsys):
    router = next(o for o in operators.OPERATORS if o.name == "router")
    assert router.names() == ["two_kernels", "one_kernel", "reference"]
    with pytest.raises(SystemExit):
        operators.main(["router", "--impl", "hopper"])
    assert "one_kernel" in capsys.readouterr().err
