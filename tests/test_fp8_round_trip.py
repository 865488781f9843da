"""FP8 round trip and quantisation: the kernels have the definitions' bits; those are tested with the codecs."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_round_trip import explain, fp8_round_trip, one_pass, quantise, reference
from pallas_kernels.fp8_round_trip.specs import QUANTISE_SPECS, SPECS, RoundTripSpec
from tests import deviceless


def same_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


def same_bytes(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype == np.uint8
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.rows * s.channels < 1 << 20], ids=lambda s: s.name)
def test_equals_the_definition(spec):
    (x,) = spec.make_inputs(3)
    same_bits(one_pass.fp8_round_trip(x, interpret=True), reference.fp8_round_trip(x))
    same_bytes(one_pass.quantise(x, interpret=True), reference.quantise(x))


@pytest.mark.parametrize("used", [24, 5, 0])
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_quantises_the_rows_in_use(used, interpret):
    (x,) = RoundTripSpec("24 rows", 24, 96).make_inputs(4)
    want = [a[:used] for a in reference.quantise(x)]
    count = jnp.int32(used)
    same_bytes([a[:used] for a in one_pass.quantise(x, count, interpret=interpret)], want)
    same_bytes([a[:used] for a in quantise(x, count)], want)


def test_every_bf16_of_a_group_with_a_fixed_largest():
    """All positive bf16 up to 448 beside a 448: every code, every tie, every subnormal."""
    values = np.arange(0x43E1, dtype=np.uint16).view(jnp.bfloat16.dtype)
    x = np.full((len(values) // 31 + 1, 32), 448, jnp.bfloat16.dtype)
    x[:, :31].flat[: len(values)] = values
    x = jnp.asarray(np.where(np.arange(32) % 2, -x, x))
    same_bits(one_pass.fp8_round_trip(x, interpret=True), reference.fp8_round_trip(x))
    same_bytes(got := one_pass.quantise(x, interpret=True), reference.quantise(x))
    assert set(np.unique(got[0]).tolist()) == set(range(256)) - {0x7F, 0xFF}, "every finite code"


def test_falls_back_with_a_reason():
    (x,) = SPECS[0].make_inputs(0)
    assert explain(x, arch="sm_103")["chosen"] == "one_pass"
    assert "float32" in explain(x.astype(jnp.float32), arch="sm_90")["one_pass"]
    with pytest.raises(ValueError, match="multiple of 32"):
        fp8_round_trip(x[:, :33])
    with pytest.raises(ValueError, match=r"count i32 \[\], got int32 \(2,\)"):
        quantise(x, jnp.zeros(2, jnp.int32))


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_without_spills(target):
    cases = {"front": "fp8_round_trip", "quantise_front": "fp8_quantise", "quantise_experts_down": "fp8_quantise"}
    compiled = deviceless.compile_all(target, "pallas_kernels.fp8_round_trip.specs:deviceless_case", tuple(cases))
    for case, name in cases.items():
        assert [k.name for k in compiled[case].kernels] == [name], case
        assert compiled[case].spill_bytes == 0, compiled[case].kernels
        assert compiled[case].ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 8, "two values an instruction, 16 a thread"


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    (x,) = spec.make_inputs(5)
    same_bits(fp8_round_trip(x, impl="one_pass"), fp8_round_trip(x, impl="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", QUANTISE_SPECS, ids=lambda s: s.name)
def test_quantiser_equals_definition_on_the_gpu(spec):
    (x,) = spec.make_inputs(6)
    same_bytes(quantise(x, impl="one_pass"), quantise(x, impl="reference"))
