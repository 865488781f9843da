"""Routed experts: jnp against a numpy row loop, routing extremes, batch independence."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.experts import experts, experts_parts, explain, layout
from pallas_kernels.experts.specs import SPECS, TINY, ExpertsSpec

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def np_weight(packed, scale):
    """u8[O, I/2], u8[O, I/32] -> f64[O, I]."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    w = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    return w * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)


def np_qdq(x):
    """f64[D] -> f64[D]: FP8 per 32 channels."""
    g = x.reshape(-1, 32)
    amax = np.maximum(np.abs(g).max(1), np.float32(1e-4))
    s = 2.0 ** np.ceil(np.log2((amax.astype(np.float32) * np.float32(1 / 448)).astype(np.float64)))
    q = (g / s[:, None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (q * s[:, None]).ravel()


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def np_experts(spec, arrays, limit, released):
    """float64 sums, one (row, expert) pair after the other; every rounding of the release in its place."""
    x, ids, weights, w13, s13, w2, s2 = (np.asarray(a) for a in arrays)
    keep = bf16 if released else (lambda a: a)
    y = np.zeros(x.shape)
    for t in range(x.shape[0]):
        row = x[t].astype(np.float64)
        row = np_qdq(row) if released else row
        for e in sorted(ids[t]):
            local = e - spec.first
            if not 0 <= local < spec.local:
                continue
            h = keep(np_weight(w13[local], s13[local]) @ row)
            g, v = np.minimum(h[: spec.width], limit), np.clip(h[spec.width :], -limit, limit)
            act = keep(weights[t][ids[t] == e][0] * (g / (1 + np.exp(-g)) * v))
            act = np_qdq(act) if released else act
            y[t] += keep(np_weight(w2[local], s2[local]) @ act)
    return y


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("spec", TINY, ids=lambda s: s.name)
@pytest.mark.parametrize("precision,bound", [("released", 3e-3), ("float32", 2e-6), ("float32_cache", 2e-6)])
def test_reference_equals_numpy(spec, precision, bound):
    arrays = spec.make_inputs(11)
    got = experts(*arrays, first_expert=spec.first, precision=precision, impl="reference")
    assert got.dtype == jnp.float32 and got.shape == (spec.rows, spec.hidden)
    want = np_experts(spec, arrays, 10.0, precision == "released")
    assert relative(got, want) < bound


def test_clamp_bites_and_its_limit_is_an_argument():
    spec = TINY[0]
    arrays = spec.make_inputs(5)
    tight = experts(*arrays, swiglu_limit=1.0, precision="float32")
    assert relative(tight, np_experts(spec, arrays, 1.0, False)) < 2e-6
    assert relative(tight, np_experts(spec, arrays, 10.0, False)) > 0.1


def test_empty_outside_and_padding_slots_contribute_nothing():
    spec = TINY[0]
    x, _, weights, *tensors = spec.make_inputs(2)
    outside = jnp.array([[-1, 16, 2**30]] * spec.rows, jnp.int32)
    assert not np.asarray(experts(x, outside, weights, *tensors)).any()
    # Poison in one row and its weights stays in that row.
    ids = jnp.tile(jnp.array([[0, 5, 9]], jnp.int32), (spec.rows, 1))
    clean = experts(x, ids, weights, *tensors)
    dirty = experts(x.at[2].set(jnp.nan), ids, weights.at[2].set(jnp.inf), *tensors)
    rest = np.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(np.asarray(dirty)[rest], np.asarray(clean)[rest])


def test_local_slices_add_up():
    spec = TINY[0]
    x, ids, weights, *tensors = spec.make_inputs(4)
    whole = experts(x, ids, weights, *tensors)
    halves = [experts(x, ids, weights, *(a[i : i + 8] for a in tensors), first_expert=i) for i in (0, 8)]
    np.testing.assert_allclose(np.asarray(halves[0] + halves[1]), np.asarray(whole), rtol=1e-5, atol=1e-5)


def test_slot_order_does_not_change_bits():
    """The sum runs in ascending expert id, not in the router's order."""
    spec = TINY[0]
    x, ids, weights, *tensors = spec.make_inputs(8)
    a = experts(x, ids, weights, *tensors)
    b = experts(x, ids[:, ::-1], weights[:, ::-1], *tensors)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("precision", ["released", "float32_cache", "float32"])
def test_parts_are_the_columns_bit_for_bit(precision):
    spec = TINY[3]
    arrays = spec.make_inputs(7)
    options = dict(first_expert=spec.first, precision=precision)
    whole = np.asarray(experts(*arrays, **options))
    for parts in (1, 2, 4):
        got = experts_parts(*arrays, parts=parts, **options)
        assert [y.shape for y in got] == [(spec.rows, spec.hidden // parts)] * parts
        np.testing.assert_array_equal(np.concatenate(got, 1), whole)


def test_reloading_weights_changes_the_output_without_recompiling():
    spec = TINY[0]
    f = jax.jit(lambda *a: experts(*a, impl="reference"))
    x, ids, weights, *first = spec.make_inputs(1)
    for seed in (1, 2, 3):
        tensors = spec.make_inputs(seed)[3:]
        got = f(x, ids, weights, *tensors)
        cold = jax.jit(lambda *a: experts(*a, impl="reference"))(x, ids, weights, *tensors)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(cold))
    assert f._cache_size() == 1
    assert relative(got, np.asarray(f(x, ids, weights, *first), np.float64)) > 0.1


def test_full_size_floor():
    """spec/performance.md: 1876 MB and 163 GFLOP for 96 local experts at T = 384."""
    spec = next(s for s in SPECS if s.name == "verify_balanced")
    assert spec.weight_bytes == pytest.approx(1805e6, rel=0.01)
    assert spec.flops == pytest.approx(163e9, rel=0.01)


def test_errors_name_the_shapes():
    spec = TINY[0]
    arrays = spec.make_inputs(0)
    with pytest.raises(ValueError, match=r"expected s13 \(16, 128, 4\)"):
        experts(*arrays[:4], arrays[4][:, :, :2], *arrays[5:])
    with pytest.raises(ValueError, match="uint8"):
        experts(*arrays[:3], arrays[3].astype(jnp.int8), *arrays[4:])
    with pytest.raises(ValueError, match="precision"):
        experts(*arrays, precision="bf16")
    with pytest.raises(ValueError, match="impl expected one of"):
        experts(*arrays, impl="nonesuch")
    with pytest.raises(ValueError, match="parts >= 1 that divide H = 128, got 3"):
        experts_parts(*arrays, parts=3)
    with pytest.raises(ValueError, match="spare_sms >= 0, got -1"):
        experts_parts(*arrays, parts=2, spare_sms=-1)
    with pytest.raises(ValueError, match=r"H / parts expected a multiple of 128, got 128 / 2"):
        experts_parts(*ExpertsSpec("cut", 2, 128, 128, 2, 1).make_inputs(0), parts=2, impl="blackwell")
    shuffled = [jnp.zeros(shape, jnp.int32) for shape in layout.shuffled_shapes(16, 256, 256).values()]
    x, *routing = ExpertsSpec("cut", 6, 256, 256, 16, 3).make_inputs(0)[:3]
    with pytest.raises(ValueError, match=r"H / parts expected a multiple of 64, got 256 / 8"):
        experts_parts(x, *routing, *shuffled, parts=8, impl="hopper")
    assert explain(*arrays, arch="cpu")["chosen"] == "reference"
