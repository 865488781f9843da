"""Clamped SwiGLU: the definition against numpy, the kernel against the definition, in the model, errors, compiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.moe import LocalExchange, moe
from dsv41_jax.options import DecodeOptions
from dsv41_jax.precision import FLOAT32, RELEASED
from pallas_kernels.fp8_round_trip import fp8_round_trip
from pallas_kernels.swiglu import apart, api, explain, fuses, one_pass, reference, swiglu
from pallas_kernels.swiglu.specs import SPECS, SwigluSpec
from tests import deviceless
from tests import model_harness as harness

TINY, EXACT = SPECS[:2]


def numpy_swiglu(gate_up, limit):
    """In float64, rounded once to bf16."""
    g, v = np.split(np.asarray(gate_up, np.float64), 2, axis=1)
    g = np.minimum(g, limit)
    with np.errstate(over="ignore"):
        return (g / (1 + np.exp(-g)) * np.clip(v, -limit, limit)).astype(ml_dtypes.bfloat16)


def neighbours(got, want):
    """Values that differ by no more than one bf16 number; returns how many differ at all."""
    got, want = (np.asarray(x, jnp.bfloat16.dtype).view(np.int16).astype(np.int32) for x in (got, want))
    ordered = lambda x: np.where(x < 0, -(x & 0x7FFF), x)
    apart = np.abs(ordered(got) - ordered(want))
    assert apart.max() <= 1
    return (apart != 0).sum()


@pytest.mark.parametrize(
    "run", [reference.swiglu, functools.partial(one_pass.swiglu, interpret=True)], ids=["reference", "one_pass"]
)
def test_equals_numpy(run):
    (x,) = EXACT.make_inputs(3)
    got = run(x, **EXACT.options)
    assert got.dtype == jnp.bfloat16 and got.shape == (3, 64)
    assert neighbours(got, numpy_swiglu(x, 10.0)) <= 2  # fp32 may fall on the other side of a tie


@pytest.mark.parametrize("rows", [6, 1, 320])
def test_kernel_has_the_bits_of_the_separate_operations(rows):
    (x,) = SwigluSpec("", rows, 96).make_inputs(rows)
    plain = one_pass.swiglu(x, limit=10.0, round_trip=False, interpret=True)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(reference.swiglu(x, limit=10.0, round_trip=False)))
    got = one_pass.swiglu(x, limit=10.0, round_trip=True, interpret=True)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(fp8_round_trip(plain)))
    assert (np.asarray(got) != np.asarray(plain)).mean() > 0.3, "most values have more bits than e4m3"


def test_limits_clamp_and_a_row_stands_alone():
    """Beyond the limits nothing changes: silu(10) * +-10; poison stays in its row."""
    x = np.zeros((2, 64), np.float32)
    x[0, :4], x[0, 32:36] = [10, 1e30, np.inf, -1e30], [10, 1e30, -np.inf, 3]
    x[1] = np.nan
    for run in (reference.swiglu, functools.partial(one_pass.swiglu, interpret=True)):
        got = np.asarray(run(jnp.asarray(x, jnp.bfloat16), limit=10.0, round_trip=False), np.float32)
        np.testing.assert_array_equal(got[0, :4], [100, 100, -100, 0])
        assert not got[0, 4:].any() and np.isnan(got[1]).all()


def test_the_shared_expert_is_the_same_with_the_kernel(monkeypatch):
    """Its second product rounds its rows no second time, in `released`; elsewhere the kernel would not fit."""
    c, params = harness.config("all_kinds"), harness.params("all_kinds")
    kernel, *rest = api.IMPLEMENTATIONS
    rounds = []

    def run(x, **static):
        rounds.append(static["round_trip"])
        return one_pass.swiglu(x, **static, interpret=True)

    monkeypatch.setattr(api, "IMPLEMENTATIONS", (dataclasses.replace(kernel, run=run), *rest))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, c.hidden_size)), jnp.bfloat16)

    def hidden(x, impl, precision=RELEASED):
        options = DecodeOptions(implementations=(("swiglu", impl),))
        return moe(x, params.layers[0].ffn, 2, LocalExchange(), c, precision, options)

    want = np.asarray(jax.jit(functools.partial(hidden, impl="auto"))(x))
    assert not rounds and want.astype(np.float32).any()
    got = np.asarray(jax.jit(functools.partial(hidden, impl="one_pass"))(x))
    assert rounds == [True] and got.tobytes() == want.tobytes()
    with pytest.raises(ValueError, match="float32"):
        jax.eval_shape(lambda x: hidden(x, "one_pass", FLOAT32), x.astype(jnp.float32))


def test_chooses_and_refuses_with_a_reason():
    (x,) = TINY.make_inputs(0)
    assert "by name only" in explain(x, limit=10.0, arch="sm_90")["one_pass"]
    assert explain(x, limit=10.0, arch="sm_90")["chosen"] == "apart"
    assert explain(x, limit=10.0, arch="cpu")["chosen"] == "reference"
    want = reference.swiglu(x, limit=10.0, round_trip=True)
    np.testing.assert_array_equal(np.asarray(apart.swiglu(x, limit=10.0, round_trip=True)), np.asarray(want))
    assert fuses(x, limit=10.0, impl="one_pass") and not fuses(x, limit=10.0, arch="sm_90")
    with pytest.raises(ValueError, match="float32"):
        swiglu(x.astype(jnp.float32), limit=10.0, impl="one_pass")
    with pytest.raises(ValueError, match="multiples of 32"):
        swiglu(x[:, :80], limit=10.0, impl="one_pass")
    with pytest.raises(ValueError, match=r"F a multiple of 32, got \(6, 80\)"):
        swiglu(x[:, :80], limit=10.0, round_trip=True)
    with pytest.raises(ValueError, match="limit expected > 0, got 0"):
        swiglu(x, limit=0)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_without_spills(target):
    compiled = deviceless.compile_for(target, "pallas_kernels.swiglu.specs:deviceless_case", "verify")
    assert [k.name for k in compiled.kernels] == ["swiglu"] and compiled.spill_bytes == 0
    assert "griddepcontrol.wait" in compiled.ptx and "ld.global.v4.b32" in compiled.ptx
    assert compiled.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 8, "two values an instruction, 16 a thread"


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    (x,) = spec.make_inputs(5)
    plain = swiglu(x, limit=spec.limit, impl="one_pass")
    # an exponential of another library: a bf16 rounding may go the other way
    assert neighbours(plain, reference.swiglu(x, limit=spec.limit, round_trip=False)) <= 2e-3 * plain.size + 1
    got = swiglu(x, **spec.options, impl="one_pass")
    want = fp8_round_trip(plain, impl="reference") if spec.round_trip else plain
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
