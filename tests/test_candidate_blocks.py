"""candidate_blocks: numpy against the definition, the emulated and the compiled kernel against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.candidate_blocks import candidate_blocks, explain, radix_candidates, reference
from pallas_kernels.candidate_blocks.specs import SPECS
from tests import bits, deviceless

ROWS = 4


def oracle(scores, visible, k_blocks, block_size=8):
    """u16[T, width] patterns -> (ids, count, flags), straight from the rules of decode.md section 3."""
    width = scores.shape[1]
    blocks = -(-width // block_size)
    ids, flags = np.full((len(scores), k_blocks), -1, np.int32), np.zeros((len(scores), blocks), np.uint8)
    for r, row in enumerate(scores):
        length = min(max(int(visible[r]), 0), width)
        rank = {}
        for b in range(blocks):
            seen = [int(p) for p in row[b * block_size : min((b + 1) * block_size, length)]]
            if not seen:
                rank[b] = (-1, 0)
            elif b == (length - 1) // block_size:
                rank[b] = (2, 0)
            elif any(bits.is_nan(p) for p in seen):
                rank[b] = (1, 0)
            else:
                rank[b] = (0, max(map(bits.key, seen)))
        kept = sorted(rank, key=lambda b: (-rank[b][0], -rank[b][1], b))[: min(k_blocks, blocks)]
        minus_inf = bits.key(0xFF80)
        kept = sorted(b for b in kept if rank[b][0] == 2 or (rank[b][0] == 0 and rank[b][1] != minus_inf))
        ids[r, : len(kept)], flags[r, kept] = kept, 1
    return ids, (ids >= 0).sum(1).astype(np.int32), flags


@st.composite
def cases(draw, widths, ks=(1, 3, 16, 200)):
    width, k = draw(st.sampled_from(widths)), draw(st.sampled_from(ks))
    length = st.one_of(st.sampled_from((*bits.LENGTHS, 7, 8, 9, width - 1, width)), st.integers(0, width))
    visible = draw(st.lists(length, min_size=ROWS, max_size=ROWS))
    return draw(bits.rows(width, ROWS)), np.asarray(visible, np.int32), k


@settings(max_examples=30, deadline=None)
@given(cases(widths=(1, 8, 61, 264)))
def test_definition_against_numpy(case):
    scores, visible, k = case
    got = candidate_blocks(bits.bf16(scores), jnp.asarray(visible), k_blocks=k, flags=True, impl="reference")
    for g, w in zip(got, oracle(scores, visible, k), strict=True):
        np.testing.assert_array_equal(np.asarray(g), w)


def test_rules():
    """The newest block is always there; NaN blocks take places unpublished; -inf blocks are dropped; low ties win."""
    low, nan, minus = 0x8001, 0x7FC0, 0xFF80
    row = np.full((4, 64), 0x3F80, np.uint16)  # eight blocks of 1.0
    row[0, 56:] = low  # newest, worst score
    row[1, 16:24] = nan
    row[2] = minus
    row[3, 33:64] = nan  # beyond the visible length: not seen
    visible = np.asarray([64, 64, 64, 33], np.int32)
    ids, count = candidate_blocks(bits.bf16(row), jnp.asarray(visible), k_blocks=3)
    want = [[0, 1, 7], [0, 7, -1], [7, -1, -1], [0, 1, 4]]
    np.testing.assert_array_equal(np.asarray(ids), want)
    np.testing.assert_array_equal(np.asarray(count), [3, 2, 1, 3])


@pytest.mark.parametrize("width", [16384, 16392])
def test_all_visible_blocks_up_to_the_switch(width):
    """Both sides of 2048 blocks: with at most that many every visible block is published, the mask is the identity."""
    rng = np.random.default_rng(width)
    scores = rng.integers(0, 0x7F80, (2, width)).astype(np.uint16)
    ids, count = candidate_blocks(bits.bf16(scores), jnp.asarray([width, 9000], jnp.int32))
    assert np.asarray(count).tolist() == [2048, 1125]
    assert (np.asarray(ids)[1, :1125] == np.arange(1125)).all()
    assert ((np.asarray(ids)[0] == np.arange(2048)).all()) == (width == 16384)


@settings(max_examples=30, deadline=None)
@given(cases(widths=(8, 264, 2312)))
def test_emulated_kernel(case):
    scores, visible, k = case
    args = bits.bf16(scores), jnp.asarray(visible)
    got = radix_candidates.emulated(*args, k_blocks=k, flags=True, threads=128)
    for g, w in zip(got, reference.candidate_blocks(*args, k_blocks=k, flags=True), strict=True):
        np.testing.assert_array_equal(g, np.asarray(w))


def test_emulated_kernel_at_release_width():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(3, 33792)).astype(np.float32)
    scores[1] = 1 + rng.integers(0, 3, 33792) / 128
    args = jnp.asarray(scores, jnp.bfloat16), jnp.asarray([33792, 33001, 20000], jnp.int32)
    got = radix_candidates.emulated(*args, flags=True)
    for g, w in zip(got, reference.candidate_blocks(*args, k_blocks=2048, flags=True), strict=True):
        np.testing.assert_array_equal(g, np.asarray(w))


def test_choice_and_errors():
    x, visible = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    assert explain(x, visible, arch="sm_103") == {"chosen": "radix_candidates"}
    assert explain(x, visible, block_size=4, arch="sm_90")["chosen"] == "reference"
    assert "does not fit" in explain(jnp.zeros((1, 131072), jnp.bfloat16), visible[:1], arch="sm_90")["radix_candidates"]
    with pytest.raises(ValueError, match=r"visible i32\[2\]"):
        candidate_blocks(x, visible.astype(jnp.int16))
    with pytest.raises(ValueError, match="k_blocks"):
        candidate_blocks(x, visible, k_blocks=0)
    with pytest.raises(ValueError, match="bf16 or f32"):
        candidate_blocks(x[0], visible)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles(target, record_property):
    factory, name = "pallas_kernels.candidate_blocks.specs:deviceless_case", "verify_full1_flags"
    result = deviceless.compile_for(target, factory, name)
    own = result.matching("candidate_blocks")
    record_property(name, str(own.kernels))
    assert len(result.kernels) == 1, "the publication is one kernel"
    assert "griddepcontrol.wait" in own.ptx and "red.shared.add" in own.ptx
    assert own.spill_bytes == 0, own.kernels


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
class TestCompiled:
    pytestmark = pytest.mark.gpu

    def test_specs(self, spec):
        args, kwargs = spec.make_inputs(seed=12)
        static = {"k_blocks": spec.k_blocks, "flags": spec.flags}
        got = jax.jit(functools.partial(candidate_blocks, impl="radix_candidates", **static))(*args, **kwargs)
        want = jax.jit(functools.partial(reference.candidate_blocks, **static))(*args, **kwargs)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("width", [8, 520, 4104, 16384])
class TestCompiledBits:
    pytestmark = pytest.mark.gpu

    def test_bit_patterns(self, width):
        rng = np.random.default_rng(width)
        pools = [np.asarray(bits.SPECIAL), np.asarray(bits.FINITE), np.arange(65536), np.asarray([0x3F80])]
        scores = np.stack([rng.choice(pools[r % 4], width) for r in range(64)]).astype(np.uint16)
        visible = rng.integers(-2, width + 3, 64).astype(np.int32)
        call = functools.partial(candidate_blocks, k_blocks=200, flags=True, impl="radix_candidates")
        got = jax.jit(call)(bits.bf16(scores), jnp.asarray(visible))
        for g, w in zip(got, oracle(scores, visible, 200), strict=True):
            np.testing.assert_array_equal(np.asarray(g), w)
