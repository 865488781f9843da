"""Tests run on the CPU unless DSV41_TEST_GPU=1; tests marked `gpu` are skipped, with a reason, where there is none."""

import gc
import os

if os.environ.get("DSV41_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax

# identical programs compile once per checkout; command lines run by tests inherit it
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")

import jax
import pytest

if os.environ.get("DSV41_TEST_GPU") != "1":
    # tests compile much and run little: LLVM's passes cost more than they save (the HLO is the same)
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config):
    """The whole suite runs in two processes, a file's tests, which share compiled steps, in one of them. Compiling is
    almost all of it and keeps one core busy. Chosen files, GPU tests and debuggers stay in this process."""
    if hasattr(config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ:
        return  # one of the two: it must start none of its own
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    option = config.option
    if whole and os.environ.get("DSV41_TEST_GPU") != "1" and getattr(option, "numprocesses", 0) is None and not option.usepdb:
        option.numprocesses, option.dist = min(2, os.cpu_count() or 1), "loadfile"
        option.maxworkerrestart = "0"  # a process that dies ends the run: with a new one in its place xdist waited for ever


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file():
    """A process that keeps every program it compiled runs out of memory mappings (vm.max_map_count) and crashes in LLVM."""
    yield
    jax.clear_caches()
    gc.collect()


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if os.environ.get("DSV41_TEST_GPU") != "1":
        return "GPU tests run with DSV41_TEST_GPU=1"
    return None if jax.default_backend() == "gpu" else f"no NVIDIA GPU: the default backend is {jax.default_backend()}"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
