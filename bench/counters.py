"""What bounds a kernel: the hardware counters of an operator's launches, read by Nsight Compute.

    python -m bench.counters sparse_attention --spec m384_r1 --out bench/results/counters.json
    python -m bench.counters block_scaled_matmul router --spec front --spec verify --impl hopper --impl one_kernel

For each operator and spec (those of `bench.operators`) a process of its own runs under `ncu`: the inputs are made and one call
is left unwatched, then the counters of every kernel of one more call are read. `ncu` runs a kernel once for each group of
counters, with the caches empty and the clock as it is, so its microseconds are longer than those of `bench.operators`; the
shares are what it is for. Needs `ncu` on the PATH, a GPU, and permission to read counters.
"""

import argparse
import csv
import ctypes
import itertools
import os
import shutil
import subprocess
import sys

from bench.command_line import out_file, run_program

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "SchedulerStats", "Occupancy", "LaunchStats")
STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "gmma", "wait", "math_pipe_throttle", "mio_throttle", "lg_throttle",
          "membar", "sleeping", "no_instruction", "not_selected")  # fmt: skip
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# {field of a record: (section, metric) as ncu names them}
FIELDS = {
    "us": ("GPU Speed Of Light Throughput", "Duration"),
    "cycles": ("GPU Speed Of Light Throughput", "Elapsed Cycles"),
    "active_cycles": ("GPU Speed Of Light Throughput", "SM Active Cycles"),
    "dram_percent": ("GPU Speed Of Light Throughput", "DRAM Throughput"),
    "l2_percent": ("GPU Speed Of Light Throughput", "L2 Cache Throughput"),
    "l1_percent": ("GPU Speed Of Light Throughput", "L1/TEX Cache Throughput"),
    "busiest_pipe_percent": ("Compute Workload Analysis", "SM Busy"),
    "issue_slots_percent": ("Compute Workload Analysis", "Issue Slots Busy"),
    "l2_hit_percent": ("Memory Workload Analysis", "L2 Hit Rate"),
    "warps_a_scheduler": ("Scheduler Statistics", "Active Warps Per Scheduler"),
    "occupancy_percent": ("Occupancy", "Achieved Occupancy"),
    "registers": ("Launch Statistics", "Registers Per Thread"),
    "blocks": ("Launch Statistics", "Grid Size"),
    "threads": ("Launch Statistics", "Block Size"),
}
_UNITS = {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "ns": 1e-3, "us": 1.0, "ms": 1e3}  # to microseconds


def kernels_of(text: str) -> list[dict]:
    """One record per launch, in order: "kernel", the FIELDS that ncu gave, and "stalls": {reason: cycles a warp waited for it per
    instruction issued}, the longest first. text: what `ncu --csv --page details` wrote, with whatever else is in it.

    Raises ValueError (what ncu said) where it holds no launch."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        said = [line for line in lines if line.startswith("==ERROR==")] or lines[-3:]
        raise ValueError(f"ncu: expected the counters of a kernel, got: {' '.join(said) or 'nothing'}")
    named = {metric: field for field, metric in FIELDS.items()}
    stalls = {_STALL.format(s): s for s in STALLS}
    out = []
    rows = csv.DictReader(line for line in lines[start:] if not line.startswith("=="))
    for _, launch in itertools.groupby(rows, key=lambda row: row["ID"]):
        record, waits = {}, {}
        for row in launch:
            record.setdefault("kernel", row["Kernel Name"].split("(")[0])
            if not row["Metric Name"]:  # a remark of ncu's
                continue
            metric = row["Section Name"], row["Metric Name"]
            if metric in named:
                value = float(row["Metric Value"].replace(",", ""))
                value *= _UNITS[row["Metric Unit"]] if named[metric] == "us" else 1
                record[named[metric]] = round(value, 3)
            elif row["Metric Name"] in stalls:
                waits[stalls[row["Metric Name"]]] = round(float(row["Metric Value"].replace(",", "")), 2)
        out.append(record | {"stalls": dict(sorted(waits.items(), key=lambda kv: -kv[1]))})
    return out


def command(operator: str, spec: str, impl: str) -> list[str]:
    """The command line of one watched call."""
    watched = ["--clock-control", "none", "--target-processes", "all", "--profile-from-start", "off"]
    metrics = ",".join(_STALL.format(s) for s in STALLS)
    sections = [x for s in SECTIONS for x in ("--section", s)]
    call = [sys.executable, "-m", "bench.counters", operator, "--spec", spec, "--impl", impl, "--call"]
    return ["ncu", "--csv", "--page", "details", *watched, *sections, "--metrics", metrics, *call]


def call_once(operator, spec, impl: str) -> None:
    """Compile and call, then call once more between the marks at which ncu starts and stops to watch."""
    import jax

    from bench.operators import call_inputs

    args, kwargs = jax.device_put(call_inputs(spec, 0))
    function = jax.jit(operator.call(spec, impl))
    once = lambda: jax.block_until_ready(function(*args, **kwargs))
    once()
    driver = ctypes.CDLL("libcuda.so.1")
    for mark in (driver.cuProfilerStart, once, driver.cuProfilerStop):
        if isinstance(status := mark(), int) and status:
            raise OSError(f"{mark.__name__}: CUDA error {status}")


def chosen(names: list[str], specs: list[str], impls: list[str]) -> list[tuple]:
    """[(operator, spec, implementation)] to watch; specs: whole names. Raises ValueError for what is not there."""
    from bench.operators import OPERATORS

    called = lambda o: {o.name, o.function or o.name}
    known = sorted(set().union(*map(called, OPERATORS)))
    if unknown := set(names) - set(known):
        raise ValueError(f"expected operators among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    out = [
        (o, spec, impl)
        for o in OPERATORS
        if called(o) & set(names)
        for spec in getattr(o.module("specs"), o.specs)
        if spec.name in specs
        for impl in impls
        if impl in ("auto", *o.names())
    ]
    if lost := set(specs) - {spec.name for _, spec, _ in out}:
        raise ValueError(f"--spec {', '.join(sorted(lost))}: expected specs of {', '.join(names)} that --impl names a way for")
    return out


def parse(argv) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench.counters", description=__doc__.split("\n\n")[0])
    p.add_argument("operators", nargs="+", metavar="op", help="as bench.operators names them")
    p.add_argument("--spec", action="append", required=True, help="a spec's name (repeatable)")
    p.add_argument("--impl", action="append", help="an implementation (repeatable; default auto)")
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the result as JSON")
    p.add_argument("--call", action="store_true", help="only call it, once unwatched and once between the profiler's marks")
    return p.parse_args(argv)


def main(argv=None) -> None:
    args = parse(argv)
    work = chosen(args.operators, args.spec, args.impl or ["auto"])
    if args.call:
        for one in work:
            call_once(*one)
        return
    if shutil.which("ncu") is None:
        raise ValueError("expected ncu (Nsight Compute) on the PATH")
    results = []
    for operator, spec, impl in work:
        # without CUDA graphs, which ncu takes as a whole
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
        env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        name = operator.function or operator.name
        done = subprocess.run(command(name, spec.name, impl), check=False, capture_output=True, text=True, env=env)
        if done.returncode:
            raise ValueError(f"{name} {spec.name} {impl}: {' '.join((done.stdout + done.stderr).splitlines()[-3:])}")
        kernels = kernels_of(done.stdout)
        results.append({"operator": name, "spec": spec.name, "implementation": impl, "kernels": kernels})
        for k in kernels:
            waits = ", ".join(f"{s} {c:g}" for s, c in list(k["stalls"].items())[:3])
            print(f"{name} {spec.name} {k['kernel'][:40]:40s} {k['us']:8.2f} us  DRAM {k['dram_percent']:.0f} %, L2 {k['l2_percent']:.0f}, "
                  f"L1 {k['l1_percent']:.0f}, pipe {k['busiest_pipe_percent']:.0f}, issue {k['issue_slots_percent']:.0f}, "
                  f"occupancy {k['occupancy_percent']:.0f}, {k['registers']:.0f} registers; waits: {waits}", flush=True)  # fmt: skip
    if args.out:
        from bench import common

        out = {"benchmark": "counters", "environment": common.environment(0), "results": results}
        print(f"wrote {common.write_json(args.out, out)}")


if __name__ == "__main__":
    run_program("bench.counters", main)
