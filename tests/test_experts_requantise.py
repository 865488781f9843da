"""The one-pass quantisers of the Hopper experts against their definitions, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codecs
from pallas_kernels.expert_plan import expert_plan
from pallas_kernels.experts import hopper, layout, requantise, shuffle_weights
from pallas_kernels.experts.specs import ExpertsSpec
from tests import deviceless


def rows(n, h, seed):
    """bf16[n, h] with scales apart by up to 12 octaves within a chunk, subnormal codes, ties, zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, h)) * np.repeat(2.0 ** rng.integers(-9, 4, (n, h // 32)), 32, axis=1)
    x[0, :64] = np.arange(64) / 32 - 1  # ties of e4m3 and its subnormals
    x[1, :128] = 0.0
    x[2, :32], x[2, 32:128] = -0.0, 1e-6
    x[3] = np.resize([448.0, -448.0, 464.0, 1.0, 2.0**-6, 2.0**-9, 2.0**-10, -(2.0**-10)], h)
    return jnp.asarray(x, jnp.bfloat16)


def same(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


spread_rows = jax.jit(requantise.spread_rows, static_argnums=3, static_argnames="interpret")
sorted_rows = jax.jit(requantise.sorted_rows, static_argnames="interpret")


def plan(name):
    """A plan of three slots a token on four local experts: all, some or none of them here, the same for all, few tokens."""
    tokens, first, total = {
        "local": (24, 0, 4), "foreign": (24, 2, 12), "none_here": (24, 9, 9), "three_experts": (24, 0, 3),
        "odd": (7, 0, 4), "one_row": (1, 0, 4),
    }[name]  # fmt: skip
    rng = np.random.default_rng(tokens + total)
    ids = jnp.asarray([rng.permutation(total)[:3] for _ in range(tokens)], jnp.int32)
    return expert_plan(ids, jnp.ones(ids.shape, jnp.float32), first, local=4, tile_rows=8, impl="reference")


def spread_case(name, interpret):
    p = plan(name)
    x = rows(24, 512, 1)
    got = spread_rows(x[: len(p.position)], p.position, p.count, p.token.shape[0], interpret=interpret)
    real = np.unique(p.position)
    real = real[real < int(p.count)]
    assert (len(real) == 0) == (name == "none_here")
    token = np.asarray(p.token)[real]
    same([np.asarray(a)[:, real] for a in got], [np.asarray(a)[:, token] for a in requantise.quantize_rows(x)])


def sorted_case(count, interpret):
    t = rows(24, 384, 3).reshape(24, 3, 128).swapaxes(0, 1)
    got, want = sorted_rows(t, jnp.int32(count), interpret=interpret), requantise.quantize_sorted(t)
    same([np.asarray(a)[:, :count] for a in got], [np.asarray(a)[:, :count] for a in want])


def every_value_case(interpret):
    """All bf16 up to 448, in order, beside one 448 a chunk: every code, and groups at every distance from the largest."""
    values = np.arange(136 * 127, dtype=np.uint16) + (0x43E1 - 136 * 127)  # those left out are below 2**-125
    x = values.view(jnp.bfloat16.dtype).reshape(8, 17, 127)
    x = np.concatenate([np.where(np.arange(127) % 2, -x, x), np.full((8, 17, 1), 448, x.dtype)], 2)
    t = jnp.asarray(x.swapaxes(0, 1)[..., layout.CHANNEL])
    same(sorted_rows(t, jnp.int32(8), interpret=interpret), requantise.quantize_sorted(t))


SPREAD = "local", "foreign", "none_here", "three_experts", "odd", "one_row"
CASES = [(spread_case, name) for name in SPREAD] + [(sorted_case, count) for count in (24, 9, 0)]


@pytest.mark.parametrize("case,what", [case for case in CASES if case[1] != "one_row"])  # a compile less
def test_equals_its_definition(case, what):
    case(what, True)


@pytest.mark.gpu
@pytest.mark.parametrize("case,what", CASES)
def test_equals_its_definition_on_the_gpu(case, what):
    case(what, False)


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_every_value(interpret):
    every_value_case(interpret)


def chunks_led_by(largest, seed):
    """bf16[n / 4, 512]: a chunk for each of `largest` bf16[n]. Its first group's largest magnitude is that, the other groups'
    are up to twelve octaves less; within a group channels go down to what underflows, zeros of both signs among them."""
    rng, n = np.random.default_rng(seed), len(largest)
    below = np.concatenate([np.zeros((n, 1)), rng.integers(0, 13, (n, 3)) + rng.random((n, 3))], 1)
    x = largest.astype(np.float64)[:, None, None] * np.exp2(-below)[..., None] * rng.uniform(-1, 1, (n, 4, 32))
    x *= np.exp2(-rng.integers(0, 24, x.shape)) * (rng.random(x.shape) < 0.95)
    x[:, 0, 5] = np.where(rng.random(n) < 0.5, -1, 1) * largest.astype(np.float64)
    return jnp.asarray(x.reshape(n // 4, 512), jnp.bfloat16)


def through_fp8(x):
    """x as it arrives from another rank: quantised in groups of 32 and back."""
    return codecs.dequantize_fp8(*codecs.quantize_fp8(x)).astype(jnp.bfloat16)


def test_rows_that_travelled_as_fp8_quantise_to_the_same():
    """Codes and scales, for every bf16 magnitude that leads a chunk: normal ones up to 2**119, then the values stay finite."""
    magnitudes = np.arange(128, 128 * (127 + 119), dtype=np.uint16).view(jnp.bfloat16.dtype)
    x = chunks_led_by(magnitudes, 4)
    travelled = jax.jit(through_fp8)(x)
    assert (np.asarray(x) != np.asarray(travelled)).mean() > 0.3, "something to lose the second time"
    quantise = jax.jit(requantise.quantize_rows)
    same(quantise(travelled), quantise(x))


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_the_kernel_quantises_what_travelled_to_the_same(interpret):
    """As above, at the floor of the scales (1e-4) and above it: every mantissa."""
    bits = np.concatenate([np.arange(128) + 128 * (127 + exponent) for exponent in (-14, 1)]).astype(np.uint16)
    x = chunks_led_by(bits.view(jnp.bfloat16.dtype), 5)
    position, count = jnp.arange(64, dtype=jnp.int32)[:, None], jnp.int32(64)
    got = [spread_rows(a, position, count, 64, interpret=interpret) for a in (through_fp8(x), x)]
    same(*got)
    same(got[1], requantise.quantize_rows(x))


@pytest.mark.gpu
def test_rows_that_nobody_wrote_reach_no_other():
    """The products of the rows that are there do not change when all others hold NaN."""
    if str(jax.devices()[0].compute_capability) != "9.0":
        pytest.skip("the product is for Hopper")
    spec = ExpertsSpec("gaps", 24, 512, 256, 4, 3, total=12, first=2)
    x, ids, weights, *tensors = spec.make_inputs(8)
    w13, s13, *_ = shuffle_weights(*tensors)
    p = expert_plan(ids, weights, spec.first, local=spec.local, tile_rows=8)
    size = p.token.shape[0]
    codes, scale = spread_rows(x, p.position, p.count, size)
    real = np.unique(p.position)
    real = real[real < int(p.count)]
    gaps = np.setdiff1d(np.arange(size), real)
    assert (gaps < int(p.count)).any(), "between the experts' rows too"
    gemm = jax.jit(functools.partial(hopper.grouped_gemm, plan=p, n=8, kind="swiglu", limit=10.0, groups=4, sms=132))
    clean = gemm(codes, scale, w13, s13)
    dirty = gemm(codes.at[:, gaps].set(0x7F), scale.at[:, gaps].set(jnp.nan), w13, s13)
    same([np.asarray(clean[:, real]).view(np.uint16)], [np.asarray(dirty[:, real]).view(np.uint16)])


def deviceless_case(name: str):
    """Both quantisers at the rows of a verify step."""
    shape = jax.ShapeDtypeStruct
    count = shape((), jnp.int32)
    if name == "spread":
        spread = lambda x, position, count: requantise.spread_rows(x, position, count, 2624)
        return spread, (shape((384, 5120), jnp.bfloat16), shape((384, 6), jnp.int32), count)
    return requantise.sorted_rows, (shape((18, 2624, 128), jnp.bfloat16), count)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
def test_compile_for_hopper_to_wide_loads_and_stores():
    """One kernel each, no spills, the hardware's conversions; values pass through no shared memory."""
    compiled = deviceless.compile_all("sm_90a", "tests.test_experts_requantise:deviceless_case", ("spread", "sorted"))
    for case, load, store, stores, values in ("spread", "v2", "v4", 6, 16), ("sorted", "v4", "v2", 1, 8):
        kernel = compiled[case].matching("quantise")
        assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0
        count = kernel.ptx.count
        assert count(f"ld.global.{load}.b32") == values // (8 if load == "v4" else 4), case
        assert count(f"st.global.{store}.b32") == stores, case
        assert count("cvt.rn.satfinite.e4m3x2.f32") == values, "two values an instruction, each converted twice"
        assert "st.shared.v" not in kernel.ptx and count("bar.sync") <= 1
