"""Products with block-scaled FP8 weights: jnp against numpy, exactness, the kernel on a GPU, deviceless compiles."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_scaled_matmul import block_scaled_matmul, explain, hopper
from pallas_kernels.block_scaled_matmul.specs import BY_NAME, FULL, TINY, MatmulSpec
from pallas_kernels.codecs import dequantize_fp8, quantize_fp8
from tests import deviceless, triton_interpreter

BLACKWELL = "pallas_kernels.block_scaled_matmul.blackwell:block_scaled_matmul"
FACTORY = "pallas_kernels.block_scaled_matmul.specs:deviceless_case"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# not importorskip: jax_triton imports only beside a CUDA plugin, which the compiling process has and this one has not
needs_jax_triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")


def np_weight(w, s):
    """f8[R, I], u8[ceil(R/32), ceil(I/32)] -> f64[R, I]."""
    w, s = np.asarray(w).astype(np.float64), 2.0 ** (np.asarray(s).astype(np.float64) - 127)
    return w * np.repeat(np.repeat(s, 32, 0), 32, 1)[: w.shape[0], : w.shape[1]]


def np_product(x, w, s, groups):
    """float64 sums."""
    x, w = np.asarray(x).astype(np.float64), np_weight(w, s)
    per_x, per_w = x.shape[1] // groups, w.shape[0] // groups
    return np.concatenate(
        [x[:, g * per_x : (g + 1) * per_x] @ w[g * per_w : (g + 1) * per_w].T for g in range(groups)], 1
    )


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def identity(inner, outputs, seed):
    """One-hot rows, finite codes of e4m3 and scale bytes that the kernel takes exactly: the product is the weight."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (outputs, inner), np.uint8)
    codes[(codes & 127) == 127] -= 1
    s = rng.integers(35, 167, (outputs // 32, inner // 32)).astype(np.uint8)
    return jnp.eye(inner, dtype=jnp.bfloat16), jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), jnp.asarray(s)


# --- the definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", TINY, ids=lambda s: s.name)
@pytest.mark.parametrize(
    "dtype,out,bound", [(jnp.bfloat16, None, 3e-3), (jnp.bfloat16, jnp.float32, 1e-6), (jnp.float32, None, 1e-6)]
)
def test_reference_equals_numpy(spec, dtype, out, bound):
    x, w, s = spec.make_inputs(3)
    got = block_scaled_matmul(x.astype(dtype), w, s, groups=spec.groups, out_dtype=out, impl="reference")
    assert got.shape == (spec.rows, spec.outputs) and got.dtype == (out or dtype)
    assert relative(got, np_product(x, w, s, spec.groups)) < bound


def test_groups_are_separate_products():
    spec = TINY[2]
    x, w, s = spec.make_inputs(4)
    whole = np.asarray(block_scaled_matmul(x, w, s, groups=4))
    for g in range(4):
        rows, channels = slice(64 * g, 64 * g + 64), slice(128 * g, 128 * g + 128)
        one = block_scaled_matmul(x[:, channels], w[rows], s[2 * g : 2 * g + 2])
        np.testing.assert_array_equal(np.asarray(one), whole[:, rows])


def test_poison_stays_in_its_row():
    x, w, s = TINY[0].make_inputs(5)
    clean, dirty = (np.asarray(block_scaled_matmul(a, w, s)) for a in (x, x.at[2].set(jnp.nan)))
    rest = np.arange(6) != 2
    np.testing.assert_array_equal(dirty[rest], clean[rest])
    assert np.isnan(dirty[2].astype(np.float32)).all()


def test_reloading_weights_changes_the_output_without_recompiling():
    f = jax.jit(lambda *a: block_scaled_matmul(*a, impl="reference"))
    x = TINY[0].make_inputs(1)[0]
    outputs = [np.asarray(f(x, *TINY[0].make_inputs(seed)[1:]), np.float64) for seed in (1, 2)]
    assert f._cache_size() == 1 and relative(outputs[0], outputs[1]) > 0.1


def test_full_size_floors():
    """spec/performance.md, T = 384: megabytes and GFLOP of QB, wo_a and wo_b."""
    for name, flops, nbytes in (("qb", 32e9, 67e6), ("wo_a", 26e9, None), ("wo_b", 32e9, None), ("front", 7e9, 15e6)):
        assert BY_NAME[name].flops == pytest.approx(flops, rel=0.02)
        assert nbytes is None or BY_NAME[name].bytes == pytest.approx(nbytes, rel=0.05)


def test_errors_name_the_shapes():
    x, w, s = TINY[0].make_inputs(0)
    for args, kwargs, message in (
        ((x, w.astype(jnp.bfloat16), s), {}, "w float8_e4m3fn"),
        ((x[:, :64], w, s), {}, r"expected x \[M, 128\]"),
        ((x.astype(jnp.float16), w, s), {}, "bfloat16 or float32"),
        ((x, w, s[:1]), {}, r"expected s uint8 \(2, 4\)"),
        ((x, w, s), {"groups": 3}, "divisor of R = 64"),
        ((x, w, s), {"out_dtype": jnp.int32}, "out_dtype"),
        ((x, w, s), {"impl": "nonesuch"}, "impl expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            block_scaled_matmul(*args, **kwargs)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4])
def test_quantising_twice_changes_nothing(scale):
    """What the Blackwell kernel rests on: rows through the round trip come out of it again as they are."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 256)) * scale * 2.0 ** rng.integers(-9, 9, (64, 256))
    once = dequantize_fp8(*quantize_fp8(jnp.asarray(x, jnp.bfloat16))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(dequantize_fp8(*quantize_fp8(once))), np.asarray(once, np.float32))


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FULL, ids=lambda s: s.name)
def test_a_kernel_takes_every_product_of_the_model(spec):
    args = jax.eval_shape(lambda: spec.make_inputs(0))
    told = functools.partial(explain, *args, groups=spec.groups, quantised=spec.quantised)
    assert told(arch="sm_90") == {"chosen": "hopper"}
    if importlib.util.find_spec("jax_triton"):
        assert told(arch="sm_100")["chosen"] == told(arch="sm_103")["chosen"] == "blackwell"
    assert told(arch="cpu")["chosen"] == "reference"


def test_rows_are_rounded_once_on_every_architecture(monkeypatch):
    """An FP8 product of the model: its own round trip, except where the product's kernel quantises its rows anyway."""
    from dsv41_jax import linear
    from dsv41_jax.options import DecodeOptions
    from dsv41_jax.precision import FLOAT32, RELEASED
    from pallas_kernels import registry

    args = jax.eval_shape(lambda: MatmulSpec("x", 8, 256, 128).make_inputs(0))
    monkeypatch.setattr(linear, "_block_scaled_matmul", lambda x, weight, scale, **_: x)  # kernels do not trace everywhere

    def rounds(arch, p=RELEASED, **choice):
        options = DecodeOptions(implementations=tuple(choice.items()))
        with registry.compiling_for(arch):
            return "fp8_round_trip" in str(jax.make_jaxpr(lambda *a: linear.fp8_matmul(*a, p, options))(*args))

    assert rounds("sm_90") and not rounds("sm_90", FLOAT32)
    if importlib.util.find_spec("jax_triton"):
        assert not rounds("sm_103") and rounds("sm_103", block_scaled_matmul="reference")


def test_refusals_have_reasons():
    x, w, s = TINY[3].make_inputs(0)
    assert "multiple of 128, got 96" in explain(x, w, s, arch="sm_90")["hopper"]
    x, w, s = TINY[0].make_inputs(0)
    assert "float32" in explain(x.astype(jnp.float32), w, s, arch="sm_90")["hopper"]
    assert "sm_90" in explain(x, w, s, arch="sm_103")["hopper"]
    with pytest.raises(ValueError, match="float32"):
        block_scaled_matmul(x.astype(jnp.float32), w, s, impl="hopper")
    x, w, s = TINY[3].make_inputs(0)
    assert "multiple of 128, got 96" in explain(x, w, s, arch="sm_103")["blackwell"]


@pytest.mark.parametrize("spec", FULL, ids=lambda s: s.name)
def test_tiles_cover_the_product_and_keep_the_order_of_a_sum(spec):
    """What decides bits (splits) depends on the weight alone; what a tile needs of shared memory is there."""
    for rows in (1, 5, 64, 65, 320, 384, 1536):
        tile = hopper.choose(rows, spec.outputs, spec.inner, spec.groups, 132)
        assert tile.splits == hopper.splits(spec.outputs, spec.inner)
        assert tile.n % (8 * tile.splits) == 0 and tile.n <= 192 and tile.depth >= 4
        assert spec.outputs // spec.groups % tile.rows == 0 or spec.groups == 1
        assert tile.splits == 1 or tile.n * tile.rows * 4 <= tile.depth * tile.n * 128, "parts fit where x was"
        size = tile.depth * (tile.rows * 64 + tile.n * 128) + tile.rows * tile.columns * 2
        assert size <= 226 * 1024


def test_tiles_of_the_verify_step():
    """One wave of blocks where there is one: QB in three of 192 x 192, wo_a of 128 x 192, wo_b of 128 x 128."""
    cut = {s.name: hopper.choose(384, s.outputs, s.inner, s.groups, 132) for s in FULL if s.rows == 384}
    assert {k: (t.n, t.rows) for k, t in cut.items()} == {
        "front": (192, 128), "qb_index": (192, 192), "qb": (192, 128), "wo_a": (192, 128), "wo_b": (128, 128),
        "shared_w13": (128, 128), "shared_w2": (128, 128), "main_proj": (128, 128),
    }  # fmt: skip


# --- interpreted ------------------------------------------------------------------------------------------------------

INTERPRETED = (
    MatmulSpec("ragged", 130, 256, 72),  # two rows in the second tile, outputs that fill neither a tile nor a scale
    MatmulSpec("one_row", 1, 384, 160),
    MatmulSpec("bf16_groups", 270, 128, 288, groups=2, quantised=False),  # two tiles of rows and two of outputs
    MatmulSpec("bf16_one_row", 1, 256, 40, quantised=False),
)


def bf16_bits(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).view(np.uint16)


def interpreter_cases(spec):
    """{what: (arrays, options)}"""
    x, w, s = map(np.asarray, spec.make_inputs(31))
    case = lambda x, **more: ({"x": x, "w": w, "s": s}, {"groups": spec.groups, "quantised": spec.quantised, **more})
    cases = {"wide": case(x, out_dtype=np.float32), "whole": case(x)}
    if spec.rows > 3:
        dirty = x.copy()
        dirty[3] = np.nan
        cases |= {"dirty": case(dirty), "part": case(x[-3:])}
    return cases


@pytest.fixture(scope="module")
def interpreted():
    """{(spec, what): output of the Triton kernels}, all from one child process."""
    cases = {(spec.name, what): case for spec in INTERPRETED for what, case in interpreter_cases(spec).items()}
    arrays = dict(zip("xws", map(np.asarray, identity(128, 128, 9)), strict=True))
    cases["identity", "wide"] = arrays, {"quantised": False, "out_dtype": np.float32}
    outputs = triton_interpreter.run([(BLACKWELL, *case) for case in cases.values()])
    return dict(zip(cases, outputs, strict=True))


@needs_triton
def test_interpreted_kernel_expands_every_code_and_scale_exactly(interpreted):
    _, w, s = identity(128, 128, 9)
    assert len(np.unique(np.asarray(w).view(np.uint8))) == 254
    np.testing.assert_array_equal(interpreted["identity", "wide"].astype(np.float64), np_weight(w, s).T)


@needs_triton
@pytest.mark.parametrize("spec", INTERPRETED, ids=lambda s: s.name)
def test_interpreted_kernel_equals_the_definition(interpreted, spec):
    wide = interpreted[spec.name, "wide"]
    assert relative(wide, np_product(*spec.make_inputs(31), spec.groups)) < 1e-5
    np.testing.assert_array_equal(bf16_bits(interpreted[spec.name, "whole"]), bf16_bits(wide))


@needs_triton
@pytest.mark.parametrize("spec", [s for s in INTERPRETED if s.rows > 3], ids=lambda s: s.name)
def test_interpreted_rows_do_not_depend_on_the_batch(interpreted, spec):
    whole, dirty, part = (bf16_bits(interpreted[spec.name, what]) for what in ("whole", "dirty", "part"))
    rest = np.arange(spec.rows) != 3
    np.testing.assert_array_equal(dirty[rest], whole[rest])
    np.testing.assert_array_equal(part, whole[-3:])


# --- on a GPU ---------------------------------------------------------------------------------------------------------

SMALL = (
    MatmulSpec("plain", 70, 256, 320),
    MatmulSpec("one_row", 1, 384, 64),
    MatmulSpec("ragged_outputs", 200, 128, 72),
    MatmulSpec("groups", 150, 256, 1024, groups=4),
    MatmulSpec("split", 130, 2304, 640),
    MatmulSpec("split_one_row", 1, 2048, 264),
)


def implementations():
    """Those this device can run: the Triton kernels also on Hopper, where the block-scaled dot is emulated."""
    capability = str(jax.devices()[0].compute_capability)
    names = ["hopper"] if capability == "9.0" else []
    return names + (["blackwell"] if importlib.util.find_spec("jax_triton") else [])


def jitted(spec, impl, quantised=True, **kwargs):
    return jax.jit(functools.partial(block_scaled_matmul, groups=spec.groups, quantised=quantised, impl=impl, **kwargs))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_kernels_equal_the_definition(spec):
    args = spec.make_inputs(21)
    for impl in implementations():
        wide = np.asarray(jitted(spec, impl, out_dtype=jnp.float32)(*args))
        assert relative(wide, np_product(*args, spec.groups)) < 1e-5, impl
        got = np.asarray(jitted(spec, impl)(*args))
        np.testing.assert_array_equal(got, np.asarray(jnp.asarray(wide).astype(jnp.bfloat16)), impl)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [512, 2048])
def test_kernels_expand_every_code_and_scale_exactly(inner):
    x, w, s = identity(inner, 320, 9)
    for impl in implementations():
        got = np.asarray(jax.jit(functools.partial(block_scaled_matmul, impl=impl, out_dtype=jnp.float32))(x, w, s))
        np.testing.assert_array_equal(got.astype(np.float64), np_weight(w, s).T, impl)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [*(s for s in INTERPRETED if not s.quantised), BY_NAME["wo_a"]], ids=lambda s: s.name)
def test_bf16_rows_on_blackwell_equal_the_definition(spec):
    args = spec.make_inputs(22)
    wide = np.asarray(jitted(spec, "blackwell", quantised=False, out_dtype=jnp.float32)(*args))
    assert relative(wide, np_product(*args, spec.groups)) < 1e-5
    np.testing.assert_array_equal(bf16_bits(jitted(spec, "blackwell", quantised=False)(*args)), bf16_bits(wide))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [SMALL[0], SMALL[3], SMALL[4]], ids=lambda s: s.name)
def test_a_rows_bits_do_not_depend_on_the_batch(spec):
    x, w, s = spec.make_inputs(5)
    for impl in implementations():
        run = jitted(spec, impl)
        whole = np.asarray(run(x, w, s))
        for part in (slice(0, 1), slice(41, 60), slice(spec.rows - 33, spec.rows)):
            np.testing.assert_array_equal(np.asarray(run(x[part], w, s)), whole[part], impl)
        np.testing.assert_array_equal(np.asarray(run(x[::-1], w, s)), whole[::-1], impl)
        dirty = np.asarray(run(x.at[3].set(jnp.nan), w, s))
        rest = np.arange(spec.rows) != 3
        np.testing.assert_array_equal(dirty[rest], whole[rest], impl)


@pytest.mark.gpu
def test_kernels_take_other_weights_without_recompiling():
    for impl in implementations():
        run = jitted(SMALL[0], impl)
        for seed in (7, 8, 9):
            args = SMALL[0].make_inputs(seed)
            np.testing.assert_array_equal(np.asarray(run(*args)), np.asarray(jitted(SMALL[0], impl)(*args)), impl)
        assert run._cache_size() == 1


# --- deviceless -------------------------------------------------------------------------------------------------------


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
def test_hopper_kernel_compiles_to_register_wgmma_without_spills():
    names = ("qb_index", "front", "wo_a", "qb_one_row")
    for name, got in deviceless.compile_all("sm_90a", FACTORY, names).items():
        kernel = got.matching("block_scaled_matmul")
        assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0 and kernel.registers <= 168, kernel.kernels
        spec = next(s for s in FULL if s.name == name)
        tile = hopper.choose(spec.rows, spec.outputs, spec.inner, spec.groups, 132)
        assert f"wgmma.mma_async.sync.aligned.m64n{tile.n}k16.f32.bf16.bf16" in kernel.ptx
        assert "mul.rn.bf16x2" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx
        # nothing as large as the weights is written on the way: neither a bf16 copy nor one of the bytes
        assert f"bf16[{spec.outputs},{spec.inner}]" not in got.hlo and "copy(" not in got.hlo


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@needs_jax_triton
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blackwell_kernel_compiles_to_block_scaled_tensor_cores(target):
    compiled = deviceless.compile_for(target, FACTORY, "qb_index:blackwell")
    assert sorted(k.name for k in compiled.kernels) == ["block_scaled_matmul_triton", "fp8_quantise"]
    got = compiled.matching("block_scaled_matmul")
    assert compiled.spill_bytes == 0
    assert "tcgen05.mma" in got.ptx and "mxf8f6f4.block_scale" in got.ptx
    assert deviceless.unfenced_products(got.ptx) == 0


BF16_PRODUCTS = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma", "sm_103a": "tcgen05.mma"}


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@needs_jax_triton
@pytest.mark.parametrize("target", BF16_PRODUCTS)
def test_blackwell_kernel_of_bf16_rows_compiles_to_tensor_cores(target):
    compiled = deviceless.compile_all(target, FACTORY, ("wo_a:blackwell", "wo_a_one_row:blackwell"))
    for name, got in compiled.items():
        assert [k.name for k in got.kernels] == ["block_scaled_matmul_bf16_triton"], name
        assert got.spill_bytes == 0, got.kernels
        assert BF16_PRODUCTS[target] in got.ptx and "mul.rn.bf16x2" in got.ptx
        assert deviceless.unfenced_products(got.ptx) == 0, name
        assert ("kind::f16" in got.ptx) == (target != "sm_90a")
        assert "bf16[8192,4096]" not in got.hlo and "copy(" not in got.hlo, "no expanded copy of the weight"
