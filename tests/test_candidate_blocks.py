"""candidate_blocks: numpy against the definition, the emulated and the compiled kernel against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import simt
from pallas_kernels.candidate_blocks import candidate_blocks, explain, radix_candidates, radix_wide, reference
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


def check_emulated(emulated, scores, visible, k_blocks=2048, **options):
    """Same bits as the definition, flags and the -1 behind the ids included."""
    args = jnp.asarray(scores, jnp.bfloat16), jnp.asarray(visible, jnp.int32)
    got = emulated(*args, k_blocks=k_blocks, flags=True, **options)
    for g, w in zip(got, reference.candidate_blocks(*args, k_blocks=k_blocks, flags=True), strict=True):
        np.testing.assert_array_equal(g, np.asarray(w))


@settings(max_examples=30, deadline=None)
@given(cases(widths=(8, 264, 2312)))
def test_emulated_kernel(case):
    scores, visible, k = case
    check_emulated(radix_candidates.emulated, bits.bf16(scores), visible, k, threads=128)


@settings(max_examples=20, deadline=None)
@given(cases(widths=(264, 16456)))
def test_emulated_kernel_of_wide_rows(case):
    """One step and three, of which the first stays in shared memory."""
    scores, visible, k = case
    check_emulated(radix_wide.emulated, bits.bf16(scores), visible, k, threads=128, kept=1)


def test_emulated_kernel_at_release_width():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(3, 33792)).astype(np.float32)
    scores[1] = 1 + rng.integers(0, 3, 33792) / 128
    visible = [33792, 33001, 20000]
    for emulated in (radix_candidates.emulated, radix_wide.emulated):
        check_emulated(emulated, scores, visible)


def test_emulated_kernel_of_wide_rows_with_more_ties_than_16_bits_count():
    """Every block of the first row equals the cut; 66304 come before the last warp's, a little more than 1 << 16."""
    width = 8 * 2048 * 37
    scores = np.ones((2, width), np.float32)
    scores[1] = np.random.default_rng(4).normal(size=width)
    check_emulated(radix_wide.emulated, scores, [width - 3, width])


def test_wide_rows_read_what_is_visible(monkeypatch):
    """Scores read and ranks kept grow with the visible length, not with the width; only the last load crosses the end."""
    read = []

    def counted(machine, array, index, count, where=None, other=0, offset=0):
        if count == 4 and where is not None:
            read.append(int(np.broadcast_to((where.x) & machine._mask, (machine.rows, machine.threads)).sum()))
        return plain(machine, array, index, count, where, other, offset)

    plain = simt.Emulator.load_many
    monkeypatch.setattr(simt.Emulator, "load_many", counted)
    scores = jnp.zeros((2, 262144), jnp.bfloat16)
    for visible in (0, 20003, 40000):
        read.clear()
        radix_wide.emulated(scores, jnp.asarray([visible, visible], jnp.int32), kept=1)
        assert sum(read) == 2 * -(-visible // 8)
        assert len(read) == 8 * -(-visible // 16384), "a step of eight loads covers 16384 columns"


def test_choice_and_errors():
    x, visible = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    assert explain(x, visible, arch="sm_103") == {"chosen": "radix_candidates"}
    assert explain(x, visible, block_size=4, arch="sm_90")["chosen"] == "reference"
    for arch in radix_wide.ARCHES:
        wide = explain(jax.ShapeDtypeStruct((2, 1 << 20), jnp.bfloat16), visible, arch=arch)
        assert wide["chosen"] == "radix_wide" and "does not fit" in wide["radix_candidates"]
    for shape, k, reason in [((2, (1 << 21) + 8), 9, "16 bits"), ((1 << 13, 1 << 20), 9, "32 bits"), ((2, 1 << 20), 4097, "4096")]:
        lengths = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
        wide = explain(jax.ShapeDtypeStruct(shape, jnp.bfloat16), lengths, k_blocks=k, arch="sm_90")
        assert wide["chosen"] == "reference" and reason in wide["radix_wide"]
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
    factory = "pallas_kernels.candidate_blocks.specs:deviceless_case"
    names = ("verify_full1_flags/radix_candidates", "verify_1m/radix_wide")
    for name, result in deviceless.compile_all(target, factory, names).items():
        own = result.matching("candidate_blocks")
        record_property(name, str(own.kernels))
        assert len(result.kernels) == 1, "the publication is one kernel"
        assert "griddepcontrol.wait" in own.ptx and "red.shared.add" in own.ptx
        assert own.spill_bytes == 0, own.kernels
        assert own.registers <= 65536 // (3 * 256), "three rows share a multiprocessor"


def compare_compiled(impl, args, **static):
    got = jax.jit(functools.partial(candidate_blocks, impl=impl, **static))(*args)
    want = jax.jit(functools.partial(reference.candidate_blocks, **static))(*args)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
class TestCompiled:
    pytestmark = pytest.mark.gpu

    def test_specs(self, spec):
        args, _ = spec.make_inputs(seed=12)
        static = {"k_blocks": spec.k_blocks, "flags": spec.flags}
        for impl in ("radix_candidates", "radix_wide"):
            if impl == "radix_wide" or radix_candidates.refuses(*args, **static) is None:
                compare_compiled(impl, args, **static)


class TestCompiledWide:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("visible", [32768, 1 << 20])
    def test_a_million_columns(self, visible):
        """Rows that end together, and rows that do not, in one block of threads; one row of nothing but ties."""
        rng = np.random.default_rng(visible)
        scores = rng.standard_normal((9, 1 << 20), np.float32)
        scores[1] = 1
        lengths = np.asarray([visible] * 4 + [visible - 3, visible // 2, 12, 0, -5], np.int32)
        args = jnp.asarray(scores, jnp.bfloat16), jnp.asarray(lengths)
        compare_compiled("radix_wide", args, k_blocks=2048, flags=True)


@pytest.mark.parametrize("width", [8, 520, 4104, 16384])
class TestCompiledBits:
    pytestmark = pytest.mark.gpu

    def test_bit_patterns(self, width):
        rng = np.random.default_rng(width)
        pools = [np.asarray(bits.SPECIAL), np.asarray(bits.FINITE), np.arange(65536), np.asarray([0x3F80])]
        scores = np.stack([rng.choice(pools[r % 4], width) for r in range(64)]).astype(np.uint16)
        visible = rng.integers(-2, width + 3, 64).astype(np.int32)
        for impl in ("radix_candidates", "radix_wide"):
            call = functools.partial(candidate_blocks, k_blocks=200, flags=True, impl=impl)
            got = jax.jit(call)(bits.bf16(scores), jnp.asarray(visible))
            for g, w in zip(got, oracle(scores, visible, 200), strict=True):
                np.testing.assert_array_equal(np.asarray(g), w)
