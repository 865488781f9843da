"""The report: its numbers are those of the files, what is missing is named, what is broken is refused."""

import copy
import json
import re

import pytest

from bench import report, results_files
from bench.charts import lines

ENVIRONMENT = {
    "device": "NVIDIA H200", "driver": "580.1", "versions": {"jax": "0.11.2", "triton": "3.6.0", "numpy": "2"},
    "commit": "0123456789abcdef", "modified": None, "seed": 0, "utc": "2026-11-30T10:00:00Z",
}  # fmt: skip
PROTOCOL = {
    "preset": "flash-rank", "layers": ["SWA", "FULL2"], "batch": 64, "context": 32768, "capacity": 33792, "gamma": 5,
    "implementations": {"router": "pairwise", "experts": "reference"},
}  # fmt: skip
RESULT = {
    "step_ms": 82.6559, "floor_ms": 29.0283, "ratio": 2.8474, "rounds_step_ms": [82.6559, 83.2931, 79.9817],
    "tps_per_request": 72.59, "tps_aggregate": 4645.77, "host_ms_per_step": {"median": 0.31}, "memory_gb": {"peak_in_use": 102.2},
    "floor": {"rows": [{"op": "routed experts", "count": 2, "us": 450.5}, {"op": "mHC site", "count": 4, "us": 12.0}]},
}  # fmt: skip
DECODE = {"benchmark": "decode", "environment": ENVIRONMENT, "protocol": PROTOCOL, "result": RESULT}


def operator(name, spec, implementation, median, **more):
    return {"operator": name, "spec": {"name": spec, "goal_us": 16}, "implementation": implementation, "median_us": median,
            "min_us": median - 1, "max_us": median + 2, "floor_us": 4.0, "equals_definition": True, "bytes": 16e6, "flops": 1e9,
            **more}  # fmt: skip


PEAKS = {"copy_gbps": 4000.0, "bf16_tflops": 800.0, "fp8_tflops": 1500.0, "notes": []}
OPERATORS = {**ENVIRONMENT, "peaks": PEAKS, "results": [
    operator("select_tokens", "verify", "radix_select", 15.561, device_us=9.25), operator("select_tokens", "verify", "radix_wide", 15.3),
    operator("select_tokens", "verify", "reference", 500.365), operator("select_tokens", "verify", "lax.top_k", 266.1, equals_definition=None),
]}  # fmt: skip
LAYERS = {
    "benchmark": "layers", "environment": ENVIRONMENT, "protocol": PROTOCOL, "measured_step_us": 2000.0, "traced_step_us": 1950.0, "busy_us": 1900.0,
    "parts_us": {"experts": 1500.0, "mHC mixes": 250.0, "mHC expand": 150.0, "gaps": 100.0},
    "kernels": {"experts": 10, "mHC mixes": 4, "mHC expand": 4},
    "by_kernel": {"experts": {"experts_down": {"count": 2.0, "us": 500.0}, "experts_swiglu": {"count": 2.0, "us": 950.0}}},
    "attention": {"classes": {"SWA": {"layers": 2, "us": 120.5, "reference_b300_us": 99.29}}, "mean_us": 120.5},
}  # fmt: skip


def point(axes, ms, **where):
    return {"axes": axes, "asked": {}, "protocol": {**PROTOCOL, **where}, "result": {**RESULT, "step_ms": ms}}


SWEEP = {"benchmark": "sweep", "environment": ENVIRONMENT, "runs": [
    point(["context"], 17.25, context=4096, capacity=5120), point(["context", "batch"], 18.75),
    point(["context"], 31.5, context=1047552, capacity=1048576, batch=32), point(["batch"], 6.125, batch=1),
    {"axes": ["batch"], "asked": {"batch": 256}, "error": "RESOURCE_EXHAUSTED: no memory"},
]}  # fmt: skip
OPTIONS = {"benchmark": "options", "environment": ENVIRONMENT, "protocol": PROTOCOL, "not_taken": {"experts=blackwell": "is for sm_100"},
           "results": [{"variant": v, "field": v and "router", "verdict": "slower",
                        "step_ms": {"median": 18.8, "min": 18.7, "max": 18.9},
                        "minus_default_ms": {"median": 0.815, "min": 0.7, "max": 0.9}} for v in ("default", "router=reference")]}  # fmt: skip
SUMMARY = {"prompts": 64, "identical": 63, "first_divergence": [17], "logits_rms": {"median": 0.00125, "max": 0.0031},
           "kl": {"max": 0.0001}, "same_largest": 0.998}  # fmt: skip
SIDE = {"asked": "reference", "gamma": 5}
AGREEMENT = {"benchmark": "agreement", "environment": ENVIRONMENT, "protocol": {
    "weights": "flash-rank", "layers": ["SWA"], "prompts": "synthetic", "prompt_tokens": [3000, 3072], "max_new_tokens": 32,
    "a": SIDE, "b": {**SIDE, "asked": "auto"}, "notes": ["random weights"],
}, "result": {"statement": "63 of 64 raw outputs identical", "tasks": {"needle": SUMMARY}, "total": SUMMARY}}  # fmt: skip
FILES = {"decode.json": DECODE, "operators.json": OPERATORS, "layers.json": LAYERS, "sweep.json": SWEEP, "options.json": OPTIONS,
         "agreement.json": AGREEMENT}  # fmt: skip


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def rows(text: str, *starts: str) -> list[list[str]]:
    """Cells of the table rows that start with these cells."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in cells if tuple(row[: len(starts)]) == starts]


@pytest.fixture
def text(tmp_path):
    return report.report(results_files.read(write(tmp_path, FILES)), [])


def test_numbers_keep_four_digits():
    assert [report.number(x) for x in (82.6559, 4645.77, 0.00125, None, 0)] == ["82.66", "4646", "0.00125", "-", "0"]
    assert report.spread(1.5, None) == "from 1.5" and report.spread(None, None) == "-"


def test_step_rows_are_the_files(text):
    (row,) = rows(text, "flash-rank, 2 layers; plain XLA: experts", "64", "32768", "33792", "5", "82.66")
    assert row[6:] == ["79.98 .. 83.29", "29.03", "2.847", "72.59", "4646", "0.31", "102.2", "[2](decode.json)"]


def test_operator_rows_are_the_files(text):
    found = rows(text, "select_tokens", "verify")
    assert [r[2:12] for r in found] == [  # 4 us of bytes, 1.25 us of flops
        ["radix_select", "15.56", "14.56 .. 17.56", "9.25", "4", "2.312", "43", "14", "16", "yes"],
        ["radix_wide", "15.3", "14.3 .. 17.3", "-", "4", "3.825", "26", "8", "16", "yes"],
        ["reference", "500.4", "499.4 .. 502.4", "-", "4", "125.1", "1", "0", "16", "yes"],
        ["lax.top_k", "266.1", "265.1 .. 268.1", "-", "4", "66.53", "2", "0", "16", "-"],
    ]


def test_the_readme_shows_a_verify_step_of_every_operator():
    source = results_files.Source("f", "operators", "d", None, {}, "c", "2026-11-30")
    make = lambda op, spec, goal=None, shown=True: results_files.OperatorRow(op, spec, "k", 1.0, 1.0, 1.0, 1.0, source, shown, goal)
    rows = [make("a", "draft"), make("a", "verify"), make("a", "verify_long"), make("b", "tiny"), make("c", "x", shown=False),
            make("d", "verify"), make("d", "front", goal=12)]  # fmt: skip
    assert [(r.operator, r.spec) for r in results_files.main_specs(rows)] == [("a", "verify"), ("b", "tiny"), ("d", "front")]


def test_implementations_by_name_do_not_stand_for_their_operator(tmp_path, monkeypatch):
    monkeypatch.setattr(results_files, "_implementations", lambda operator: {"two_kernels": "not faster", "one_kernel": ""})
    head = {**ENVIRONMENT, "peaks": PEAKS, "results": [operator("router", "verify", "two_kernels", 11.0), operator("router", "verify", "one_kernel", 12.0)]}
    (tmp_path / "operators.json").write_text(json.dumps(head))
    assert [r.implementation for r in results_files.read(tmp_path).operators if r.shown] == ["one_kernel"]


def test_parts_stand_beside_the_floors_of_the_traced_run(text):
    assert rows(text, "experts", "1500") == [["experts", "1500", "75.0 %", "901", "10"]]
    assert rows(text, "mHC") == [["mHC", "400", "20.0 %", "48", "8"]]
    assert rows(text, "SWA") == [["SWA", "2", "120.5", "99.29"]]
    assert "Step 2000 us by the clock" in text and "kernels 1900 us" in text and "1950 us, 97.5 % of the step by the clock" in text
    assert rows(text, "experts", "experts_swiglu") == [["experts", "experts_swiglu", "2", "950", "50.0 %"]]
    assert text.index("experts_swiglu") < text.index("experts_down")


def test_scaling_switches_and_agreement_are_the_files(text):
    assert [r[5] for r in rows(text, "flash-rank, 2 layers; plain XLA: experts") if "sweep" in r[-1]] == ["17.25", "6.125", "18.75", "31.5"]
    assert "RESOURCE_EXHAUSTED: no memory" in text
    assert rows(text, "router=reference")[0][1:] == ["18.8", "18.7 .. 18.9", "0.815", "0.7 .. 0.9", "slower"]
    assert "experts=blackwell: is for sm_100" in text
    assert "**63 of 64 raw outputs identical**: reference against auto" in text
    assert rows(text, "needle") == [["needle", "63 of 64", "17", "0.00125", "0.0031", "0.0001", "0.998"]]


def test_every_row_leads_to_its_device_versions_commit_and_date(text):
    found = rows(text, "[2](decode.json)")
    assert found == [["[2](decode.json)", "decode.json", "decode", "NVIDIA H200", "580.1", "jax 0.11.2, triton 3.6.0", "0123456", "2026-11-30"]]
    assert len(rows(text)) > 20 and {int(n) for n in re.findall(r"\[(\d)\]\(", text)} == set(range(1, 7))


def test_exchanges_are_rows(tmp_path):
    times = {"median_us": 117.6, "exposed_us": 99.5, "bytes_received": 9.91e6, "gbps": 84.3, "share_of_measured_link": 0.348}
    data = {"what": {"ranks": 2, "rows": 384}, "environment": ENVIRONMENT,
            "against_one_device": {"gather": {"random": "equal", "one rank": 0.0}, "ring": {"random": 0.125}},
            "exchanges": {name: {**times, "share_of_data_sheet": None} for name in ("gather", "ring")}}  # fmt: skip
    (tmp_path / "exchange.json").write_text(json.dumps(data))
    gather, ring = rows(report.exchange(results_files.read(tmp_path)), "gather"), rows(report.exchange(results_files.read(tmp_path)), "ring")
    assert gather[0][1:9] == ["2", "384", "117.6", "99.5", "9.91", "84.3", "0.348", "-"]
    assert gather[0][9] == "random: equal; one rank: equal but for the sign of zeros" and ring[0][9] == "random: off by 0.12"


def test_figures_by_hand_name_their_kernel(tmp_path):
    """A kernel that the profiler alone measured, and one that is no more."""
    made = lambda run: {"commit": "0123456", "results": {"m384_r1": run}}
    data = {"device": "NVIDIA H200", "jax": "0", "triton": "0", "date": "2026-11-30", "what": "", "runs": [
        made({"median": 130.0, "floor": 40.0}), made({"device": 96.0}) | {"implementation": "hopper_persistent"}]}  # fmt: skip
    (tmp_path / "hand.json").write_text(json.dumps(data))
    old, new = results_files.read(tmp_path).operators
    assert (old.implementation, old.best, old.shown) == ("hopper (since replaced)", 130.0, False)
    assert (new.implementation, new.best, new.ratio, new.shown) == ("hopper_persistent", 96.0, 2.4, True)


def test_missing_kinds_are_named(tmp_path, text):
    assert "experts: no file; `python -m bench.experts --out FILE`" in text and "exchange: no file" in text
    assert "* decode" not in text and "* sweep" not in text
    for name in FILES:
        if name != "operators.json":
            (tmp_path / name).unlink()
    alone = results_files.read(tmp_path)
    assert set(alone.missing()) == set(results_files.COMMANDS) - {"operators"}
    assert "## Scaling" not in report.report(alone, [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"benchmark": "decode",', "not JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"some": 1}, "expected a result of bench.decode"),
        ({**DECODE, "result": {k: v for k, v in RESULT.items() if k != "floor_ms"}}, "field 'floor_ms'"),
        ({**DECODE, "environment": {k: v for k, v in ENVIRONMENT.items() if k != "commit"}}, "field 'commit'"),
        ({**OPERATORS, "results": [3]}, "other types"),
        ({"benchmark": "engine", "environment": 3}, "other types"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, content, said):
    write(tmp_path, {"good.json": DECODE, "broken.json": content})
    with pytest.raises(ValueError, match=f"broken.json: .*{said}"):
        results_files.read(tmp_path)
    with pytest.raises(SystemExit, match=r"bench.report: .*broken.json"):
        report.main(["--results", str(tmp_path)])
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    "broken",
    [
        {"benchmark": "layers", "environment": ENVIRONMENT, "protocol": PROTOCOL},
        {"benchmark": "layers", "environment": ENVIRONMENT, "measured_step_us": "x", "parts_us": {}, "kernels": {}},
        {"benchmark": "compile_report", "environment": ENVIRONMENT, "what": None},
        {"benchmark": "options", "environment": ENVIRONMENT, "results": [{}], "protocol": PROTOCOL, "not_taken": {}},
        DECODE | {"environment": ENVIRONMENT | {"device": None}},
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_by_name(tmp_path, broken):
    write(tmp_path, {"good.json": DECODE, "broken.json": broken})
    with pytest.raises(SystemExit, match=r"bench.report: .*broken.json: expected a \w+ result"):
        report.main(["--results", str(tmp_path)])
    assert {p.name for p in tmp_path.iterdir()} == {"good.json", "broken.json"}  # nothing was written


def test_a_bench_without_a_section_is_shown_as_it_is(tmp_path):
    engine = {"benchmark": "engine", "environment": ENVIRONMENT, "result": {"reused": {"step_ms": 19.25, "ok": True}, "n": [1]}}
    results = results_files.read(write(tmp_path, {"engine.json": engine}))
    assert rows(report.report(results, []), "engine") == [["engine", "reused step_ms", "19.25", "[1](engine.json)"]]
    assert "engine" not in results.missing()


def test_no_files_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no \\*.json"):
        results_files.read(tmp_path)


def test_a_newer_run_replaces_an_operators_rows(tmp_path):
    newer = copy.deepcopy(OPERATORS)
    newer["utc"], newer["results"] = "2026-12-01T00:00:00Z", [operator("select_tokens", "verify", "radix_wide", 9.5)]
    got = results_files.newest(results_files.read(write(tmp_path, {"a.json": newer, "b.json": OPERATORS})).operators)
    assert [(r.implementation, r.median, r.shown) for r in got] == [("radix_wide", 9.5, True)]


def test_goals_of_the_specification_fill_in(tmp_path):
    bare = {**ENVIRONMENT, "peaks": PEAKS, "results": [{**operator("sparse_attention", "", "hopper", 130.0), "spec": {"name": "m384_r1"}}]}
    got = results_files.read(write(tmp_path, {"a.json": bare, "b.json": OPERATORS})).operators
    assert [(r.operator, r.goal) for r in got[:2]] == [("sparse_attention", 128), ("select_tokens", 16)]


def test_lines_differ_in_one_axis(tmp_path):
    steps = results_files.read(write(tmp_path, FILES)).steps
    axis = lambda name: [[(r.protocol[name], r.result["step_ms"]) for r in points] for points in lines(steps, name).values()]
    assert axis("context") == [[(4096, 17.25), (32768, 18.75), (1047552, 31.5)]]
    assert axis("batch") == [[(1, 6.125), (64, 18.75)]] and axis("capacity") == []
    # runs of their own make a line too
    other = {**DECODE, "protocol": {**PROTOCOL, "batch": 8}, "result": {**RESULT, "step_ms": 20.0}}
    (tmp_path / "sweep.json").unlink()
    steps = results_files.read(write(tmp_path, {"b8.json": other})).steps
    assert axis("batch") == [[(8, 20.0), (64, 82.6559)]] and axis("context") == []


def test_the_command_draws_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    readme.write_text("before\n" + "\nold\n".join(report.MARKS) + "\nafter\n")
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    report.main(["--results", str(write(folder, FILES)), "--readme", str(readme)])
    names = {p.name for p in folder.glob("*.png")}
    assert names == {"operators.png", "step.png", "scaling.png", "options.png"}
    assert all((folder / n).read_bytes().startswith(b"\x89PNG") for n in names)
    assert all(f"![{n}]({n})" in (folder / "README.md").read_text() for n in names)
    text = readme.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert rows(text, "select_tokens, verify", "radix_select")[0][2:8] == ["15.56", "9.25", "4", "2.312", "16", "500.4"]
    assert "bench/results/decode.json" in text and "![step.png](bench/results/step.png)" in text
    again = text
    (folder / "sweep.json").unlink()
    report.main(["--results", str(folder), "--readme", str(readme)])
    assert not (folder / "scaling.png").exists() and readme.read_text() != again
    with pytest.raises(ValueError, match="README: expected the lines"):
        report.insert("no marks", "")


def test_compiled_steps_show_bytes_and_overlap(tmp_path):
    what = {"preset": "flash", "layers": 40, "ranks": 4, "target": "b300", "batch_per_rank": 64, "context": 32768}
    made = {
        "benchmark": "compile_report", "environment": ENVIRONMENT, "what": what, "weights_bytes": {"total": 135_200_000_000},
        "pools_bytes": {"total": 2_100_000_000}, "memory_bytes": {"temporaries": 3 * 10**8, "peak": 138 * 10**9, "card": 297 * 10**9},
        "collectives": [{"bytes": 900_000_000}, {"bytes": 300_000_000}], "collective_overlap": {"asynchronous": 86, "exposed": 2},
        "launches": {"total": 2805, "fusion": 2000}, "seconds": {"compile": 126.1},
    }  # fmt: skip
    (tmp_path / "compiled.json").write_text(json.dumps(made))
    text = report.report(results_files.read(tmp_path), [])
    (row,) = rows(text, "flash, 40 layers", "4 x b300")
    assert row[2:] == ["64", "32768", "135.2", "2.1", "0.3", "138", "297", "1200", "86 of 88", "2805", "126.1", "[1](compiled.json)"]


def test_committed_tables_are_those_of_the_committed_files():
    """After a new result file: python -m bench.report."""
    results = results_files.read(report.FOLDER)
    charts = [n for n in ("step.png", "operators.png", "scaling.png", "options.png") if (report.FOLDER / n).exists()]
    assert (report.FOLDER / "README.md").read_text() == report.report(results, charts)
    text = report.README.read_text()
    assert text == report.insert(text, report.summary(results, "bench/results", charts))
