"""select_tokens: numpy against the definition, the emulated and the compiled kernels against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.select_tokens import SlotMap, explain, radix_select, radix_wide, reference, select_tokens
from pallas_kernels.select_tokens.specs import BY_NAME, SPECS
from tests import bits, deviceless

ROWS = 4
VERSIONS = {"radix_select": radix_select, "radix_wide": radix_wide}


def oracle(scores, end, k, block_ids=None, causal=None):
    """u16[T, width] patterns, one row at a time, straight from the rules of decode.md."""
    out = np.full((len(scores), k), -1, np.int32)
    for r, row in enumerate(scores):
        scan = min(max(int(end[r]), 0), len(row))
        if scan <= k:
            picked = list(range(scan))
        elif any(bits.is_nan(int(p)) for p in row[:scan]):
            picked = []
        else:
            order = sorted(range(scan), key=lambda c: (-bits.key(int(row[c])), c))[:k]
            picked = sorted(c for c in order if int(row[c]) & 0x7FFF != 0x7F80)
        if block_ids is not None:
            at = [int(block_ids[r, c // 8]) * 8 + c % 8 if block_ids[r, c // 8] >= 0 else -1 for c in picked]
            picked = [p for p in at if 0 <= p < causal[r]]
        out[r, : len(picked)] = picked
    return out


def oracle_slots(index, table, request, entries):
    out = np.full(index.shape, -1, np.int32)
    for (r, j), i in np.ndenumerate(index):
        q, page = request[r], i // entries
        if i >= 0 and 0 <= q < table.shape[0] and page < table.shape[1] and table[q, page] > 0:
            out[r, j] = table[q, page] * entries + i % entries
    return out


@st.composite
def cases(draw, widths=(8, 64, 264), ks=(1, 7, 32)):
    """(patterns u16[ROWS, width], end, k, sparse kwargs as numpy or {}), with lengths around every edge."""
    width, k = draw(st.sampled_from(widths)), draw(st.sampled_from(ks))
    scores = draw(bits.rows(width, ROWS))
    length = st.one_of(st.sampled_from((*bits.LENGTHS, k - 1, k, k + 1, width - 1, width, width + 1)),
                       st.integers(0, width))  # fmt: skip
    end = np.asarray(draw(st.lists(length, min_size=ROWS, max_size=ROWS)), np.int32)
    if not draw(st.booleans()):
        return scores, end, k, {}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = width // 8
    ids = np.stack([np.sort(rng.permutation(2 * blocks)[:blocks]) for _ in range(ROWS)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return scores, end, k, {"block_ids": ids, "causal": rng.integers(-1, 2 * width, ROWS).astype(np.int32)}


def slot_map(rng, width):
    table = rng.integers(-2, 9, (3, max(width // 32, 1))).astype(np.int32)
    return SlotMap(jnp.asarray(table), jnp.asarray([0, 2, 3, -1], jnp.int32), 16)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_definition_against_numpy(case):
    scores, end, k, sparse = case
    kwargs = {n: jnp.asarray(x) for n, x in sparse.items()}
    got = np.asarray(select_tokens(bits.bf16(scores), jnp.asarray(end), k=k, impl="reference", **kwargs))
    np.testing.assert_array_equal(got, oracle(scores, end, k, **sparse))


@settings(max_examples=20, deadline=None)
@given(cases())
def test_float32_scores_select_alike(case):
    """bf16 scores widened to f32 keep their order, so the selection is the same (subnormals included)."""
    scores, end, k, sparse = case
    kwargs = {n: jnp.asarray(x) for n, x in sparse.items()}
    wide = jax.lax.bitcast_convert_type(jnp.asarray(scores.astype(np.uint32) << 16), jnp.float32)
    got = select_tokens(wide, jnp.asarray(end), k=k, impl="reference", **kwargs)
    np.testing.assert_array_equal(np.asarray(got), oracle(scores, end, k, **sparse))


def test_slots_against_numpy():
    rng = np.random.default_rng(5)
    scores = rng.integers(0, 0x7F80, (ROWS, 264)).astype(np.uint16)
    where = slot_map(rng, 264)
    index, slots = select_tokens(bits.bf16(scores), jnp.asarray([264, 10, 264, 264], jnp.int32), k=32, slot_map=where)
    want = oracle_slots(np.asarray(index), np.asarray(where.table), np.asarray(where.request), 16)
    np.testing.assert_array_equal(np.asarray(slots), want)
    assert (want[:2] >= 0).any() and (want[2:] == -1).all()


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=40, deadline=None)
@given(case=cases(widths=(8, 264, 2312), ks=(1, 32, 300)), seed=st.integers(0, 2**32 - 1))
def test_emulated_kernel(version, case, seed):
    scores, end, k, sparse = case
    kwargs = {n: jnp.asarray(x) for n, x in sparse.items()}
    kwargs["slot_map"] = slot_map(np.random.default_rng(seed), scores.shape[1])
    args = bits.bf16(scores), jnp.asarray(end)
    got = VERSIONS[version].emulated(*args, k=k, threads=128, **kwargs)
    for g, w in zip(got, reference.select_tokens(*args, k=k, **kwargs), strict=True):
        np.testing.assert_array_equal(g, np.asarray(w))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("width", [512, 1024, 16384, 32768])
def test_emulated_kernel_at_release_widths(version, width):
    """The edges of decode.md section 7 item 6: ends around k and the width, all equal, infinities, NaN in and out."""
    if version == "radix_select" and width > 16384:
        pytest.skip("wider than the registers hold")
    ends = [0, 1, 511, 512, 513, width, width + 7, width - 1, width - 1, width]
    rng = np.random.default_rng(width)
    scores = rng.normal(size=(len(ends), width)).astype(np.float32)
    scores[5], scores[6, ::3], scores[6, 1::3] = 1.5, np.inf, -np.inf
    scores[7, -1], scores[9, width // 2] = np.nan, np.nan  # row 7's lies beyond its end
    x, end = jnp.asarray(scores, jnp.bfloat16), jnp.asarray(ends, jnp.int32)
    want = np.asarray(reference.select_tokens(x, end, k=512))
    np.testing.assert_array_equal(VERSIONS[version].emulated(x, end, k=512), want)
    if width > 512:
        assert (want[9] == -1).all() and (want[7] >= 0).all() and (want[5] == np.arange(512)).all()


def rows_of_ties(width: int):
    """(scores, end, what 64 selected are): more ties at the cut than 16 bits count, better scores before and behind them."""
    scores = np.ones((2, width), np.float32)
    scores[:, [5, width - 7]] = 2
    want = np.r_[np.arange(63), width - 7]
    return (jnp.asarray(scores, jnp.bfloat16), jnp.asarray([width, width - 7], jnp.int32)), [want, np.arange(64)]


def test_emulated_kernel_of_wide_rows_with_more_ties_than_16_bits_count():
    """Of all warps' columns together, and of one warp's alone."""
    for width, threads in ((131072, 256), (1 << 19, 128)):
        args, want = rows_of_ties(width)
        np.testing.assert_array_equal(radix_wide.emulated(*args, k=64, threads=threads), want)


def test_filler_is_never_read():
    """Poison beyond `end` changes nothing, whatever it is."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 0x7F80, (ROWS, 512)).astype(np.uint16)
    end = np.asarray([40, 300, 511, 33], np.int32)
    clean = radix_select.emulated(bits.bf16(scores), jnp.asarray(end), k=32, threads=128)
    for poison in (0x7FC0, 0x7F80, 0xFF80, 0x7F7F):
        dirty = np.where(np.arange(512) < end[:, None], scores, poison)
        for version in VERSIONS.values():
            got = version.emulated(bits.bf16(dirty), jnp.asarray(end), k=32, threads=128)
            np.testing.assert_array_equal(got, clean)


def test_choice_and_reasons():
    x, end = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    assert explain(x, end, k=4, arch="sm_90") == {"chosen": "radix_select"}
    assert "not a multiple of 8" in explain(x[:, :60], end, k=4, arch="sm_100")["radix_select"]
    wide = jnp.zeros((2, 20480), jnp.bfloat16)
    assert explain(wide, end, k=4, arch="sm_103")["chosen"] == "radix_wide"
    assert explain(x.astype(jnp.float32), end, k=4, arch="sm_90")["chosen"] == "reference"
    assert explain(x, end, k=4, arch="cpu")["chosen"] == "reference"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.zeros((2, 64), jnp.float16)}, "bf16 or f32"),
        ({"end": jnp.zeros(3, jnp.int32)}, r"end i32\[2\]"),
        ({"k": 0}, "k >= 1"),
        ({"causal": jnp.zeros(2, jnp.int32)}, "together"),
        ({"block_ids": jnp.zeros((2, 7), jnp.int32), "causal": jnp.zeros(2, jnp.int32)}, "all 64 columns"),
    ],
)
def test_errors(change, message):
    arguments = {"logits": jnp.zeros((2, 64), jnp.bfloat16), "end": jnp.zeros(2, jnp.int32), "k": 4, **change}
    with pytest.raises(ValueError, match=message):
        select_tokens(**arguments)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles(target, record_property):
    names = ("verify_full2/radix_select", "verify_reindex_slots/radix_select", "verify_full1/radix_wide")
    compiled = deviceless.compile_all(target, "pallas_kernels.select_tokens.specs:deviceless_case", names)
    for name, result in compiled.items():
        own = result.matching("select_tokens")
        record_property(name, str(own.kernels))
        assert len(result.kernels) == 1, "the selection is one kernel"
        assert "griddepcontrol.wait" in own.ptx and "red.shared.add" in own.ptx
        assert own.spill_bytes <= BY_NAME[name.split("/")[0]].spill_bytes, own.kernels


def run_on_gpu(version, args, k, kwargs):
    call = jax.jit(functools.partial(select_tokens, k=k, impl=version))
    return jax.tree.leaves(call(*args, **kwargs))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
class TestCompiled:
    pytestmark = pytest.mark.gpu

    def test_specs(self, spec, version):
        args, kwargs = spec.make_inputs(seed=11)
        if VERSIONS[version].refuses(*args, k=spec.k, **kwargs):
            pytest.skip("not for this version")
        want = jax.tree.leaves(jax.jit(functools.partial(reference.select_tokens, k=spec.k))(*args, **kwargs))
        for g, w in zip(run_on_gpu(version, args, spec.k, kwargs), want, strict=True):
            np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("version", VERSIONS)
class TestCompiledBits:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("width", [520, 4104, 16384])
    def test_bit_patterns(self, version, width):
        rng = np.random.default_rng(width)
        pools = [np.asarray(bits.SPECIAL[:10]), np.asarray(bits.FINITE), np.arange(65536), np.asarray([0x3F80])]
        scores = np.stack([rng.choice(pools[r % 4], width) for r in range(64)]).astype(np.uint16)
        ends = np.asarray([-1, 0, 1, 511, 512, 513, width, 2**31 - 1])[rng.integers(0, 8, 64)].astype(np.int32)
        ids = np.stack([np.sort(rng.permutation(width // 4)[: width // 8]) for _ in range(64)]).astype(np.int32)
        sparse = {"block_ids": ids, "causal": rng.integers(0, 2 * width, 64).astype(np.int32)}
        for extra in ({}, sparse):
            kwargs = {n: jnp.asarray(x) for n, x in extra.items()}
            (got,) = run_on_gpu(version, (bits.bf16(scores), jnp.asarray(ends)), 512, kwargs)
            np.testing.assert_array_equal(np.asarray(got), oracle(scores, ends, 512, **extra))


@pytest.mark.gpu
def test_compiled_kernel_of_wide_rows_with_more_ties_than_16_bits_count():
    args, want = rows_of_ties(1 << 20)
    np.testing.assert_array_equal(np.asarray(run_on_gpu("radix_wide", args, 64, {})[0]), want)
