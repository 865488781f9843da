"""Exit of a hyper-connection site with the next one's entry: against numpy in float64, and the kernel in the model."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax import linear, model
from dsv41_jax.dspark import propose
from dsv41_jax.model import Network, forward, head
from dsv41_jax.options import DecodeOptions
from dsv41_jax.precision import precision
from pallas_kernels.fp8_round_trip import fp8_round_trip
from pallas_kernels.hyper_coefficients.api import Static
from pallas_kernels.hyper_leave import api, enter_next, explain, fused, hyper_leave, reference, site_to_site
from pallas_kernels.hyper_leave.specs import BY_NAME, SPECS
from pallas_kernels.registry import Implementation
from tests import deviceless
from tests.test_hyper_coefficients import check_coefficients

SMALL = [s for s in SPECS if s.name.startswith("tiny")]


def f64(x):
    return np.asarray(x, np.float64)


def whole(fn):
    """f64[N, M * H] of either form."""
    parts = f64(fn).reshape(3, -1, fn.shape[1]) if reference.is_split(fn) else f64(fn)[None]
    return parts.sum(0)


def check(got, inputs, spec):
    """Every output against numpy from the inputs it has: what is made of the new streams, from the streams returned."""
    streams, y, post, comb, pre, _, weight, *affine = map(f64, inputs)
    fn = whole(inputs[5])
    new, u, *mixes = map(f64, got[:5])
    want = post[..., None] * y[:, None] + np.einsum("tjk,tjh->tkh", comb, streams)
    scale = post[..., None] * np.abs(y[:, None]) + np.einsum("tjk,tjh->tkh", comb, np.abs(streams))
    assert (np.abs(new - want) <= 2.0**-8 * np.abs(want) + 2.0**-21 * scale).all()  # rounded once
    assert np.mean(got[0] == np.asarray(want, jnp.bfloat16)) > 0.999
    flat, m = new.reshape(len(new), -1), spec.streams
    r = 1 / np.sqrt((flat * flat).mean(1, keepdims=True) + spec.eps)
    check_coefficients(mixes, flat @ fn.T * r, *affine, streams=m, iterations=spec.iterations, eps=spec.mix_eps)
    x = f64(jnp.asarray((pre[..., None] * new).sum(1), jnp.bfloat16))
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps) * weight
    np.testing.assert_allclose(u, want, rtol=3.1 * 2**-8, atol=1e-6)  # as in test_hyper_enter
    assert np.mean(got[1] == np.asarray(want, jnp.bfloat16)) > 0.999
    for rounded in got[5:]:
        assert spec.round_trip
        np.testing.assert_array_equal(np.asarray(rounded), np.asarray(fp8_round_trip(got[1], impl="reference")))


def interpreted(streams, y, post, comb, pre, fn, weight, scale, base, *, eps, iterations, mix_eps, round_trip):
    new, ahead = fused.hyper_leave(streams, y, post, comb, pre, fn, interpret=True)
    static = Static(streams.shape[1], iterations, mix_eps)
    u, *rest = fused.finish(ahead, weight, scale, base, static=static, eps=eps, round_trip=round_trip, interpret=True)
    return new, u, *rest[round_trip:], *rest[:round_trip]


@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("run", ["reference", "fused"])
def test_equals_numpy(spec, run):
    inputs = spec.make_inputs(3)
    run = interpreted if run == "fused" else functools.partial(site_to_site, impl="reference")
    check(run(*inputs, **spec.options), inputs, spec)


def test_rounding_the_rows_changes_nothing_else():
    spec = BY_NAME["tiny_wide"]
    inputs = spec.make_inputs(6)
    *got, rounded = interpreted(*inputs, **spec.options | {"round_trip": True})
    for a, b in zip(got, interpreted(*inputs, **spec.options), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert np.asarray(rounded).tobytes() == np.asarray(fp8_round_trip(got[1])).tobytes()
    assert (np.asarray(rounded) != np.asarray(got[1])).mean() > 0.3
    apart = site_to_site(*inputs, **spec.options | {"round_trip": True}, impl="reference")
    np.testing.assert_array_equal(np.asarray(apart[5]), np.asarray(fp8_round_trip(apart[1])))


ON_GPU = pytest.param(functools.partial(site_to_site, impl="fused"), marks=pytest.mark.gpu, id="gpu")


@pytest.mark.parametrize("run", [pytest.param(interpreted, id="interpreted"), ON_GPU])
def test_a_row_does_not_depend_on_the_rows_beside_it(run):
    spec = BY_NAME["tiny_wide"]
    inputs = spec.make_inputs(4)
    together = run(*inputs, **spec.options)
    part = run(*[x[17:40] if x.shape[0] == spec.rows else x for x in inputs], **spec.options)  # in another place of its tile
    for a, b in zip(part, together, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)[17:40])


def test_falls_back_with_a_reason():
    arguments = BY_NAME["tiny"].make_inputs(0)[:6]
    streams, *rest = arguments
    told = explain(*arguments, arch="sm_90")
    assert told == {"chosen": "fused"}
    told = explain(*arguments, arch="cpu")
    assert told["chosen"] == "reference" and "is for sm_90" in told["fused"]
    assert "float32" in explain(streams.astype(jnp.float32), *rest, arch="sm_90")["fused"]
    shape = lambda t, m, h: [jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in (
        (t, m, h), (t, h), (t, m), (t, m, m), (t, m), (3 * m * (2 + m), m * h))]  # fmt: skip
    for size, why in (((16, 3, 64), "2 or 4"), ((16, 4, 48), "multiple of 32")):
        assert why in explain(*shape(*size), arch="sm_90")["fused"]
    with pytest.raises(ValueError, match=r"expected fn \[24, 192\]"):
        hyper_leave(*arguments[:-1], arguments[-1][:4])
    got, ahead = hyper_leave(*arguments, impl="reference")
    assert ahead is None
    np.testing.assert_array_equal(got, reference.expand(*arguments[:4]))
    with pytest.raises(ValueError, match="expected pre"):
        enter_next(got, ahead, arguments[4][:, :1], arguments[5], jnp.ones(96), jnp.ones(3), jnp.ones(8), eps=1e-6,
                   iterations=2, mix_eps=1e-6)  # fmt: skip


def test_parts_are_the_weights_to_the_last_bit():
    """fp32 precisions multiply by what they are joined to, bf16 streams by the parts themselves."""
    rng = np.random.default_rng(5)
    fn = jnp.asarray(rng.standard_normal((8, 192)) * 2.0 ** rng.integers(-80, 80, (8, 192)), jnp.float32)
    parts = reference.split(fn)
    np.testing.assert_array_equal(reference.joined(parts), fn)
    for dtype in (jnp.bfloat16, jnp.float32):
        streams = jnp.asarray(rng.standard_normal((3, 2, 96)), dtype)
        np.testing.assert_array_equal(reference.products(streams, parts), reference.products(streams, fn))


@pytest.fixture
def runs(monkeypatch):
    """The kernel in place of the one for GPUs, interpreted; [("hyper_leave", fn) or ("finish", norm), ...] of every call."""
    found = []

    def recorded(function, operand):
        def run(*args, **kwargs):
            found.append((function.__name__, args[operand]))
            return function(*args, **kwargs, interpret=True)

        return run

    kernel = Implementation("fused", recorded(fused.hyper_leave, 5), refuses=fused.refuses)
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (kernel, api.IMPLEMENTATIONS[-1]))
    monkeypatch.setattr(fused, "finish", recorded(fused.finish, 1))
    return found


def with_it(name: str, impl: str = "fused", **changes) -> Network:
    c = dataclasses.replace(harness.config(name), **changes)
    return Network(c, harness.GEOMETRY, precision("released"), DecodeOptions(implementations=(("hyper_leave", impl),)))


def run_model(net: Network, weights, state, chunk):
    return head(weights, forward(weights, state, chunk, net)[1].hidden)


def inputs_of(net: Network):
    """(state, a chunk of two requests of eight tokens)"""
    tokens = np.stack([harness.prompt(8, 1), harness.prompt(8, 2)])
    chunk = harness.chunk_of(tokens, [0, 0], [8, 8], [0, 1], harness.page_tables([2, 2], net.config))
    return harness.init_state(net.config, net.geometry, net.precision), chunk


def test_the_model_computes_the_same_with_it(runs, monkeypatch):
    """A FULL1 and a REUSE layer, to compile little. A bf16 value of the streams may round the other way where sums take
    another order; few do, so the median is tight. Rows that the entry rounds through FP8 have the bits of those that go
    through it apart."""
    weights = copy.copy(harness.params("all_kinds"))
    weights.layers = weights.layers[1::2]
    logits, rounded, plain = {}, [], linear.fp8_round_trip
    monkeypatch.setattr(linear, "fp8_round_trip", lambda x, **which: rounded.append(x.shape) or plain(x, **which))
    for way in ("reference", "fused", "apart"):
        runs.clear()
        rounded.clear()
        if way == "apart":
            monkeypatch.setattr(model, "wants_round_trip", lambda *_: False)
        net = with_it("all_kinds", "reference" if way == "reference" else "fused", num_hidden_layers=2, compress_ratios=(1, 1), kv_source_layer_ids=(0,),
                      index_source_layer_ids=(0,), candidate_source_layer_id=0, num_nextn_predict_layers=0,
                      engram_layer_ids=(), engram_num_embeddings=(), dspark_target_layer_ids=())  # fmt: skip
        logits[way] = np.asarray(jax.jit(functools.partial(run_model, net))(weights, *inputs_of(net)))
        assert len(runs) == (0 if way == "reference" else 6)
        # five products a layer; three sites hand on, and round for the first product of the next one
        assert len(rounded) == 2 * 5 - (3 if way == "fused" else 0)
    assert logits["apart"].tobytes() == logits["fused"].tobytes()
    got, want = logits["fused"], logits["reference"]
    assert np.median(np.abs(got - want)) <= 1e-3 * want.std()
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= 0.9


def test_the_model_hands_on_where_nothing_else_changes_the_streams(runs):
    net, weights = with_it("all_kinds"), harness.params("all_kinds")
    assert [s.engram is not None for s in net.config.layers] == [False, True, False, False]
    jax.eval_shape(functools.partial(run_model, net, weights), *inputs_of(net))
    sites, norms = [], []
    for i, layer in enumerate(weights.layers):
        sites += [layer.hc_attn, layer.hc_ffn] if i > 1 else [layer.hc_ffn]
        norms += [layer.attn_norm, layer.ffn_norm] if i > 1 else [layer.ffn_norm]
    check_calls(runs, sites, norms)


def check_calls(runs, sites, norms):
    """A site's exit makes what the next one reads, with that one's fn and norm."""
    assert [name for name, _ in runs] == ["hyper_leave", "finish"] * len(sites)
    for (_, fn), site in zip(runs[::2], sites, strict=True):
        np.testing.assert_array_equal(fn, site.fn[...])
    for (_, weight), norm in zip(runs[1::2], norms, strict=True):
        np.testing.assert_array_equal(weight, norm[...])


def test_the_draft_stages_hand_on(runs):
    net, weights = with_it("odd_sizes"), harness.params("odd_sizes")
    state = harness.init_state(net.config, dataclasses.replace(net.geometry, slots=16), net.precision)
    rows = jnp.arange(16, dtype=jnp.int32)  # 48 rows of 3 tokens
    choose = lambda logits, column: jnp.argmax(logits, -1).astype(jnp.int32)
    jax.eval_shape(lambda state: propose(weights, state, rows, rows, rows, net, choose), state)
    first, second = weights.draft.stages
    check_calls(runs, [first.hc_ffn, second.hc_attn, second.hc_ffn], [first.ffn_norm, second.attn_norm, second.ffn_norm])


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_tensor_core_products_without_spills(target):
    compiled = deviceless.compile_all(target, "pallas_kernels.hyper_leave.specs:deviceless_case", ("verify", "verify_round_trip"))
    leave, *finish = compiled["verify"].matching("hyper_leave"), *[c.matching("hyper_finish") for c in compiled.values()]
    assert all(len(c.kernels) == 2 and not c.spill_bytes for c in compiled.values())
    assert ["cvt.rn.satfinite.e4m3x2.f32" in f.ptx for f in finish] == [False, True]
    # many programs of one warp on a multiprocessor hide one another's chains
    assert max(f.registers for f in finish) <= 80
    assert ("wgmma.mma_async" if target == "sm_90a" else "tcgen05.mma") in leave.ptx
    assert deviceless.unfenced_products(leave.ptx) == 0
    # streams and fn run ahead, 16 bytes a lane; of the streams in registers every value is there once. One program
    # is on a multiprocessor, so that registers beyond 128 push none off it
    assert leave.ptx.count("cp.async.cg.shared.global") >= 4 * 13 and leave.registers <= (176 if target == "sm_90a" else 128)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_numpy_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    check(site_to_site(*inputs, **spec.options, impl="fused"), inputs, spec)
