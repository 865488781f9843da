"""The experts kernels interpreted and on a GPU against the definition, and their deviceless compiles."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import hlo_report
from pallas_kernels.experts import experts, experts_parts, hopper, shuffle_weights
from pallas_kernels.experts.reference import qdq_fp8
from pallas_kernels.experts.specs import ExpertsSpec
from tests import deviceless, triton_interpreter

# Multiples of the kernels' tiles, small enough to make weights for in a test.
SMALL = (
    ExpertsSpec("uniform", 24, 512, 256, 6, 3),
    ExpertsSpec("one_row", 1, 512, 256, 6, 3),
    ExpertsSpec("all_on_one", 90, 512, 256, 6, 1, "one"),
    ExpertsSpec("foreign", 70, 768, 512, 5, 3, "skewed", total=12, first=4),
    ExpertsSpec("many_rows", 200, 512, 256, 4, 3),
)
FACTORY = "pallas_kernels.experts.specs:deviceless_case"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")



# One tile of channels and of outputs, so that what is left is where rows fall.
INTERPRETED = (
    ExpertsSpec("tiny_empty", 3, 128, 128, 9, 2),  # three experts at least have no row, none fills a tile
    ExpertsSpec("tiny_one_row", 1, 256, 128, 4, 3),
    ExpertsSpec("tiny_two_tiles", 131, 128, 256, 3, 1, "one"),
    ExpertsSpec("tiny_foreign", 20, 128, 128, 3, 3, "skewed", total=12, first=4),
)


@pytest.fixture(scope="module")
def interpreted():
    """{spec or what: output of the Triton kernels}, all from one child process."""
    names = "x", "ids", "weights", "w13", "s13", "w2", "s2"
    arrays = {s.name: dict(zip(names, map(np.asarray, s.make_inputs(23)), strict=True)) for s in INTERPRETED}
    cases = {s.name: (arrays[s.name], dict(first_expert=s.first)) for s in INTERPRETED}
    few = arrays["tiny_empty"]
    cases["part"] = few | {name: few[name][2:] for name in ("x", "ids", "weights")}, {}
    cases["none_here"] = few | dict(ids=few["ids"] + 9), {}
    dirty = few["x"].copy()
    dirty[1] = np.nan
    cases["dirty"] = few | dict(x=dirty), {}
    calls = [("pallas_kernels.experts.blackwell:experts", *case) for case in cases.values()]
    cases["two_parts"] = arrays["tiny_one_row"], dict(parts=2)
    calls.append(("pallas_kernels.experts.blackwell:experts_parts", *cases["two_parts"]))
    return dict(zip(cases, triton_interpreter.run(calls), strict=True))


@needs_triton
@pytest.mark.parametrize("spec", INTERPRETED, ids=lambda s: s.name)
def test_interpreted_kernels_equal_the_definition(interpreted, spec):
    reference = jax.jit(functools.partial(experts, first_expert=spec.first, impl="reference"))
    want = np.asarray(reference(*spec.make_inputs(23)), np.float64)
    assert np.abs(want).max() > 0.1
    # as on a GPU: a code of t moves where a bf16 value of g or v rounds the other way
    assert np.linalg.norm(interpreted[spec.name] - want) < 0.02 * np.linalg.norm(want)


@needs_triton
def test_interpreted_rows_do_not_depend_on_the_batch(interpreted):
    whole = interpreted["tiny_empty"]
    np.testing.assert_array_equal(interpreted["part"], whole[2:])
    rest = np.arange(3) != 1
    np.testing.assert_array_equal(interpreted["dirty"][rest], whole[rest])
    np.testing.assert_array_equal(interpreted["none_here"], np.zeros_like(whole))


@needs_triton
def test_interpreted_parts_are_the_columns(interpreted):
    low, high = interpreted["two_parts"]
    np.testing.assert_array_equal(np.concatenate([low, high], 1), interpreted["tiny_one_row"])


def implementations():
    """Those this device can run: the Triton kernel also on Hopper, where its dot is emulated."""
    capability = str(jax.devices()[0].compute_capability)
    names = ["hopper"] if capability == "9.0" else []
    return names + (["blackwell"] if importlib.util.find_spec("jax_triton") else [])


def call(impl, spec, arrays, **options):
    tensors = shuffle_weights(*arrays[3:]) if impl == "hopper" else arrays[3:]
    run = jax.jit(functools.partial(experts, first_expert=spec.first, impl=impl, **options))
    return run, (*arrays[:3], *tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_kernel_equals_the_definition(spec):
    arrays = spec.make_inputs(21)
    want = np.asarray(experts(*arrays, first_expert=spec.first, impl="reference"), np.float64)
    for impl in implementations():
        run, args = call(impl, spec, arrays)
        got = np.asarray(run(*args), np.float64)
        # A bf16 value of g or v that rounds the other way can move an FP8 code of t by 2**-4 of itself: about 1 % of
        # the norm. A wrong scale, row or expert is far outside.
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want), impl
        np.testing.assert_array_equal(np.asarray(run(*args)), got.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_the_plan_of_one_launch_changes_no_bit(spec):
    arrays = spec.make_inputs(22)
    for impl in implementations():
        run, args = call(impl, spec, arrays)
        other, _ = call(impl, spec, arrays, plan_impl="reference")
        np.testing.assert_array_equal(np.asarray(other(*args)), np.asarray(run(*args)))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_parts_are_the_columns_bit_for_bit(spec):
    arrays = spec.make_inputs(24)
    for impl in implementations():
        run, args = call(impl, spec, arrays)
        whole = np.asarray(run(*args))
        width = 64 if impl == "hopper" else 128  # the columns of one tile
        for parts in (n for n in (1, 2, 4) if spec.hidden // n % width == 0):
            cut = functools.partial(experts_parts, parts=parts, spare_sms=8, first_expert=spec.first, impl=impl)
            got = [np.asarray(y) for y in jax.jit(cut)(*args)]
            assert [y.shape for y in got] == [(spec.rows, spec.hidden // parts)] * parts
            np.testing.assert_array_equal(np.concatenate(got, 1), whole, err_msg=f"{impl} in {parts}")


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_batch():
    spec = SMALL[0]
    x, ids, weights, *tensors = spec.make_inputs(5)
    for impl in implementations():
        run, args = call(impl, spec, (x, ids, weights, *tensors))
        whole = np.asarray(run(*args))
        part = np.asarray(run(x[7:19], ids[7:19], weights[7:19], *args[3:]))
        np.testing.assert_array_equal(part, whole[7:19])


@pytest.mark.gpu
def test_hopper_rows_have_the_same_bits_in_tiles_of_any_size_and_after_fp8():
    """What ranks need: more rows come in wider tiles, and rows of another rank have been through FP8."""
    if "hopper" not in implementations():
        pytest.skip("the kernel is for Hopper")
    spec = SMALL[3]
    arrays = spec.make_inputs(10)
    _, (x, *rest) = call("hopper", spec, arrays)

    def run(x, n):
        options = {"first_expert": spec.first, "tuning": {"n": n}}
        return np.asarray(jax.jit(functools.partial(hopper.experts, **options))(x, *rest)).view(np.int32)

    want = run(x, hopper.TILE_ROWS[0])
    for n in hopper.TILE_ROWS[1:]:
        np.testing.assert_array_equal(run(x, n), want, err_msg=f"tiles of {n} rows")
    np.testing.assert_array_equal(run(qdq_fp8(x), 16), want)


@pytest.mark.gpu
def test_poison_stays_in_its_row_and_reload_needs_no_compile():
    spec = SMALL[0]
    x, ids, weights, *tensors = spec.make_inputs(6)
    for impl in implementations():
        run, args = call(impl, spec, (x, ids, weights, *tensors))
        clean = np.asarray(run(*args))
        dirty = np.asarray(run(x.at[3].set(jnp.nan), *args[1:]))
        rest = np.arange(spec.rows) != 3
        np.testing.assert_array_equal(dirty[rest], clean[rest])
        for seed in (7, 8, 9):
            fresh = call(impl, spec, spec.make_inputs(seed))
            np.testing.assert_array_equal(np.asarray(run(*fresh[1])), np.asarray(fresh[0](*fresh[1])))
        assert run._cache_size() == 1


def assert_weights_are_only_read(hlo):
    """No instruction makes an array as large as a part of w2: a part of the product reads w2 where it lies."""
    entry, computations = hlo_report.computations(hlo)
    weights = [op for op in computations[entry] if op.opcode == "parameter" and max(op.sizes) > 100e6]
    made = [op for op in computations[entry] if op.opcode not in ("parameter", "bitcast", "tuple", "get-tuple-element")]
    assert len(weights) == 2 and max(max(op.sizes, default=0) for op in made) < 100e6


needs_compiler = pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))


@pytest.mark.deviceless
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name,rows,parts", [("verify_balanced", 32, 4), ("one_row", 8, 1), ("prefill", 64, 2)])
def test_hopper_kernel_compiles_to_register_wgmma_without_spills(name, rows, parts):
    compiled = deviceless.compile_for("sm_90a", FACTORY, f"{name}:hopper:{parts}")
    got = compiled.matching("experts_")
    assert len(got.kernels) == 3 + parts and got.spill_bytes == 0, got.kernels  # two quantisers, products of both kinds
    assert_weights_are_only_read(compiled.hlo)
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3" in got.ptx
    assert "prmt.b32" in got.ptx and "cp.async.bulk.tensor" in got.ptx


@pytest.mark.deviceless
@needs_compiler
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blackwell_kernel_compiles_to_block_scaled_tensor_cores(target):
    # not importorskip: jax_triton imports only beside a CUDA plugin, which the compiling process has and this one has not
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed")
    compiled = deviceless.compile_for(target, FACTORY, "verify_balanced:blackwell:2")
    assert len(compiled.matching("fp8_quantise").kernels) == 2 and compiled.spill_bytes == 0
    assert_weights_are_only_read(compiled.hlo)
    got = compiled.matching("experts_")
    assert len(got.kernels) == 3  # the second product in two parts
    assert "tcgen05.mma" in got.ptx and "mxf8f6f4.block_scale" in got.ptx
    assert deviceless.unfenced_products(got.ptx) == 0
