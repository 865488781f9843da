"""The campaign runner: order, budget, failures, and that every job's command line is one that its bench takes."""

import importlib
import pathlib
import sys

import pytest

from bench import campaign, results_files
from bench.campaign import JOBS, RANK_JOBS, Job


def script(job, out, scratch):
    """Jobs whose arguments are a python program."""
    return [sys.executable, "-c", job.arguments[0], str(out), str(scratch)]


def test_failures_cost_only_themselves_and_time_is_kept(tmp_path):
    jobs = [
        Job("writes", "x", ("import sys, pathlib; pathlib.Path(sys.argv[1], 'a').write_text('1')",), "a", 0.001),
        Job("fails", "x", ("raise SystemExit(3)",), "b", 0.001),
        Job("reads", "x", ("",), "c", 0.001, needs="fails"),
        Job("too_long", "x", ("",), "d", 60),
        Job("shares", "x", ("import os; assert os.environ['JAX_COMPILATION_CACHE_DIR']",), "e", 0.001, needs="writes"),
    ]
    outcomes = campaign.campaign(jobs, tmp_path, tmp_path / "scratch", seconds=600, make=script)
    assert [o.status for o in outcomes] == [
        "ran", "failed (exit status 3)", "skipped (fails did not run)", "skipped (10.0 minutes left, takes 60)", "ran",
    ]  # fmt: skip
    assert (tmp_path / "a").read_text() == "1"


def test_a_job_is_killed_at_the_limit(tmp_path):
    job = Job("hangs", "x", ("import time; time.sleep(300)",), "a", 0.0)
    (outcome,) = campaign.campaign([job], tmp_path, tmp_path, seconds=1.5, make=script)
    assert outcome.status == "failed (out of time)" and outcome.seconds < 60


@pytest.mark.parametrize("job", [*JOBS, *RANK_JOBS], ids=lambda j: j.file)
def test_a_jobs_options_exist(job, capsys):
    module = importlib.import_module(f"bench.{job.module}")
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    told = capsys.readouterr().out
    asked = [a for a in campaign.command(job, pathlib.Path("OUT"), pathlib.Path("SCRATCH")) if a.startswith("--")]
    assert stop.value.code == 0 and all(a in told for a in asked), (asked, told)
    assert job.module in results_files.COMMANDS  # the report knows what it makes


def test_names_are_checked_and_listed(capsys):
    assert campaign.main(["--list", "--jobs", "layers,decode"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bench.layers" in lines[0] and "bench.decode" in lines[1] and "--out OUT/decode_flash_rank.json" in lines[1]
    assert campaign.main(["--list", "--ranks", "4", "--layers", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("bench.")[1].split()[0] for line in lines] == ["ranks_check", "exchange", *["decode", "layers"] * 2]
    assert "--exchange ring" in lines[4] and lines[5].split("--trace ")[1].split()[0] in lines[4]
    assert "--ranks 4 --layers 12" in lines[2] and lines[3].endswith("--out OUT/layers_flash_4ranks_12layers.json")
    with pytest.raises(SystemExit):
        campaign.main(["--jobs", "decode,typo", "--out", "x"])
    assert "expected names among decode" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        campaign.main([])
    assert "--out" in capsys.readouterr().err
