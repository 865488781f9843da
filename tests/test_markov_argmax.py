"""Greedy choice of a draft column: the definition against numpy, the kernel against the definition, in the drafter, compiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import dspark
from dsv41_jax.cache import init_state
from dsv41_jax.model import Network
from dsv41_jax.options import DecodeOptions
from dsv41_jax.precision import RELEASED
from pallas_kernels.markov_argmax import api, explain, markov_argmax, one_read, reference
from pallas_kernels.markov_argmax.specs import SPECS, MarkovArgmaxSpec
from tests import deviceless
from tests import model_harness as harness

TINY, DRAFT, FEW = SPECS


def interpreted(inputs, spec):
    return np.asarray(one_read.markov_argmax(*inputs, **spec.options, interpret=True))


def defined(inputs, spec):
    return np.asarray(reference.markov_argmax(*inputs, **spec.options))


@pytest.mark.parametrize("spec", [TINY, FEW], ids=["tiny", "few"])
@pytest.mark.parametrize("run", [defined, interpreted], ids=["reference", "one_read"])
def test_equals_numpy(run, spec):
    """Exact sums, ties among them: the lowest index, the first NaN whatever is before it, 0 no larger than -0."""
    inputs = spec.make_inputs(1)
    base, embedded, weight = (np.asarray(x, np.float64) for x in inputs)
    logits = base[spec.first :] + embedded @ weight.T
    got = run(inputs, spec)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, np.argmax(logits, 1))  # numpy takes the first NaN too
    assert got[0] == spec.vocabulary // 3 and got[1] == 0
    assert ((logits[2::2] == logits[2::2].max(1, keepdims=True)).sum(1) == 3).all(), "ties at the top"


@pytest.mark.parametrize("vocabulary", [40, 4096, 9000])
def test_stretches_of_the_vocabulary_cover_it(monkeypatch, vocabulary):
    """Fewer tiles than programs, several tiles each, a last program whose tiles are beyond the end; the largest logit anywhere."""
    monkeypatch.setattr(one_read, "PROGRAMS", 8)
    spec = MarkovArgmaxSpec("", 16, vocabulary, 32, columns=1)
    base, embedded, weight = dataclasses.replace(spec, columns=2).make_inputs(0)
    places = np.linspace(0, vocabulary - 1, 16).astype(np.int32)
    base = jnp.zeros_like(base[:16]).at[np.arange(16), places].set(2000.0)
    run = functools.partial(one_read.markov_argmax.__wrapped__, first=0, interpret=True)
    np.testing.assert_array_equal(run(base, embedded, weight), places)
    nothing = jnp.full_like(base, -jnp.inf)
    np.testing.assert_array_equal(run(nothing, embedded, weight), np.zeros(16))


def test_keys_have_the_order_of_the_numbers():
    numbers = np.array([-np.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, 3e38, np.inf, np.nan, -np.nan], np.float32)
    keys = np.asarray(one_read.ordered(jnp.asarray(numbers)))
    assert keys[4] == keys[5] == 0 and keys[10] == keys[11] and keys[0] > one_read.LEAST
    assert (np.diff(keys.astype(np.int64))[[0, 1, 2, 3, 5, 6, 7, 8, 9]] > 0).all()


def test_a_row_and_a_column_stand_alone():
    base, embedded, weight = TINY.make_inputs(2)
    want = interpreted((base, embedded, weight), TINY)
    poison = base.at[: TINY.first].set(jnp.nan).at[TINY.first + 3].set(jnp.nan)
    got = interpreted((poison, embedded.at[5].set(jnp.nan), weight), TINY)
    others = np.delete(np.arange(16), [3, 5])
    np.testing.assert_array_equal(got[others], want[others])
    assert got[3] == got[5] == 0, "the first NaN"


def test_the_drafter_proposes_the_same_without_logits(monkeypatch):
    """All columns of a greedy proposal, tokens and confidences: logits kept, not kept, and by the kernel."""
    c, params = harness.config("all_kinds"), harness.params("all_kinds")
    rows = jnp.arange(16, dtype=jnp.int32)
    geometry = dataclasses.replace(harness.GEOMETRY, slots=16)
    kernel, rest = api.IMPLEMENTATIONS
    calls = []

    def run(*arguments, first):
        calls.append(first)
        return one_read.markov_argmax(*arguments, first=first, interpret=True)

    monkeypatch.setattr(api, "IMPLEMENTATIONS", (dataclasses.replace(kernel, run=run), rest))

    @functools.partial(jax.jit, static_argnames=("impl", "choose"))
    def propose(state, impl, choose=None):
        net = Network(c, geometry, RELEASED, DecodeOptions(implementations=(("markov_argmax", impl),)))
        return dspark.propose(params, state, 3 + rows, 7 + rows, rows, net, choose)[1]

    state = init_state(c, geometry, RELEASED)
    want = propose(state, "auto", lambda logits, column: jnp.argmax(logits, -1).astype(jnp.int32))
    plain, got = propose(state, "auto"), propose(state, "one_read")
    assert calls == [16 * i for i in range(c.dspark_block_size)]
    assert plain.logits is None and want.logits.shape == (16, c.dspark_block_size, c.vocab_size)
    assert len(np.unique(np.asarray(want.tokens))) > 4
    for other in (plain, got):
        np.testing.assert_array_equal(np.asarray(other.tokens), np.asarray(want.tokens))
        np.testing.assert_array_equal(np.asarray(other.confidence), np.asarray(want.confidence))


def test_chooses_and_refuses_with_a_reason():
    base, embedded, weight = TINY.make_inputs(0)
    call = functools.partial(markov_argmax, impl="one_read")
    assert all(explain(base, embedded, weight, arch=arch)["chosen"] == "one_read" for arch in one_read.ARCHES)
    assert explain(base, embedded, weight, arch="cpu")["chosen"] == "reference"
    with pytest.raises(ValueError, match="float32"):
        call(base, embedded.astype(jnp.float32), weight)
    with pytest.raises(ValueError, match="16 rows of rank 24"):
        call(base, embedded[:, :24], weight[:, :24])
    huge = jax.ShapeDtypeStruct((4160, 129280), jnp.float32)
    assert one_read.refuses(huge, embedded, weight, first=0) is None
    with pytest.raises(ValueError, match="first = 17"):
        markov_argmax(base, embedded, weight, first=17)
    with pytest.raises(ValueError, match=r"weight \[1000, 32\], got \(999, 32\)"):
        markov_argmax(base, embedded, weight[1:])
    with pytest.raises(ValueError, match="embedded bf16 or f32"):
        markov_argmax(base, embedded[0], weight)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_with_asynchronous_copies_ahead_of_the_products(target):
    compiled = deviceless.compile_for(target, "pallas_kernels.markov_argmax.specs:deviceless_case", "draft")
    assert sorted(k.name for k in compiled.kernels) == ["markov_choose", "markov_largest"] and compiled.spill_bytes == 0
    main = compiled.matching("markov_largest")
    assert main.registers <= 128 and "griddepcontrol.wait" in main.ptx
    assert main.ptx.count("cp.async.cg.shared.global") >= 3 * 8, "three tiles ahead, 16 bytes a copy"
    assert ("wgmma.mma_async" if target == "sm_90a" else "tcgen05.mma") in main.ptx
    assert not deviceless.unfenced_products(main.ptx)
    assert not any(f" {op}(" in compiled.hlo for op in ("copy", "fusion", "slice", "dynamic-slice")), "logits are read in place"


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    got = np.asarray(markov_argmax(*inputs, **spec.options, impl="one_read"))
    np.testing.assert_array_equal(got, np.asarray(jax.jit(functools.partial(reference.markov_argmax, **spec.options))(*inputs)))
    # normal numbers: sums of another order may exchange two that are all but equal
    base = jnp.asarray(np.random.default_rng(0).standard_normal(inputs[0].shape), jnp.float32)
    got = np.asarray(markov_argmax(base, *inputs[1:], **spec.options, impl="one_read"))
    logits = np.asarray(base[spec.first :]) + np.asarray(inputs[1], np.float32) @ np.asarray(inputs[2], np.float32).T
    chosen = np.take_along_axis(logits, got[:, None], 1)[:, 0]
    np.testing.assert_allclose(chosen, logits.max(1), rtol=0, atol=1e-4)  # exact products of integers, one rounding
