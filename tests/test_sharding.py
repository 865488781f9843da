"""Sharding and the engine over four CPU devices. JAX fixes its devices when it starts, so the cases (FILES) run in one process
of their own, and every case reports here under its own name."""

import os
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

HERE = pathlib.Path(__file__).parent
FILES = ("sharding_cases.py", "engine_mesh_cases.py", "engram_host_cases.py")
CASES = [case for file in FILES for case in re.findall(r"^def (test_\w+)", (HERE / file).read_text(), re.MULTILINE)]
# these executables run for milliseconds: compiling them is the cost, so LLVM does not optimise
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{case: [(parameters, what went wrong or None)]} of the child process."""
    report = tmp_path_factory.mktemp("sharding") / "report.xml"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
               *(str(HERE / file) for file in FILES)]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=HERE.parent, capture_output=True, text=True, check=False)
    if not report.exists():
        pytest.fail(f"the child process ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    out = {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [e for e in case if e.tag in ("failure", "error", "skipped")]
        text = f"{wrong[0].get('message')}\n{wrong[0].text}" if wrong else None
        out.setdefault(case.get("name").split("[")[0], []).append((case.get("name"), text))
    return out


@pytest.mark.parametrize("case", CASES)
def test_on_four_devices(case, outcomes):
    assert outcomes.get(case), "the case did not run"
    for name, wrong in outcomes[case]:
        assert wrong is None, f"{name}: {wrong}"
