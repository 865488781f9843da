"""Exit of a hyper-connection site with the next one's entry: against numpy in float64, and the kernel in the model."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax.dspark import propose
from dsv41_jax.model import Network, forward, head
from dsv41_jax.options import DecodeOptions
from dsv41_jax.precision import precision
from pallas_kernels.hyper_leave import api, enter_next, explain, fused, hyper_leave, reference, site_to_site
from pallas_kernels.hyper_leave.specs import BY_NAME, SPECS
from pallas_kernels.registry import Implementation
from tests import deviceless

SMALL = [s for s in SPECS if s.name.startswith("tiny")]


def f64(x):
    return np.asarray(x, np.float64)


def check(got, inputs, eps):
    """Every output against numpy from the inputs it has: what is made of the new streams, from the streams returned."""
    streams, y, post, comb, pre, fn, weight = map(f64, inputs)
    new, u, r, products = map(f64, got)
    want = post[..., None] * y[:, None] + np.einsum("tjk,tjh->tkh", comb, streams)
    scale = post[..., None] * np.abs(y[:, None]) + np.einsum("tjk,tjh->tkh", comb, np.abs(streams))
    assert (np.abs(new - want) <= 2.0**-8 * np.abs(want) + 2.0**-21 * scale).all()  # rounded once
    assert np.mean(got[0] == np.asarray(want, jnp.bfloat16)) > 0.999
    np.testing.assert_allclose(r, 1 / np.sqrt((new * new).mean((1, 2)) + eps), rtol=1e-5)
    flat = new.reshape(len(new), -1)
    total = products.reshape(len(new), -1, fn.shape[0])[:, ::-1].sum(1)
    # bf16 parts of fn alone would be off by 2**-9 of this
    assert (np.abs(total - flat @ fn.T) <= 2.0**-20 * (np.abs(flat) @ np.abs(fn.T))).all()
    x = f64(jnp.asarray((pre[..., None] * new).sum(1), jnp.bfloat16))
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(u, want, rtol=3.1 * 2**-8, atol=1e-6)  # as in test_hyper_enter
    assert np.mean(got[1] == np.asarray(want, jnp.bfloat16)) > 0.999


def interpreted(streams, y, post, comb, pre, fn, weight, *, eps):
    new, ahead = fused.hyper_leave(streams, y, post, comb, pre, fn, interpret=True)
    return new, *fused.finish(ahead, weight, streams=streams.shape[1], eps=eps, interpret=True)


@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("run", ["reference", "fused"])
def test_equals_numpy(spec, run):
    inputs = spec.make_inputs(3)
    run = interpreted if run == "fused" else functools.partial(site_to_site, impl="reference")
    got = run(*inputs, **spec.options)
    assert got[3].shape == (spec.rows, 3 * spec.coefficients)
    check(got, inputs, spec.eps)


ON_GPU = pytest.param(functools.partial(site_to_site, impl="fused"), marks=pytest.mark.gpu, id="gpu")


@pytest.mark.parametrize("run", [pytest.param(interpreted, id="interpreted"), ON_GPU])
def test_a_row_does_not_depend_on_the_rows_beside_it(run):
    spec = BY_NAME["tiny_wide"]
    inputs = spec.make_inputs(4)
    whole = run(*inputs, **spec.options)
    part = run(*[x[16:32] if x.shape[0] == spec.rows else x for x in inputs], **spec.options)  # tiles of 16 rows
    for a, b in zip(part, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)[16:32])


def test_falls_back_with_a_reason():
    arguments = BY_NAME["tiny"].make_inputs(0)[:-1]
    streams, *rest = arguments
    told = explain(*arguments, arch="sm_90")
    assert told["chosen"] == "reference" and told["fused"].startswith("by name only")
    assert "float32" in explain(streams.astype(jnp.float32), *rest, arch="sm_90")["fused"]
    shape = lambda t, m, h: [jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in (
        (t, m, h), (t, h), (t, m), (t, m, m), (t, m), (m * (2 + m), m * h))]  # fmt: skip
    for size, why in (((8, 4, 64), "multiple of 16"), ((16, 3, 64), "2 or 4"), ((16, 4, 48), "multiple of 32")):
        assert why in explain(*shape(*size), arch="sm_90")["fused"]
    with pytest.raises(ValueError, match=r"expected fn \[8, 192\]"):
        hyper_leave(*arguments[:-1], arguments[-1][:4])
    got, ahead = hyper_leave(*arguments, impl="reference")
    assert ahead is None
    np.testing.assert_array_equal(got, reference.expand(*arguments[:4]))
    with pytest.raises(ValueError, match="expected pre"):
        enter_next(got, ahead, arguments[4][:, :1], arguments[5], jnp.ones(96), eps=1e-6)


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
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (kernel, *api.IMPLEMENTATIONS[1:]))
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


def test_the_model_computes_the_same_with_it(runs):
    """A FULL1 and a REUSE layer, to compile little. A bf16 value of the streams may round the other way where sums take
    another order; few do, so the median is tight."""
    weights = copy.copy(harness.params("all_kinds"))
    weights.layers = weights.layers[1::2]
    logits = {}
    for impl in ("reference", "fused"):
        net = with_it("all_kinds", impl, num_hidden_layers=2, compress_ratios=(1, 1), kv_source_layer_ids=(0,),
                      index_source_layer_ids=(0,), candidate_source_layer_id=0, num_nextn_predict_layers=0,
                      engram_layer_ids=(), engram_num_embeddings=(), dspark_target_layer_ids=())  # fmt: skip
        logits[impl] = np.asarray(jax.jit(functools.partial(run_model, net))(weights, *inputs_of(net)))
        assert len(runs) == (6 if impl == "fused" else 0)
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
    compiled = deviceless.compile_for(target, "pallas_kernels.hyper_leave.specs:deviceless_case", "verify")
    leave, finish = compiled.matching("hyper_leave"), compiled.matching("hyper_finish")
    assert len(leave.kernels) == len(finish.kernels) == 1 and leave.spill_bytes == finish.spill_bytes == 0
    assert "mma.sync" in leave.ptx or "tcgen05.mma" in leave.ptx
    assert "cp.async" in leave.ptx and leave.registers <= 128  # loads run ahead; two programs for a multiprocessor


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_numpy_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    check(site_to_site(*inputs, **spec.options, impl="fused"), inputs, spec.eps)
