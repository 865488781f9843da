"""The hardware counters of kernels, read from what Nsight Compute prints. The program itself needs a GPU."""

import csv
import io

import pytest

from bench import counters

HEADS = ["ID", "Process ID", "Kernel Name", "Block Size", "Grid Size", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]


def printed(rows: list[tuple]) -> str:
    """What ncu would print: its own lines, the program's and rows (launch, kernel, section, metric, unit, value)."""
    text = io.StringIO()
    w = csv.writer(text, quoting=csv.QUOTE_ALL)
    w.writerow(HEADS)
    for launch, kernel, *metric in rows:
        w.writerow([launch, 7, kernel, "(32, 1, 1)", "(384, 1, 1)", *metric])
    return "==PROF== Connected to process 7\nsome output\n" + text.getvalue() + "==PROF== Disconnected\n"


LIGHT = "GPU Speed Of Light Throughput"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def test_every_launch_of_a_call_gets_a_record():
    rows = [
        (0, "attention(int, float *)", LIGHT, "Duration", "ns", "101,380"),
        (0, "attention(int, float *)", LIGHT, "DRAM Throughput", "%", "21.57"),
        (0, "attention(int, float *)", "Launch Statistics", "Registers Per Thread", "register/thread", "128"),
        (0, "attention(int, float *)", "Command line profiler metrics", STALL.format("wait"), "inst", "1.25"),
        (0, "attention(int, float *)", "Command line profiler metrics", STALL.format("gmma"), "inst", "3.5"),
        (0, "attention(int, float *)", "Occupancy", "", "", ""),
        (0, "attention(int, float *)", "Occupancy", "Theoretical Occupancy", "%", "25"),
        (1, "attention(int, float *)", LIGHT, "Duration", "usecond", "99"),
    ]
    first, second = counters.kernels_of(printed(rows))
    assert first == {"kernel": "attention", "us": 101.38, "dram_percent": 21.57, "registers": 128, "stalls": {"gmma": 3.5, "wait": 1.25}}
    assert list(first["stalls"]) == ["gmma", "wait"] and second == {"kernel": "attention", "us": 99, "stalls": {}}


def test_what_ncu_refuses_is_said():
    with pytest.raises(ValueError, match="The user does not have permission"):
        counters.kernels_of("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")


def test_specs_and_implementations_are_looked_up_before_anything_runs(monkeypatch, capsys):
    found = counters.chosen(["router", "site_to_site"], ["verify"], ["auto", "two_kernels"])
    assert [(o.function or o.name, s.name, i) for o, s, i in found] == [
        ("router", "verify", "auto"), ("router", "verify", "two_kernels"), ("site_to_site", "verify", "auto")]  # fmt: skip
    for names, specs, impls, told in (
        (["rooter"], ["verify"], ["auto"], "got rooter"),
        (["router"], ["verify", "m384_r1"], ["auto"], "--spec m384_r1"),
        (["router"], ["verify"], ["hopper"], "--spec verify"),
    ):
        with pytest.raises(ValueError, match=told):
            counters.chosen(names, specs, impls)
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="expected ncu"):
        counters.main(["router", "--spec", "verify"])


def test_the_watched_process_is_this_program():
    line = counters.command("router", "verify", "auto")
    args = counters.parse(line[line.index("bench.counters") + 1 :])
    assert args.call and (args.operators, args.spec, args.impl) == (["router"], ["verify"], ["auto"])
