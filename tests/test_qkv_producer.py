"""Merged producer: the kernel's bits against the separate operators', rows alone, in the model, errors, compiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import attention
from dsv41_jax.cache import init_state
from dsv41_jax.options import DecodeOptions
from dsv41_jax.plan import plan_step
from dsv41_jax.precision import FLOAT32, RELEASED
from pallas_kernels.fp8_round_trip import fp8_round_trip
from pallas_kernels.qkv_producer import apart, api, explain, merges, one_launch, qkv_producer, reference
from pallas_kernels.qkv_producer.specs import SPECS
from pallas_kernels.row_ops import rms_norm
from pallas_kernels.window_store import one_pass as window_store
from tests import deviceless
from tests import model_harness as harness

TINY, EXACT, VERIFY, _ = SPECS
ARGUMENTS = ("pool", "front", "query_norm", "norm", "cos", "sin", "slots", "positions")


def interpreted(inputs, spec):
    return tuple(map(np.asarray, one_launch.qkv_producer(*inputs, **spec.options, interpret=True)))


def separate(inputs, spec):
    """(pool, q) of the operators that the launch merges, the kernel among them interpreted."""
    pool, front, query_norm, *rest = inputs
    pool = window_store.window_store(pool, front, *rest, first=spec.first, eps=spec.eps, interpret=True)
    q = jax.jit(functools.partial(rms_norm, eps=spec.eps))(front[:, : spec.first], query_norm)
    return np.asarray(pool), np.asarray(fp8_round_trip(q) if spec.round_trip else q)


def changed(inputs, **values):
    """The inputs with some of them replaced."""
    return [values.get(name, x) for name, x in zip(ARGUMENTS, inputs, strict=True)]


def assert_same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_array_equal(g.view(np.uint8), w.view(np.uint8))


@pytest.mark.parametrize("spec", [TINY, EXACT, dataclasses.replace(VERIFY, requests=2, ring=136)], ids=["tiny", "exact", "released"])
def test_kernel_has_the_bits_of_the_separate_operators(spec):
    inputs = spec.make_inputs(3)
    pool, q = got = interpreted(inputs, spec)
    assert_same_bits(got, separate(inputs, spec))
    assert (pool != np.asarray(inputs[0])).any() and q.any(1).sum() == spec.rows - 1  # the last row is zero


@pytest.mark.parametrize("run", [interpreted, lambda i, s: tuple(map(np.asarray, reference.qkv_producer(*i, **s.options)))],
                         ids=["one_launch", "reference"])  # fmt: skip
def test_queries_equal_numpy(run):
    """In float64, rounded to bf16: the norm of 64 channels and no FP8 after it."""
    inputs = EXACT.make_inputs(5)
    x, weight = np.asarray(inputs[1], np.float64)[:, : EXACT.first], np.asarray(inputs[2], np.float64)
    want = x / np.sqrt(np.mean(x * x, 1, keepdims=True) + EXACT.eps) * weight
    np.testing.assert_array_equal(run(inputs, EXACT)[1], np.asarray(want, jnp.bfloat16.dtype))


def test_channels_go_in_runs_of_powers_of_two():
    assert one_launch._runs(1280) == [(0, 1024), (1024, 256)] and one_launch._runs(96) == [(0, 64), (64, 32)]
    assert one_launch._runs(32) == [(0, 32)]


def test_queries_of_skipped_rows_and_no_poison_in_others():
    """A row without a slot has queries and writes nothing; a poisoned row spoils its own queries alone, and its record."""
    inputs = TINY.make_inputs(5)
    dead = np.asarray((inputs[6] < 0) | (inputs[6] >= TINY.slots))
    clean_pool, clean = interpreted(inputs, TINY)
    assert dead.sum() == 7 and clean[dead].any(1).all()
    poisoned = changed(inputs, front=jnp.where(jnp.asarray(dead)[:, None], jnp.nan, inputs[1]))
    pool, q = interpreted(poisoned, TINY)
    assert_same_bits((pool, q[~dead]), (clean_pool, clean[~dead]))
    assert np.isnan(q[dead].astype(np.float32)).all()


def test_a_row_stands_alone():
    inputs = TINY.make_inputs(7)
    _, q = interpreted(inputs, TINY)
    alone = [x if n in ("pool", "query_norm", "norm") else x[9:10] for n, x in zip(ARGUMENTS, inputs, strict=True)]
    np.testing.assert_array_equal(interpreted(alone, TINY)[1][0], q[9])


def test_layers_compute_the_same_with_the_merged_launch(monkeypatch):
    """A layer that owns keys and scores: output, window ring and selection, queries rounded no second time ahead of QB."""
    c, params = harness.config("all_kinds"), harness.params("all_kinds")
    chunk = harness.chunk_of(np.ones((3, 6)), [20, 30, 0], [6, 6, 4], [2, -1, 4], harness.page_tables([3, 2, 3], c, shuffle=1))
    layer = next(s for s in c.layers if s.publishes_candidates)
    u = jnp.asarray(np.random.default_rng(0).standard_normal((18, c.hidden_size)), jnp.bfloat16)

    def attend(u, impl, precision=RELEASED):
        state = init_state(c, harness.GEOMETRY, precision)
        pools = attention.Pools(list(state.window), dict(state.global_kv), dict(state.index), dict(state.pending))
        carry, plan = attention.Carry(), plan_step(c, harness.GEOMETRY, state, chunk)
        options = DecodeOptions(implementations=(("qkv_producer", impl),))
        out = attention.attention(u, params.layers[layer.index].attn, layer, pools, carry, plan, c, precision, options)
        return out, pools.window[layer.index], carry.selection.indices

    kernel, *rest = api.IMPLEMENTATIONS
    rounds = []

    def run(*arguments, **static):
        rounds.append(static["round_trip"])
        return one_launch.qkv_producer(*arguments, **static, interpret=True)

    monkeypatch.setattr(api, "IMPLEMENTATIONS", (dataclasses.replace(kernel, run=run), *rest))
    want = jax.jit(functools.partial(attend, impl="auto"))(u)
    assert not rounds and (np.asarray(want[2]) >= 0).any() and np.asarray(want[1]).any()
    got = jax.jit(functools.partial(attend, impl="one_launch"))(u)
    assert rounds == [True]
    assert_same_bits([np.asarray(x) for x in got], [np.asarray(x) for x in want])
    with pytest.raises(ValueError, match="float32"):
        jax.eval_shape(functools.partial(attend, impl="one_launch", precision=FLOAT32), u.astype(jnp.float32))


def test_chooses_and_refuses_with_a_reason():
    inputs = TINY.make_inputs(0)
    static = {"eps": 1e-6, "round_trip": True}
    assert "by name only" in explain(*inputs, **static, arch="sm_103")["one_launch"]
    assert explain(*inputs, **static, arch="sm_103")["chosen"] == "apart"
    assert explain(*inputs, **static, arch="cpu")["chosen"] == "reference"
    assert_same_bits(map(np.asarray, apart.qkv_producer(*inputs, **static)),
                     map(np.asarray, reference.qkv_producer(*inputs, **static)))  # fmt: skip
    assert merges(*inputs, **static, impl="one_launch") and not merges(*inputs, **static, arch="sm_90")
    call = lambda impl="one_launch", **values: qkv_producer(*changed(inputs, **values), **static, impl=impl)
    with pytest.raises(ValueError, match="float32"):
        call(front=inputs[1].astype(jnp.float32))
    with pytest.raises(ValueError, match="u8 records"):
        call(pool=jnp.zeros((5, 24, 64)))
    wide = jax.ShapeDtypeStruct((8192,), jnp.bfloat16)
    assert "4096" in one_launch.refuses(*changed(inputs, query_norm=wide), **static)
    with pytest.raises(ValueError, match=r"qkv_producer: expected query_norm \[Q\], Q a multiple of 32, got \(95,\)"):
        call("auto", query_norm=inputs[2][1:])
    with pytest.raises(ValueError, match=r"qkv_producer: expected slots i32\[15\]"):
        call("auto", slots=inputs[6][1:])


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_in_place_without_spills(target):
    compiled = deviceless.compile_for(target, "pallas_kernels.qkv_producer.specs:deviceless_case", "verify")
    assert [k.name for k in compiled.kernels] == ["qkv_producer"]
    assert compiled.spill_bytes == 0 and compiled.registers <= 64
    # spec/decode.md section 6, R1: nothing is read before the product is there, and nobody is let go before all is written
    reads, waits = compiled.ptx.index("ld.global"), compiled.ptx.index("griddepcontrol.wait")
    assert waits < reads and "griddepcontrol.launch_dependents" not in compiled.ptx
    assert "output_to_operand_aliasing" in compiled.hlo and not any(f" {op}(" in compiled.hlo for op in ("copy", "fusion", "slice"))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_the_separate_operators_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    pool, q = map(np.asarray, qkv_producer(*inputs, **spec.options, impl="one_launch"))
    # the same operations on the same row: the ring has the bytes of the kernel of its own
    alone = window_store.window_store(inputs[0], inputs[1], *inputs[3:], first=spec.first, eps=spec.eps)
    np.testing.assert_array_equal(pool, np.asarray(alone))
    want = np.asarray(jax.jit(functools.partial(reference.qkv_producer, **spec.options))(*inputs)[1])
    # a reciprocal root of another library: a bf16 rounding, and with it a code, may go the other way
    assert (q != want).mean() < 2e-3 and np.isfinite(q.astype(np.float32)).all()
