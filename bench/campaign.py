"""Every benchmark of one GPU, or of R, one after the other, inside a time limit: what a lent or rented machine is used for.

    python -m bench.campaign --out bench/results --minutes 25
    python -m bench.campaign --out FOLDER --jobs decode,layers,sweep     # these only, in this order
    python -m bench.campaign --ranks 4 --out FOLDER --minutes 10         # the sharded step: equality, exchange, decode
    python -m bench.campaign --list

Each job is a process of its own, so a failure costs only itself, and all share one folder of compiled programs. A job that the
time left does not cover is skipped and said so. Exit status: 0 if everything asked for ran, 1 otherwise.
`python -m bench.report` makes tables and charts of the files afterwards.
"""

import argparse
import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from bench.command_line import run_program
from dsv41_jax.arguments import at_least

CUT = ("--preset", "flash-rank", "--layers", "6")  # six layers keep every layer class at released widths


@dataclasses.dataclass(frozen=True)
class Job:
    """One benchmark process.

    module: under `bench`. arguments: its command line but --out; "{out}", "{scratch}", "{ranks}" and "{layers}" are
    replaced, in `file`, the result's name, too. minutes: what it is expected to take on an H200, compiling included; it is
    started only if so much time is left. needs: a job whose result it reads.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    file: str
    minutes: float
    needs: str | None = None


JOBS = (
    Job("decode", "decode", ("--preset", "flash-rank", "--profile", "{scratch}/trace"), "decode_flash_rank.json", 3),
    Job("layers", "layers", ("--trace", "{scratch}/trace", "--decode", "{out}/decode_flash_rank.json"),
        "layers_flash_rank.json", 1, needs="decode"),
    Job("plain_xla", "decode", (*CUT, "--batch", "16", "--impl", "reference", "--steps", "8", "--warmup", "1"),
        "decode_flash_rank_6layers_b16_plain_xla.json", 2),
    Job("kernels_b16", "decode", (*CUT, "--batch", "16", "--steps", "8", "--warmup", "1"),
        "decode_flash_rank_6layers_b16.json", 1),
    Job("sweep", "sweep", CUT, "sweep_flash_rank_6layers.json", 7),
    Job("agreement", "agreement", (*CUT, "--count", "8"), "agreement_flash_rank_6layers.json", 4),
    Job("options", "options", (*CUT, "--steps", "8", "--warmup", "1", "--skip", "default_implementation"),
        "options_flash_rank_6layers.json", 8),
    Job("engine", "engine", (*CUT, "--steps", "32"), "engine_flash_rank_6layers.json", 2),
    Job("experts", "experts", (), "experts.json", 3),
    Job("operators", "operators", (), "operators.json", 6),
)  # fmt: skip


RANK_JOBS = (
    Job("ranks_check", "ranks_check", ("--preset", "flash", "--layers", "6", "--ranks", "{ranks}", "--exchanges", "gather,ring"),
        "ranks_check_{ranks}ranks_6layers.json", 4),
    Job("exchange", "exchange", ("--ranks", "{ranks}"), "exchange_{ranks}ranks.json", 1),
    Job("decode", "decode", ("--preset", "flash", "--ranks", "{ranks}", "--layers", "{layers}", "--profile", "{scratch}/trace"),
        "decode_flash_{ranks}ranks_{layers}layers.json", 3),
    Job("layers", "layers", ("--trace", "{scratch}/trace", "--decode", "{out}/decode_flash_{ranks}ranks_{layers}layers.json"),
        "layers_flash_{ranks}ranks_{layers}layers.json", 1, needs="decode"),
    Job("decode_ring", "decode", ("--preset", "flash", "--ranks", "{ranks}", "--layers", "{layers}", "--exchange", "ring",
        "--profile", "{scratch}/trace_ring"), "decode_flash_{ranks}ranks_{layers}layers_ring.json", 3),
    Job("layers_ring", "layers", ("--trace", "{scratch}/trace_ring", "--decode",
        "{out}/decode_flash_{ranks}ranks_{layers}layers_ring.json"),
        "layers_flash_{ranks}ranks_{layers}layers_ring.json", 1, needs="decode_ring"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: "ran", "failed (why)" or "skipped (why)"; seconds it took."""

    job: Job
    status: str
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.status == "ran"


def command(job: Job, out: pathlib.Path, scratch: pathlib.Path, ranks: int = 1, layers: int = 40) -> list[str]:
    """The job's command line."""
    fill = functools.partial(str.format, out=out, scratch=scratch, ranks=ranks, layers=layers)
    return [sys.executable, "-m", f"bench.{job.module}", *(fill(a) for a in job.arguments), "--out", str(out / fill(job.file))]


def campaign(jobs, out: pathlib.Path, scratch: pathlib.Path, seconds: float, make=command) -> list[Outcome]:
    """Run the jobs in order. A job still running when the time is up is killed; what others wrote stays."""
    end, outcomes = time.monotonic() + seconds, []
    env = dict(os.environ)
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(scratch / "compiled"))
    for job in jobs:
        left, start = end - time.monotonic(), time.monotonic()
        lacking = job.needs and not any(o.ran for o in outcomes if o.job.name == job.needs)
        if lacking:
            status = f"skipped ({job.needs} did not run)"
        elif left < 60 * job.minutes:
            status = f"skipped ({left / 60:.1f} minutes left, takes {job.minutes:g})"
        else:
            print(f"== {job.name}", flush=True)
            try:
                code = subprocess.run(make(job, out, scratch), check=False, env=env, timeout=left).returncode
                status = "ran" if code == 0 else f"failed (exit status {code})"
            except subprocess.TimeoutExpired:
                status = "failed (out of time)"
        outcomes.append(Outcome(job, status, time.monotonic() - start))
    return outcomes


def chosen(names: str | None, ranks: int = 1) -> list[Job]:
    """Jobs of one GPU or of several by name, all if None. Raises ValueError for an unknown name."""
    known = {j.name: j for j in (JOBS if ranks == 1 else RANK_JOBS)}
    wanted = list(known) if names is None else [n.strip() for n in names.split(",")]
    if unknown := [n for n in wanted if n not in known]:
        raise ValueError(f"jobs: expected names among {', '.join(known)}, got {', '.join(map(repr, unknown))}")
    return [known[n] for n in wanted]


def minutes(text: str) -> float:
    """An argparse type: a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def main(argv=None) -> int:
    p = argparse.ArgumentParser(prog="bench.campaign", description=__doc__.split("\n\n")[0])
    p.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where the result files go")
    p.add_argument("--ranks", type=at_least(1), default=1, help="GPUs; more than one: the jobs of the sharded step")
    p.add_argument("--layers", type=at_least(3), default=40, help="of `decode` over several ranks (default 40: all)")
    p.add_argument("--jobs", metavar="NAMES", help="comma-separated, in this order (default: those that --list shows)")
    p.add_argument("--minutes", type=minutes, default=60.0, help="time limit for all of it (default 60)")
    p.add_argument("--list", action="store_true", help="print the commands and run none")
    args = p.parse_args(argv)
    try:
        jobs = chosen(args.jobs, args.ranks)
    except ValueError as e:
        p.error(str(e))
    make = functools.partial(command, ranks=args.ranks, layers=args.layers)
    if args.list:
        for job in jobs:
            print(f"{job.minutes:g} min", *make(job, args.out or pathlib.Path("OUT"), pathlib.Path("SCRATCH"))[1:])
        return 0
    if args.out is None:
        p.error("--out: expected a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dsv41-campaign-") as scratch:
        outcomes = campaign(jobs, args.out, pathlib.Path(scratch), 60 * args.minutes, make)
    for o in outcomes:
        print(f"{o.job.name}: {o.status}, {o.seconds:.0f} s")
    return 0 if all(o.ran for o in outcomes) else 1


if __name__ == "__main__":
    run_program("bench.campaign", lambda: sys.exit(main()))
