"""The deviceless compile harness itself: every code generator's PTX is found, for the target asked for."""

import importlib.util

import pytest

from tests import deviceless

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing())),
]
FACTORY = "tests.deviceless_samples:case"


@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_finds_ptx_of_every_generator(target):
    got = deviceless.compile_all(target, FACTORY, ("plain", "mosaic", "pallas_triton"))
    for name, compiled in got.items():
        assert f".target {target}" in compiled.ptx, name
        assert name == "mosaic" or "griddepcontrol.wait" in compiled.ptx, name  # Mosaic kernels write their own
        assert compiled.kernels and compiled.spill_bytes == 0, name
        assert 0 < compiled.registers <= 255, name
    assert any("sample_mosaic" in k.name for k in got["mosaic"].kernels)
    assert any("sample_pallas_triton" in k.name for k in got["pallas_triton"].kernels)


def test_finds_jax_triton_ptx():
    pytest.importorskip("triton")
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax_triton is not installed")
    compiled = deviceless.compile_for("sm_103a", FACTORY, "jax_triton").matching("sample_jax_triton")
    assert ".target sm_103a" in compiled.ptx and compiled.registers > 0


def test_matching_keeps_one_kernel():
    compiled = deviceless.compile_for("sm_90a", FACTORY, "mosaic")
    kept = compiled.matching("sample_mosaic")
    assert len(kept.kernels) == 1 and kept.ptx.count(".entry") == 1
    assert compiled.matching("no_such_kernel").kernels == ()


def test_errors_say_what_failed():
    with pytest.raises(ValueError, match="sm_80"):
        deviceless.compile_for("sm_80", FACTORY, "plain")
    with pytest.raises(RuntimeError, match="no_such_case"):
        deviceless.compile_for("sm_90a", FACTORY, "no_such_case")
