"""sparse_attention against a float64 loop in numpy: keys, masks, sink, inverse RoPE, empty rows, poison."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.sparse_attention import attend, explain, sparse_attention, specs

POISON = 0xFF  # as e4m3 payload and scale: NaN; as e8m0 scale: 2^128


def decode_fp8(record, dim):
    values = record[..., :dim].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values * np.repeat(2.0 ** (record[..., dim:].astype(np.float64) - 127), 32, -1)


def decode_fp4(record, dim):
    packed = record[..., : dim // 2]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*record.shape[:-1], dim)
    values = codes.view(np.uint8).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return values * np.repeat(record[..., dim // 2 :].view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, -1)


def loop(q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, *, window, scale, bounds=None):
    """The definition, one row and one head at a time, in float64."""
    batch, span, heads, dim = q.shape
    out = np.zeros(q.shape)
    for b, s in np.ndindex(batch, span):
        p, slot = positions[b, s], slots[b]
        if p < 0 or slot < 0:
            continue
        first, last = (max(p - window + 1, 0), p) if bounds is None else (bounds[0][b, s], bounds[1][b, s] - 1)
        rows = [window_pool[slot, k % window_pool.shape[1]] for k in range(first, last + 1)]
        keys = [decode_fp8(r, dim) if r.dtype == np.uint8 else r.astype(np.float64) for r in rows]
        for entry in [] if global_slots is None else global_slots[b, s]:
            if entry >= 0:
                r = global_pool[entry // global_pool.shape[1], entry % global_pool.shape[1]]
                keys.append(decode_fp4(r, dim) if r.dtype == np.uint8 else r.astype(np.float64))
        if not keys:
            continue
        keys = np.stack(keys)
        for h in range(heads):
            logits = keys @ q[b, s, h].astype(np.float64) * scale
            peak = max(logits.max(), sink[h])
            p_ = np.exp(logits - peak)
            out[b, s, h] = p_ @ keys / (p_.sum() + np.exp(sink[h] - peak))
        pairs = cos.shape[-1]
        z = out[b, s, :, dim - 2 * pairs :: 2] + 1j * out[b, s, :, dim - 2 * pairs + 1 :: 2]
        z = z * (cos[b, s].astype(np.float64) - 1j * sin[b, s])
        out[b, s, :, dim - 2 * pairs :: 2], out[b, s, :, dim - 2 * pairs + 1 :: 2] = z.real, z.imag
    return out


def unpacked(inputs, dim):
    """The same problem with value pools (precision `float32`)."""
    more = dict(q=inputs["q"].astype(np.float32), window_pool=decode_fp8(inputs["window_pool"], dim).astype(np.float32))
    if inputs["global_pool"] is not None:
        more["global_pool"] = decode_fp4(inputs["global_pool"], dim).astype(np.float32)
    return inputs | more


def check(inputs, spec, tolerance, **options):
    got = np.asarray(jax.jit(lambda kw: sparse_attention(**kw, **spec.options, **options))(inputs))
    bounds = (options["window_start"], options["window_end"]) if options else None
    want = loop(**inputs, **spec.options, bounds=bounds)
    assert got.dtype == inputs["q"].dtype
    error = np.linalg.norm(got.astype(np.float64) - want) / max(np.linalg.norm(want), 1e-30)
    assert error < tolerance, f"{spec.name}: relative error {error:.2e}"
    return got


@pytest.mark.parametrize("spec", specs.CPU_SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("precision", ["released", "float32_cache", "float32"])
def test_matches_loop(spec, precision):
    inputs = spec.make_inputs(seed=7)
    if precision == "float32_cache":
        inputs["q"] = inputs["q"].astype(np.float32)
    elif precision == "float32":
        inputs = unpacked(inputs, spec.dim)
    check(inputs, spec, 6e-3 if precision == "released" else 2e-6)


def turned(inputs):
    """The same problem with a query that is already rotated."""
    q, pairs = inputs["q"].astype(np.float64), inputs["cos"].shape[-1]
    z = (q[..., -2 * pairs :: 2] + 1j * q[..., 1 - 2 * pairs :: 2]) * (inputs["cos"] + 1j * inputs["sin"])[:, :, None]
    q[..., -2 * pairs :: 2], q[..., 1 - 2 * pairs :: 2] = z.real, z.imag
    return inputs | dict(q=q.astype(inputs["q"].dtype))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rotates_the_query_on_request(dtype):
    inputs = specs.TINY.make_inputs(seed=8)
    inputs["q"] = inputs["q"].astype(dtype)
    got = np.asarray(sparse_attention(**inputs, **specs.TINY.options, rotate_query=True))
    want = np.asarray(sparse_attention(**turned(inputs), **specs.TINY.options))
    tolerance = 2e-6 if dtype == np.float32 else 4e-3  # a rounding of q may fall the other way
    assert np.linalg.norm((got - want).astype(np.float64)) < tolerance * np.linalg.norm(want.astype(np.float64))
    assert np.abs((got - np.asarray(sparse_attention(**inputs, **specs.TINY.options))).astype(np.float64)).max() > 1e-2


def behind(inputs, first):
    """The same queries as the last columns of wider rows."""
    q = inputs["q"]
    rows = np.concatenate([np.full((*q.shape[:2], first), np.nan, q.dtype), q.reshape(*q.shape[:2], -1)], -1)
    return inputs | dict(q=rows)


def test_queries_are_read_behind_other_columns():
    inputs = specs.TINY.make_inputs(seed=9)
    want = sparse_attention(**inputs, **specs.TINY.options, rotate_query=True)
    for first in (0, 24):
        got = sparse_attention(**behind(inputs, first), **specs.TINY.options, rotate_query=True, first=first)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    for first, q in ((0, behind(inputs, 2)), (-256, behind(inputs, 0)), (256, behind(inputs, 0)), (24, inputs)):
        with pytest.raises(ValueError, match="expected"):
            sparse_attention(**q, **specs.TINY.options, first=first)


@pytest.mark.parametrize("context", [0, 1, 6, 7, 8, 11, 12, 40])
def test_window_edges(context):
    """Sequences shorter than, equal to and longer than the window and the ring."""
    spec = dataclasses.replace(specs.TINY, context=context, selected=0)
    inputs = spec.make_inputs(seed=context)
    inputs["q"] = inputs["q"].astype(np.float32)
    check(inputs, spec, 2e-6)


def poisoned(inputs, spec):
    """Fill every record that no row may read with NaN bytes."""
    ring = np.full_like(inputs["window_pool"], POISON)
    for b, s in np.ndindex(spec.batch, spec.span):
        p = inputs["positions"][b, s]
        if p >= 0 and inputs["slots"][b] >= 0:
            used = [k % spec.ring for k in range(max(p - spec.window + 1, 0), p + 1)]
            ring[inputs["slots"][b], used] = inputs["window_pool"][inputs["slots"][b], used]
    pool = np.full_like(inputs["global_pool"], POISON).reshape(-1, inputs["global_pool"].shape[-1])
    used = inputs["global_slots"][inputs["global_slots"] >= 0]
    pool[used] = inputs["global_pool"].reshape(pool.shape)[used]
    return inputs | dict(window_pool=ring, global_pool=pool.reshape(inputs["global_pool"].shape))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_poison_reaches_nobody(dtype):
    spec = dataclasses.replace(specs.TINY, batch=4, context=5, sparsity=0.5)
    inputs = spec.make_inputs(seed=3)
    inputs["q"] = inputs["q"].astype(dtype)
    inputs["slots"][1] = -1  # invalid request
    inputs["positions"][2, 2] = -1  # padding row
    inputs["global_slots"][0] = -1  # window only
    clean = check(inputs, spec, 6e-3)
    dirty = poisoned(inputs, spec)
    dirty["q"] = inputs["q"].copy()
    dirty["q"][1], dirty["q"][2, 2] = np.nan, np.inf
    got = np.asarray(jax.jit(lambda kw: sparse_attention(**kw, **spec.options))(dirty))
    np.testing.assert_array_equal(got, clean)
    assert not got[1].any() and not got[2, 2].any()


def test_empty_rows_are_zero_and_slots_outside_the_pool_are_masked():
    spec = specs.TINY
    inputs = spec.make_inputs(seed=4)
    none = np.full((spec.batch, spec.span), 0, np.int32)
    outside = np.full_like(inputs["global_slots"], inputs["global_pool"].shape[0] * spec.page_entries)
    got = sparse_attention(**inputs | dict(global_slots=outside), window_start=none, window_end=none, **spec.options)
    assert not np.asarray(got).any()


def test_explicit_bounds_are_shared_by_all_rows_of_a_draft_block():
    """The drafter's key set: context positions max(0, P - W)..P - 1 and the block's own rows, for every row."""
    spec = dataclasses.replace(specs.TINY_SWA, span=5, ring=13)
    for prefix in (1, 7, 8, 9, 30):
        inputs = dataclasses.replace(spec, context=prefix).make_inputs(seed=prefix)
        inputs["q"] = inputs["q"].astype(np.float32)
        start = np.full((spec.batch, 5), max(0, prefix - 8), np.int32)
        end = np.full((spec.batch, 5), prefix + 5, np.int32)
        check(inputs, dataclasses.replace(spec, window=13), 2e-6, window_start=start, window_end=end)


def test_order_of_pages_and_slots_does_not_matter():
    spec = specs.TINY
    inputs = spec.make_inputs(seed=5)
    inputs["q"] = inputs["q"].astype(np.float32)
    base = np.asarray(sparse_attention(**inputs, **spec.options))
    rng = np.random.default_rng(0)
    pages, entries = inputs["global_pool"].shape[:2]
    move = rng.permutation(pages)
    pool = np.empty_like(inputs["global_pool"])
    pool[move] = inputs["global_pool"]
    slots = inputs["global_slots"]
    slots = np.where(slots >= 0, move[slots // entries] * entries + slots % entries, -1)
    slots = rng.permuted(slots, axis=-1).astype(np.int32)
    again = np.asarray(sparse_attention(**inputs | dict(global_pool=pool, global_slots=slots), **spec.options))
    np.testing.assert_allclose(again, base, rtol=2e-5, atol=1e-6)


def test_sink_only_lowers_the_output():
    q = jnp.ones((1, 2, 32), jnp.float32)
    keys = jnp.ones((1, 4, 32), jnp.float32)
    mask = jnp.ones((1, 4), bool)
    sink = jnp.array([-jnp.inf, 32.0])  # raw logit: exp(32) beside 4 * exp(32 * 1.0)
    out = attend(q, keys, mask, sink, 1.0)
    np.testing.assert_allclose(out[0, :, 0], [1.0, 0.8], rtol=1e-6)
    assert not np.asarray(attend(q, keys, ~mask, jnp.array([200.0, -200.0]), 1.0)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slots=np.zeros(5, np.int32)), "slots expected"),
        (dict(window_pool=np.zeros((2, 12, 60), np.uint8)), "window_pool expected"),
        (dict(global_slots=None), "both or neither"),
        (dict(sink=np.zeros(3, np.float32)), "sink expected"),
        (dict(sin=np.zeros((2, 3, 9), np.float32)), "sin expected"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    inputs = specs.TINY.make_inputs(seed=0) | change
    with pytest.raises(ValueError, match=message):
        sparse_attention(**inputs, **specs.TINY.options)


def test_explain_names_the_choice():
    inputs = specs.TINY.make_inputs(seed=0)
    assert explain(*inputs.values(), arch="cpu", **specs.TINY.options)["chosen"] == "reference"


# --- the kernels on a GPU --------------------------------------------------------------------------------------------


def on_hopper():
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


@pytest.fixture(params=["hopper_persistent", "hopper_ahead", "one_pass"])
def impl(request):
    if request.param.startswith("hopper") and not on_hopper():
        pytest.skip("the kernel runs on an sm_90 GPU")
    return request.param


def kernel_against_reference(impl, spec, inputs, same=None, **options):
    """same: inputs for the reference, if others than the kernel's."""
    run = lambda impl, kw: jax.jit(lambda kw: sparse_attention(**kw, **spec.options, **options, impl=impl))(jax.device_put(kw))
    got = np.asarray(run(impl, inputs)).astype(np.float32)
    want = np.asarray(run("reference", inputs if same is None else same)).astype(np.float32)
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    worst = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
    assert error < 4e-3 and worst < 2e-2, f"{spec.name}: relative {error:.2e}, worst {worst:.2e}"
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("spec", specs.GPU_SPECS, ids=lambda s: s.name)
def test_kernel_matches_reference(impl, spec):
    inputs = spec.make_inputs(seed=11)
    kernel_against_reference(impl, spec, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [specs.SMALL, specs.M384_SWA], ids=lambda s: s.name)
def test_kernel_rotates_the_query(impl, spec):
    inputs = spec.make_inputs(seed=13)
    got = kernel_against_reference(impl, spec, inputs, rotate_query=True)
    apart = np.abs(got - kernel_against_reference(impl, spec, turned(inputs))).max()
    assert apart <= 2e-2 * np.abs(got).max()


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 4096])
def test_kernel_reads_queries_behind_other_columns(impl, first):
    inputs = specs.SMALL.make_inputs(seed=17)
    options = specs.SMALL.options | {"rotate_query": True, "impl": impl}
    run = lambda inputs, **more: np.asarray(sparse_attention(**inputs, **options, **more))
    np.testing.assert_array_equal(run(behind(inputs, first), first=first), run(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("context", [0, 1, 62, 63, 64, 126, 127, 128, 132, 133, 134, 500])
def test_kernel_window_edges(impl, context):
    spec = dataclasses.replace(specs.SMALL, context=context, ratio=1)
    kernel_against_reference(impl, spec, spec.make_inputs(seed=context))


@pytest.mark.gpu
def test_kernel_poison_reaches_nobody(impl):
    spec = dataclasses.replace(specs.SHORT, batch=5, sparsity=0.5)
    inputs = spec.make_inputs(seed=12)
    inputs["slots"][1], inputs["positions"][2, 2], inputs["global_slots"][0] = -1, -1, -1
    inputs["slots"][3] = spec.batch  # outside the pool
    clean = kernel_against_reference(impl, spec, inputs)
    dirty = poisoned(inputs | dict(slots=np.where(inputs["slots"] >= spec.batch, -1, inputs["slots"])), spec)
    dirty["q"] = inputs["q"].copy()
    dirty["q"][1], dirty["q"][2, 2] = np.nan, np.inf
    np.testing.assert_array_equal(kernel_against_reference(impl, spec, dirty), clean)
    assert not clean[1].any() and not clean[2, 2].any() and not clean[3].any()


@pytest.mark.gpu
def test_kernel_reads_a_pool_of_19_gb(impl):
    """That of 64 requests of 2**20 tokens, zeros but for a small pool's records, which lie far apart, the last one last."""
    inputs = specs.SMALL.make_inputs(seed=19)
    pages, entries, record = specs.M384_1M.pool_shape
    records = inputs["global_pool"].reshape(-1, record)
    far = np.linspace(0, pages * entries - 1, len(records)).astype(np.int32)
    inputs["global_slots"][..., 0] = len(records) - 1
    make = jax.jit(lambda x: jnp.zeros((pages, entries, record), jnp.uint8).at[far // entries, far % entries].set(x))
    slots = np.where(inputs["global_slots"] >= 0, far[inputs["global_slots"]], -1)
    there = inputs | dict(global_pool=make(records), global_slots=slots)
    assert np.histogram(72 * slots.astype(np.int64), [0, 2**31, 2**32, 2**33])[0].all(), "of 31, 32 and more bits"
    kernel_against_reference(impl, specs.SMALL, there, same=inputs)


@pytest.mark.gpu
def test_kernel_explicit_bounds(impl):
    spec = dataclasses.replace(specs.M384_SWA, batch=3, span=5, window=133)
    for prefix in (1, 127, 128, 129, 1000):
        inputs = dataclasses.replace(spec, context=prefix).make_inputs(seed=prefix)
        start = np.full((3, 5), max(0, prefix - 128), np.int32)
        end = np.full((3, 5), prefix + 5, np.int32)
        kernel_against_reference(impl, spec, inputs, window_start=start, window_end=end)


def test_explain_says_why_the_kernel_is_passed_over():
    inputs = specs.TINY.make_inputs(seed=0)
    answer = explain(*inputs.values(), arch="sm_90", **specs.TINY.options)
    assert answer["chosen"] == "reference" and answer["hopper_persistent"]
    assert "sm_103" in explain(*inputs.values(), arch="sm_103", **specs.TINY.options)["hopper_persistent"]


@pytest.mark.parametrize(("arch", "chosen"), [("sm_90", "hopper_persistent"), ("sm_100", "one_pass"), ("sm_103", "one_pass")])
def test_released_shapes_get_a_kernel(arch, chosen):
    pytest.importorskip("triton")
    inputs = dataclasses.replace(specs.SMALL, batch=1, context=0).make_inputs(0)
    for requests in (64, 128):
        pages, *record = specs.M384_1M.pool_shape
        pool = jax.ShapeDtypeStruct((pages * requests // 64, *record), jnp.uint8)
        assert explain(*(inputs | dict(global_pool=pool)).values(), arch=arch, **specs.SMALL.options)["chosen"] == chosen
    assert explain(*inputs.values(), arch=arch, **specs.SMALL.options)["chosen"] == chosen
    assert "rotary pairs" in explain(*(inputs | dict(cos=inputs["cos"][..., :24])).values(), impl="auto", arch="sm_103",
                                     **specs.SMALL.options)["one_pass"]  # fmt: skip
