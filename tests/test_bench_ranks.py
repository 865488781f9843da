"""The decode benchmark over ranks: one run over four CPU devices, in a process of its own (JAX fixes its devices when it
starts), and what it refuses."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench import decode, floors, presets
from bench.common import Peaks
from bench.compile_report import make_exchange
from sharding.exchange import AllToAllExchange, GatherExchange

FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def test_wrong_ranks_are_refused():
    watch = decode.CompileWatch()
    with pytest.raises(ValueError, match="at least 64 devices for 64 ranks"):
        decode.make_bench(decode.parse(["--preset", "tiny", "--ranks", "64"]), watch)
    with pytest.raises(ValueError, match="--exchange gather: expected --ranks"):
        decode.make_bench(decode.parse(["--preset", "tiny", "--exchange", "gather"]), watch)
    with pytest.raises(ValueError, match="--exchange-parts 2: expected --ranks"):
        decode.make_bench(decode.parse(["--preset", "tiny", "--exchange-parts", "2"]), watch)
    with pytest.raises(ValueError, match="expected one of gather, reduce_scatter, ring, all_to_all, ragged, got 'scatter'"):
        make_exchange("scatter", 4)
    with pytest.raises(ValueError, match="parts >= 1"):
        make_exchange("gather/0", 4)
    with pytest.raises(ValueError, match="--exchange-spare-sms 0: expected --ranks"):
        decode.make_bench(decode.parse(["--preset", "tiny", "--exchange-spare-sms", "0"]), watch)
    assert make_exchange("all_to_all/2", 4) == make_exchange("all_to_all", 4, 2, 8) == AllToAllExchange(4, parts=2)
    assert make_exchange("gather", 4, 2, 0) == GatherExchange(4, parts=2, spare_sms=0)


def test_released_host_workload_is_the_release():
    from dsv41_jax.presets import FLASH

    w = presets.workload("flash")
    assert (w.config, w.batch, w.context) == (FLASH, 64, 32768)


@pytest.mark.slow
def test_four_ranks_run_the_protocol(tmp_path):
    path = tmp_path / "ranks.json"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS)
    command = [sys.executable, "-m", "bench.decode", "--preset", "tiny", "--ranks", "4", "--layers", "3", "--steps", "3",
               "--exchange-parts", "2", "--warmup", "1", "--rounds", "2", "--out", str(path)]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    got = json.loads(path.read_text())
    r, p = got["result"], got["protocol"]
    assert (p["ranks"], p["batch"], p["acceptance"], len(r["rounds_step_ms"])) == (4, 2, "forced", 2)
    assert r["tps_aggregate"] == pytest.approx(8 * r["tps_per_request"], rel=1e-3)
    assert any("4 ranks, 2 requests each, exchange gather in 2 parts, 8 multiproc" in note for note in p["notes"])
    w = presets.workload("tiny", layers=3)
    peaks = Peaks(**{**got["peaks"], "notes": ()})
    whole, rank = (floors.step_floor(x, 5, peaks)["ms"] for x in (w, dataclasses.replace(w, config=presets.rank_of(w.config, 4))))
    assert r["floor_ms"] == pytest.approx(rank, rel=1e-3) and rank < whole


def test_exchanges_are_compared_and_timed_over_two_ranks(tmp_path):
    path = tmp_path / "exchange.json"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS.replace("count=4", "count=2"))
    command = [sys.executable, "-m", "bench.exchange", "--exchanges", "gather,ring/2,all_to_all", "--rows", "4", "--hidden", "64",
               "--experts", "8", "--top", "2", "--repeats", "1", "--out", str(path)]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    got = json.loads(path.read_text())
    names = {"gather", "ring/2", "all_to_all"}
    assert set(got["against_one_device"]) == set(got["exchanges"]) == names
    # a packed row is 64 FP8 values, 2 scales, 2 ids and 2 weights; each rank gets 4 rows and 4 contributions of the other
    for r in got["exchanges"].values():
        assert r["bytes_received"] == 4 * (64 + 2 + 16) + 4 * 64 * 4
        assert r["share_of_measured_link"] == pytest.approx(r["gbps"] / got["link_gbps"], abs=0.02) and r["median_us"] > 0
