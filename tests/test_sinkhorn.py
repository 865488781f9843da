"""Sinkhorn normalisation: the definition against numpy in float64, the kernel against the definition."""

import numpy as np
import pytest

from pallas_kernels.sinkhorn import explain, one_kernel, reference, sinkhorn
from pallas_kernels.sinkhorn.specs import SPECS
from tests import deviceless


def numpy_sinkhorn(logits, iterations, eps):
    x = np.asarray(logits, np.float64)
    x = np.exp(x - x.max(-1, keepdims=True))
    x = x / x.sum(-1, keepdims=True) + eps
    x /= x.sum(-2, keepdims=True) + eps
    for _ in range(iterations - 1):
        x /= x.sum(-1, keepdims=True) + eps
        x /= x.sum(-2, keepdims=True) + eps
    return x


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("run", ["reference", "one_kernel"])
def test_equals_numpy(spec, run):
    (x,) = spec.make_inputs(3)
    if run == "reference":
        got = reference.sinkhorn(x, **spec.options)
    else:
        got = one_kernel.sinkhorn(x, **spec.options, interpret=True)
    np.testing.assert_allclose(np.asarray(got), numpy_sinkhorn(x, **spec.options), rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(np.asarray(got).sum(-2), 1, atol=1e-5)


def test_falls_back_with_a_reason():
    (x,) = SPECS[0].make_inputs(0)
    reasons = explain(x[:5], iterations=20, eps=1e-6, arch="sm_90")
    assert reasons["chosen"] == "reference" and "multiple of 32" in reasons["one_kernel"]
    assert explain(x, iterations=20, eps=1e-6, arch="sm_103")["chosen"] == "one_kernel"
    with pytest.raises(ValueError, match="multiple of 32"):
        sinkhorn(x[:5], iterations=20, eps=1e-6, impl="one_kernel")
    with pytest.raises(ValueError, match="expected logits"):
        sinkhorn(x[0], iterations=20, eps=1e-6)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_without_spills(target):
    compiled = deviceless.compile_for(target, "pallas_kernels.sinkhorn.specs:deviceless_case", "verify")
    kernel = compiled.matching("sinkhorn")
    assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0 and kernel.registers < 200
    assert "griddepcontrol.wait" in kernel.ptx


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    (x,) = spec.make_inputs(5)
    got = sinkhorn(x, **spec.options, impl="one_kernel")
    np.testing.assert_allclose(np.asarray(got), numpy_sinkhorn(x, **spec.options), rtol=2e-5, atol=1e-7)
