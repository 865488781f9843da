"""The one-pass quantisers of the Hopper experts against their definitions, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import requantise
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


def gathered_case(interpret):
    x = rows(24, 512, 1)
    token = jnp.asarray(np.random.default_rng(2).integers(0, 24, 40), jnp.int32).at[:4].set(jnp.arange(4))
    same(requantise.gathered_rows(x, token, interpret=interpret), requantise.quantize_rows(x[token]))


def sorted_case(interpret):
    t = rows(24, 384, 3).reshape(24, 3, 128).swapaxes(0, 1)
    same(requantise.sorted_rows(t, interpret=interpret), requantise.quantize_sorted(t))


@pytest.mark.parametrize("case", [gathered_case, sorted_case])
def test_equals_its_definition(case):
    case(True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [gathered_case, sorted_case])
def test_equals_its_definition_on_the_gpu(case):
    case(False)


def deviceless_case(name: str):
    """Both quantisers at the rows of a verify step."""
    shape = jax.ShapeDtypeStruct
    if name == "gathered":
        return requantise.gathered_rows, (shape((384, 5120), jnp.bfloat16), shape((2624,), jnp.int32))
    return requantise.sorted_rows, (shape((18, 2624, 128), jnp.bfloat16),)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("case", ["gathered", "sorted"])
def test_compiles_for_hopper_without_spills(case):
    compiled = deviceless.compile_for("sm_90a", "tests.test_experts_requantise:deviceless_case", case)
    kernel = compiled.matching("quantise")
    assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0
