"""Tests run on the CPU unless DSV41_TEST_GPU=1; tests marked `gpu` are skipped, with a reason, where there is none."""

import os

if os.environ.get("DSV41_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax

import pytest


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if os.environ.get("DSV41_TEST_GPU") != "1":
        return "GPU tests run with DSV41_TEST_GPU=1"
    import jax

    return None if jax.default_backend() == "gpu" else f"no NVIDIA GPU: the default backend is {jax.default_backend()}"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
