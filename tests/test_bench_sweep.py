"""The scaling benchmark: its points, what fits, and one run on the CPU."""

import json

import pytest

from bench import presets, sweep
from bench.sweep import Point


def test_points_of_several_axes_run_once():
    got = sweep.points(32768, 64, (4096, 32768), (1, 64), (33792, 1 << 20), 1024)
    assert got == {
        Point(4096, 64): ["context"],
        Point(32768, 64): ["context", "batch", "capacity"],
        Point(32768, 1): ["batch"],
        Point(32768, 64, 1 << 20): ["capacity"],
    }


def test_batch_is_halved_until_it_fits():
    size = lambda batch: batch << 30
    fits = lambda limit: sweep.fitting_batch(64, 20 << 30, limit, size)
    assert fits(None) == 64 and fits((20 + 64 + 8) << 30) == 64
    assert fits((20 + 63 + 8) << 30) == 32 and fits((20 + 17 + 8) << 30) == 16
    assert fits(1) == 1


def test_released_axes_are_workloads_and_their_state_is_counted():
    for context in sweep.CONTEXTS["flash-rank"]:
        presets.workload("flash-rank", layers=6, context=context)
    w = presets.workload("flash-rank", layers=6)
    owners = [s.ratio for s in w.config.layers if s.owns_kv]
    records = sum((288 + 68) // ratio for ratio in owners) * 64 * w.capacity  # no page 0, no rings
    assert records < sweep.state_bytes(w, 6) < 1.2 * records


def test_impossible_points_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="context"):
        sweep.main(["--preset", "tiny", "--contexts", "64,9999"])
    with pytest.raises(ValueError, match="capacity"):
        sweep.main(["--preset", "tiny", "--capacities", "10"])


@pytest.mark.slow
def test_tiny_runs_share_their_weights(tmp_path, monkeypatch):
    from bench import synthetic

    made = []
    make = synthetic.random_parameters
    monkeypatch.setattr(synthetic, "random_parameters", lambda *a, **k: made.append(1) or make(*a, **k))
    path = tmp_path / "sweep.json"
    flags = ["--preset", "tiny", "--layers", "4", "--steps", "3", "--rounds", "1", "--batches", "1", "--contexts", "64"]
    sweep.main([*flags, "--capacities", "", "--out", str(path)])
    got = json.loads(path.read_text())
    assert [(r["axes"], r["protocol"]["batch"], r["protocol"]["context"]) for r in got["runs"]] == [
        (["context"], 2, 64), (["batch"], 1, 64)]  # fmt: skip
    assert len(made) == 1
    for run in got["runs"]:
        r = run["result"]
        assert r["step_ms"] > 0 and r["ratio"] == pytest.approx(r["step_ms"] / r["floor_ms"], rel=1e-2)
        assert any("cut to 4" in note for note in run["protocol"]["notes"])
