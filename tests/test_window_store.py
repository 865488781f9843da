"""Window store: the definition against numpy, the kernel's bytes against the definition's, what is never touched."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.window_store import explain, one_pass, reference, window_store
from pallas_kernels.window_store.specs import SPECS
from tests import deviceless

TINY = SPECS[0]
ARGUMENTS = ("pool", "front", "norm", "cos", "sin", "slots", "positions")


def numpy_store(pool, front, norm, cos, sin, slots, positions, *, first, eps):
    """In float64 with the rounding points of spec/model.md: bf16 after the norm, bf16 after the rotation, e4m3."""
    out = np.array(pool)
    bf16 = lambda x: np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)
    for t, (slot, position) in enumerate(zip(np.asarray(slots), np.asarray(positions), strict=True)):
        if not 0 <= slot < out.shape[0]:
            continue
        x = np.asarray(front[t, first:], np.float64)
        x = bf16(x / np.sqrt(np.mean(x * x) + eps) * np.asarray(norm, np.float64))
        turn = np.asarray(cos[t], np.float64) + 1j * np.asarray(sin[t], np.float64)
        pairs = x[-2 * turn.size :].copy().view(np.complex128) * turn
        x[-2 * turn.size :] = bf16(pairs.view(np.float64))
        groups = x.reshape(-1, 32)
        exponent = np.ceil(np.log2(np.maximum(np.abs(groups).max(1), 1e-4) / 448))
        payload = (groups / 2.0 ** exponent[:, None]).astype(ml_dtypes.float8_e4m3fn)
        out[slot, position % out.shape[1]] = np.concatenate(
            [payload.view(np.uint8).reshape(-1), exponent.astype(np.uint8) + 127]
        )
    return out


@functools.cache
def compiled(first: int, eps: float):
    """The definition of one set of static arguments, so that cases of the same shapes share a program."""
    return jax.jit(functools.partial(reference.window_store, first=first, eps=eps))


def interpreted(inputs, spec):
    return np.asarray(one_pass.window_store(*inputs, **spec.options, interpret=True))


def defined(inputs, spec):
    return np.asarray(compiled(spec.first, spec.eps)(*inputs))


def changed(spec, inputs, **values):
    """The inputs with some of them replaced."""
    return [values.get(name, x) for name, x in zip(ARGUMENTS, inputs, strict=True)]


@pytest.mark.parametrize("run", [defined, interpreted], ids=["reference", "one_pass"])
def test_equals_numpy(run):
    inputs = TINY.make_inputs(3)
    got, want = run(inputs, TINY), numpy_store(*inputs, **TINY.options)
    # a sum in fp32 may move a value over a bf16 midpoint, and that over an e4m3 one
    assert (got != want).sum() <= 2
    assert (want != np.asarray(inputs[0])).any(-1).sum() == 3 * 5 - 5 - 2


@pytest.mark.parametrize("requests,span", [(1, 1), (1, 5), (3, 6)])
def test_kernel_has_the_bytes_of_the_definition(requests, span):
    spec = dataclasses.replace(TINY, requests=requests, span=span, skips=False)
    for seed in range(2):
        inputs = spec.make_inputs(seed)
        got, want = interpreted(inputs, spec), defined(inputs, spec)
        np.testing.assert_array_equal(got, want)
        assert ((got != np.asarray(inputs[0])).any(-1)).sum() == requests * span


def test_kernel_has_the_bytes_of_the_definition_at_the_width_of_the_release():
    spec = dataclasses.replace(SPECS[2], requests=2, span=6, ring=136)
    inputs = spec.make_inputs(11)
    np.testing.assert_array_equal(interpreted(inputs, spec), defined(inputs, spec))


def test_every_code_and_tie():
    """All bf16 numbers from 2**-11 to 448 beside a 448. The norm leaves them as they are: beside its eps the mean is
    nothing, and its factor is undone by the weights."""
    values = np.arange(0x3A00, 0x43E1, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.concatenate([np.resize(values, (len(values) // 31 + 1, 31)), np.full((len(values) // 31 + 1, 1), 448)], 1)
    rows = np.where(np.arange(64) % 3, 1, -1) * np.concatenate([x, x[::-1]], 1)
    spec = dataclasses.replace(TINY, requests=len(rows), span=1, first=0, skips=False, ring=1, eps=2.0**60)
    pool, _, _, cos, sin, slots, positions = spec.make_inputs(0)
    weight = jnp.full(64, 2.0**30, jnp.bfloat16)
    inputs = (pool, jnp.asarray(rows, jnp.bfloat16), weight, jnp.ones_like(cos), jnp.zeros_like(sin), slots, positions)
    got = interpreted(inputs, spec)
    np.testing.assert_array_equal(got, defined(inputs, spec))
    codes = rows.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(got[np.asarray(slots), 0], np.concatenate([codes, np.full((len(rows), 2), 127)], 1))


def test_nothing_else_is_touched_and_poison_stays_in_its_row():
    pool, front, norm, cos, sin, slots, positions = TINY.make_inputs(5)
    pool = jnp.full_like(pool, 0xFF)  # NaN scales and payloads
    dead = np.asarray((slots < 0) | (slots >= TINY.slots))
    assert dead.sum() == 7
    poisoned = jnp.where(jnp.asarray(dead)[:, None], jnp.nan, front)
    wild = jnp.where(jnp.asarray(dead), -(2**31), positions)
    clean = interpreted((pool, front, norm, cos, sin, slots, positions), TINY)
    got = interpreted((pool, poisoned, norm, cos, sin, slots, wild), TINY)
    np.testing.assert_array_equal(got, clean)
    live = {(int(s), int(p) % TINY.ring) for s, p, d in zip(slots, positions, dead, strict=True) if not d}
    untouched = np.array([[(s, r) not in live for r in range(TINY.ring)] for s in range(TINY.slots)])
    assert (got[untouched] == 0xFF).all() and not (got[~untouched] == 0xFF).all(-1).any()


def test_zero_rows_and_large_rows():
    inputs = TINY.make_inputs(7)
    for factor in (0.0, 2.0**60, 2.0**-60):
        scaled = changed(TINY, inputs, front=inputs[1] * jnp.bfloat16(factor))
        np.testing.assert_array_equal(interpreted(scaled, TINY), defined(scaled, TINY))


def test_auto_takes_the_kernel_where_there_is_a_gpu():
    inputs = TINY.make_inputs(0)
    for arch in one_pass.ARCHES:
        assert explain(*inputs, **TINY.options, arch=arch)["chosen"] == "one_pass"
    told = explain(*inputs, **TINY.options, arch="cpu")
    assert told["chosen"] == "reference" and "is for sm_90" in told["one_pass"]


def test_refusals_name_the_reason():
    inputs = TINY.make_inputs(0)
    call = lambda **values: window_store(*changed(TINY, inputs, **values), **TINY.options, impl="one_pass")
    with pytest.raises(ValueError, match="float32"):
        call(front=inputs[1].astype(jnp.float32))
    with pytest.raises(ValueError, match="u8 records"):
        call(pool=jnp.zeros((5, 24, 64)))
    with pytest.raises(ValueError, match="powers of two"):
        window_store(
            jnp.zeros((5, 24, 99), jnp.uint8), inputs[1], jnp.ones(96), *inputs[3:], first=0, eps=1e-6, impl="one_pass"
        )
    huge = jax.ShapeDtypeStruct((2**12, 2**13, 66), jnp.uint8)
    assert "2147483648" in one_pass.refuses(huge, *inputs[1:], **TINY.options)
    huge = jax.ShapeDtypeStruct((2**13, 2**13, 66), jnp.uint8)
    assert one_pass.refuses(huge, *inputs[1:], **TINY.options) is None


def test_errors_name_the_shapes():
    inputs = TINY.make_inputs(0)
    call = lambda **values: window_store(*changed(TINY, inputs, **values), **TINY.options)
    with pytest.raises(ValueError, match=r"pool \[slots, ring, 66\]"):
        call(pool=inputs[0][..., :-1])
    with pytest.raises(ValueError, match=r"slots i32\[15\]"):
        call(slots=inputs[5][:-1])
    with pytest.raises(ValueError, match="cos and sin"):
        call(cos=inputs[3][:, :-1])
    with pytest.raises(ValueError, match=r"norm \[64\]"):
        call(norm=inputs[2][1:])


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_in_place_without_spills(target):
    compiled = deviceless.compile_for(target, "pallas_kernels.window_store.specs:deviceless_case", "verify")
    kernel = compiled.matching("window_store")
    assert len(kernel.kernels) == len(compiled.kernels) == 1 and kernel.spill_bytes == 0 and kernel.registers <= 64
    assert "griddepcontrol.wait" in kernel.ptx and "ld.global.v2.b32" in kernel.ptx
    assert "output_to_operand_aliasing" in compiled.hlo and " copy(" not in compiled.hlo


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    got = np.asarray(window_store(*inputs, **spec.options, impl="one_pass"))
    want = defined(inputs, spec)
    # the sums of the norm have another order there: a bf16 rounding, and with it a code, may go the other way
    dim = spec.dim
    assert (got[..., dim:] != want[..., dim:]).mean() < 1e-4
    assert (got[..., :dim] != want[..., :dim]).sum() < 2e-3 * spec.rows * dim + 2
