"""Coefficients of a hyper-connection site: the definition against numpy in float64, the kernel against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hyper_coefficients import explain, hyper_coefficients, one_kernel, reference
from pallas_kernels.hyper_coefficients.specs import SPECS
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


def check_coefficients(got, y, scale, base, *, streams, iterations, eps):
    """(pre, post, comb) against numpy. y f64[T, N]: the products times r."""
    m, n = streams, y.shape[1]
    a = y * scale[np.minimum(np.arange(n) // m, 2)] + base
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-a))
    comb = numpy_sinkhorn(a[:, 2 * m :].reshape(-1, m, m), iterations, eps)
    np.testing.assert_allclose(np.asarray(got[2]).sum(-2), comb.sum(-2), atol=1e-5)  # 1 but for eps beside a small sum
    for ours, want in zip(got, (sigmoid[:, :m] + eps, 2 * sigmoid[:, m : 2 * m], comb), strict=True):
        np.testing.assert_allclose(np.asarray(ours), want, rtol=3e-5, atol=1e-6)


def check(got, inputs, spec):
    products, r, scale, base = (np.asarray(x, np.float64) for x in inputs)
    y = products.reshape(spec.rows, spec.parts, -1).sum(1) * r[:, None]
    check_coefficients(got, y, scale, base, streams=spec.streams, iterations=spec.iterations, eps=spec.eps)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("run", ["reference", "one_kernel"])
def test_equals_numpy(spec, run):
    inputs = spec.make_inputs(3)
    if run == "reference":
        got = reference.hyper_coefficients(*inputs, static=spec.static)
    else:
        got = one_kernel.hyper_coefficients(*inputs, static=spec.static, interpret=True)
    check(got, inputs, spec)


def test_falls_back_with_a_reason():
    spec = SPECS[0]
    products, r, scale, base = spec.make_inputs(0)
    reasons = explain(products.astype(jnp.bfloat16), r, scale, base, **spec.options, arch="sm_90")
    assert reasons["chosen"] == "reference" and "bfloat16" in reasons["one_kernel"]
    assert explain(products, r, scale, base, **spec.options, arch="sm_103")["chosen"] == "one_kernel"
    with pytest.raises(ValueError, match="expected products"):
        hyper_coefficients(products[:, :-1], r, scale, base, **spec.options)
    with pytest.raises(ValueError, match="expected r"):
        hyper_coefficients(products, r[1:], scale, base, **spec.options)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_without_spills(target):
    factory = "pallas_kernels.hyper_coefficients.specs:deviceless_case"
    kernel = deviceless.compile_for(target, factory, "verify").matching("hyper_coefficients")
    assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0 and kernel.registers < 200
    assert "griddepcontrol.wait" in kernel.ptx


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    check(hyper_coefficients(*inputs, **spec.options, impl="one_kernel"), inputs, spec)
