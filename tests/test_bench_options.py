"""The switches' benchmark: which variants there are, how rounds are compared, and one run on the CPU."""

import dataclasses
import json

import jax
import pytest

from bench import options
from dsv41_jax.options import OPERATORS, DecodeOptions

HERE = {
    "router": (["pairwise", "reference"], {"other": "is for sm_90, this is sm_103"}),
    "sparse_plan": (["bitmap_plan", "reference"], {}),
}


def test_a_variant_differs_in_one_field():
    default = DecodeOptions(implementations=(("sparse_plan", "reference"),))
    found, refused = options.variants(default, {"router": "pairwise", "sparse_plan": "reference"}, HERE)
    assert [v.name for v in found] == [
        "default", options.CONTROL, "fake_balance_experts=1", "router=reference", "sparse_plan=bitmap_plan",
        "reference for every operator",
    ]  # fmt: skip
    assert refused == {"router=other": "is for sm_90, this is sm_103"}
    by_name = {v.name: v.options for v in found}
    assert by_name["fake_balance_experts=1"] == dataclasses.replace(default, fake_balance_experts=True)
    router, plan = by_name["router=reference"], by_name["sparse_plan=bitmap_plan"]
    assert (router.impl("router"), router.impl("sparse_plan")) == ("reference", "reference")
    assert (plan.impl("router"), plan.impl("sparse_plan")) == ("auto", "bitmap_plan")
    assert {by_name["reference for every operator"].impl(op) for op in OPERATORS} == {"reference"}


def test_every_boolean_field_is_toggled():
    fields = {f.name for f in dataclasses.fields(DecodeOptions) if isinstance(getattr(DecodeOptions(), f.name), bool)}
    found, _ = options.variants(DecodeOptions(), {}, {})
    assert {v.field for v in found} - {"", "default_implementation"} == fields


def test_every_operator_lists_its_implementations():
    here = options.implementations_here()
    assert set(here) == set(OPERATORS)
    assert all(fits[-1] == "reference" for fits, _ in here.values())
    assert here["experts"][1]["hopper"] == "is for sm_90, this is cpu"


@pytest.mark.parametrize(
    ("variant", "verdict"),
    [([2.0, 3.1, 2.5], "slower"), ([0.9, 1.9, 1.4], "faster"), ([2.0, 1.9, 2.5], "within the spread")],
)
def test_a_verdict_needs_every_round(variant, verdict):
    got = options.compare([1.0, 2.0, 1.5], variant)
    assert got["verdict"] == verdict
    assert got["step_ms"] == {"median": sorted(variant)[1], "min": min(variant), "max": max(variant)}
    apart = sorted(round(v - d, 4) for v, d in zip(variant, [1.0, 2.0, 1.5], strict=True))
    assert list(got["minus_default_ms"].values()) == [apart[1], apart[0], apart[2]]


def test_names_pick_and_leave_out_variants():
    make = lambda name, field: options.Variant(name, field, None)
    default, router, flag = make("default", ""), make("router=reference", "router"), make("flag=1", "flag")
    assert options.wanted(default, ["flag"], None)
    assert options.wanted(router, ["router"], None) and not options.wanted(router, ["flag"], None)
    assert not options.wanted(flag, None, ["flag=1"]) and options.wanted(flag, None, ["router"])
    with pytest.raises(ValueError, match="rooter"):
        options._check_names([default, router], {}, ["rooter"])


def test_a_variant_that_does_not_fit_costs_the_others_nothing(monkeypatch):
    loads, warmed = [], []

    class Loaded:
        state = "first"

        def load(self):
            loads.append(self.state)
            self.state = "again"

    def warm_up(bench, variant):
        if variant.name in failing:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 80 GB")
        warmed.append((variant.name, bench.state))

    monkeypatch.setattr(options, "warm_up", warm_up)
    found = [options.Variant(name, field, None) for name, field in (("default", ""), ("a", "x"), ("b", "x"))]
    failing = {"a"}
    assert options.warm_up_all(Loaded(), found) == {"a": "does not fit the device beside weights and state"}
    assert warmed == [("default", "first"), ("b", "again")] and loads == [None]
    failing = {"default"}
    with pytest.raises(jax.errors.JaxRuntimeError):
        options.warm_up_all(Loaded(), found)


@pytest.mark.slow
def test_tiny_runs_and_writes_its_result(tmp_path, capsys):
    path = tmp_path / "options.json"
    flags = ["--preset", "tiny", "--layers", "4", "--steps", "3", "--warmup", "1", "--rounds", "3", "--out", str(path)]
    options.main(flags)
    got = json.loads(path.read_text())
    rows = {r["variant"]: r for r in got["results"]}
    assert list(rows) == ["default", options.CONTROL, "fake_balance_experts=1"]  # the CPU has one implementation of each
    for r in rows.values():
        assert len(r["rounds_step_ms"]) == 3
        assert r["step_ms"]["median"] == pytest.approx(sorted(r["rounds_step_ms"])[1], abs=1e-3)
        assert 0 < r["step_ms"]["min"] <= r["step_ms"]["median"] <= r["step_ms"]["max"]
    assert rows["default"]["minus_default_ms"] == {"median": 0, "min": 0, "max": 0}
    assert got["not_taken"]["experts=hopper"] == "is for sm_90, this is cpu"
    assert got["floor_ms"] > 0 and {"device", "versions", "commit", "utc"} <= set(got["environment"])
    assert "fake_balance_experts=1" in capsys.readouterr().out
