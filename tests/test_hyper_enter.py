"""Entry of a hyper-connection site: the definition against numpy in float64, the kernel against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hyper_enter import explain, hyper_enter, one_pass, reference
from pallas_kernels.hyper_enter.specs import SPECS
from tests import deviceless

SMALL = [s for s in SPECS if s.rows < 100]


def numpy_enter(streams, pre, weight, eps):
    s = np.asarray(streams, np.float64)
    x = np.asarray(jnp.asarray((np.asarray(pre, np.float64)[..., None] * s).sum(1), jnp.bfloat16), np.float64)
    u = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)
    return u, 1 / np.sqrt((s * s).mean((1, 2)) + eps)


def check(got, inputs, eps):
    u, r = numpy_enter(*inputs, eps)
    np.testing.assert_allclose(np.asarray(got[1]), r, rtol=1e-5)
    # x may round the other way (2**-7 of it), then u is rounded (2**-8); in numpy fp32 sums do so in 30 of a million values
    np.testing.assert_allclose(np.asarray(got[0], np.float64), u, rtol=3.1 * 2**-8, atol=1e-6)
    assert np.mean(np.asarray(got[0]) == np.asarray(jnp.asarray(u, jnp.bfloat16))) > 0.999


@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("run", ["reference", "one_pass"])
def test_equals_numpy(spec, run):
    inputs = spec.make_inputs(3)
    if run == "reference":
        got = reference.hyper_enter(*inputs, **spec.options)
    else:
        got = one_pass.hyper_enter(*inputs, **spec.options, interpret=True)
    check(got, inputs, spec.eps)


def test_falls_back_with_a_reason():
    streams, pre, weight = SPECS[0].make_inputs(0)
    assert explain(streams, pre, weight, eps=1e-6, arch="sm_90")["chosen"] == "one_pass"
    wide = explain(streams.astype(jnp.float32), pre, weight, eps=1e-6, arch="sm_90")
    assert wide["chosen"] == "reference" and "float32" in wide["one_pass"]
    assert "equal powers" in explain(streams[..., :90], pre, weight[:90], eps=1e-6, arch="sm_90")["one_pass"]
    with pytest.raises(ValueError, match="expected pre"):
        hyper_enter(streams, pre[:, :1], weight, eps=1e-6)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_without_spills(target):
    kernel = deviceless.compile_for(target, "pallas_kernels.hyper_enter.specs:deviceless_case", "verify").matching("hyper_enter")
    assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0 and kernel.registers < 200


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    check(hyper_enter(*inputs, **spec.options, impl="one_pass"), inputs, spec.eps)
