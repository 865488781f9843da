"""sparse_plan: numpy against the definition, its three sources against each other, the kernel against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sparse_plan import SparsePlan, bitmap_plan, explain, reference, sparse_plan
from pallas_kernels.sparse_plan.specs import SPECS
from tests import deviceless

ROWS = 5


def oracle(ids, visible, valid, key_count, k, block_size):
    """Rows of ids in any order -> (row_ks, row_ke, sparse_indices, end), from "Plan contents" of decode.md."""
    rows = len(ids)
    ke, out, end = np.clip(visible, 0, key_count).astype(np.int32), np.zeros((rows, k), np.int32), np.zeros(rows, np.int32)
    for r in range(rows):
        kept = sorted({int(i) for i in ids[r] if 0 <= i < -(-int(ke[r]) // block_size)})[:k] if valid[r] else []
        if kept:
            out[r] = kept + [kept[-1]] * (k - len(kept))
            end[r] = (len(kept) - 1) * block_size + min(max(ke[r] - kept[-1] * block_size, 0), block_size)
    return np.zeros(rows, np.int32), ke, out, end


def assert_plan(plan: SparsePlan, want):
    for field, w in zip(("row_ks", "row_ke", "sparse_indices", "end"), want, strict=True):
        np.testing.assert_array_equal(np.asarray(getattr(plan, field)), w, err_msg=field)


@st.composite
def cases(draw, key_counts=(1, 61, 250, 2000)):
    key_count, k = draw(st.sampled_from(key_counts)), draw(st.sampled_from((1, 6, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = -(-key_count // 8)
    length = st.one_of(st.sampled_from((-(2**31), -1, 0, 1, 8, key_count - 1, key_count, key_count + 9, 2**31 - 1)),
                       st.integers(0, key_count))  # fmt: skip
    visible = np.asarray(draw(st.lists(length, min_size=ROWS, max_size=ROWS)), np.int32)
    wild = rng.choice([-(2**31), -7, -1, 0, blocks - 1, blocks, 2**31 - 1], (ROWS, k))
    ids = np.where(rng.random((ROWS, k)) < 0.7, rng.integers(0, blocks, (ROWS, k)), wild).astype(np.int32)
    return ids, visible, rng.random(ROWS) < 0.8, key_count, k


def sources(ids, visible, key_count, k):
    """The same candidates as ids, as flags, and as a sorted prefix with its count."""
    blocks = -(-key_count // 8)
    flags, prefix, count = np.zeros((ROWS, blocks), np.uint8), np.full((ROWS, k), -1, np.int32), np.zeros(ROWS, np.int32)
    for r in range(ROWS):
        kept = sorted({int(i) for i in ids[r] if 0 <= i < blocks})
        flags[r, kept] = 1
        count[r] = len(kept)
        prefix[r, : len(kept)] = kept
    yield "ids", ids, {}
    yield "flags", flags, {}
    yield "prefix", prefix, {"count": jnp.asarray(count)}


@settings(max_examples=30, deadline=None)
@given(cases())
def test_definition_against_numpy(case):
    ids, visible, valid, key_count, k = case
    want = oracle(ids, visible, valid, key_count, k, 8)
    for kind, candidates, extra in sources(ids, visible, key_count, k):
        plan = sparse_plan(
            jnp.asarray(candidates), jnp.asarray(visible), key_count=key_count, k=k, kind=kind,
            valid=jnp.asarray(valid), impl="reference", **extra,
        )  # fmt: skip
        assert_plan(plan, want)


@settings(max_examples=30, deadline=None)
@given(cases(key_counts=(1, 61, 2000, 40000)), st.booleans())
def test_emulated_kernel(case, with_valid):
    ids, visible, valid, key_count, k = case
    want = oracle(ids, visible, valid | (not with_valid), key_count, k, 8)
    for kind, candidates, extra in sources(ids, visible, key_count, k):
        extra["valid"] = jnp.asarray(valid) if with_valid else None
        arguments = jnp.asarray(candidates), jnp.asarray(visible)
        assert_plan(bitmap_plan.emulated(*arguments, key_count=key_count, k=k, kind=kind, threads=128, **extra), want)


def test_short_ids_and_int16_and_other_blocks():
    """ids may be 16-bit, may be fewer or more than k, and blocks may have another power-of-two size."""
    ids = np.asarray([[5, 3, 3, -1, 9, 30, 31]], np.int16)
    plan = sparse_plan(jnp.asarray(ids), jnp.asarray([121], jnp.int32), key_count=128, k=4, kind="ids", block_size=4)
    assert_plan(plan, oracle(ids, np.asarray([121]), [True], 128, 4, 4))
    wide = sparse_plan(jnp.asarray(ids), jnp.asarray([121], jnp.int32), key_count=128, k=9, kind="ids", block_size=4)
    assert np.asarray(wide.sparse_indices).tolist() == [[3, 5, 9, 30, 30, 30, 30, 30, 30]]
    assert np.asarray(wide.end).tolist() == [3 * 4 + 1]
    again = bitmap_plan.emulated(
        jnp.asarray(ids, jnp.int32), jnp.asarray([121], jnp.int32), key_count=128, k=9, kind="ids", block_size=4
    )
    assert_plan(again, [np.asarray(x) for x in (wide.row_ks, wide.row_ke, wide.sparse_indices, wide.end)])


def test_is_a_pytree_with_static_geometry():
    plan = sparse_plan(jnp.zeros((2, 4), jnp.int32), jnp.asarray([9, 0], jnp.int32), key_count=64, k=4, kind="ids")
    assert len(jax.tree.leaves(plan)) == 4
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p))(plan)
    assert (doubled.key_count, doubled.block_size) == (64, 8)
    with pytest.raises(AttributeError):
        plan.end = None


def test_choice_and_errors():
    ids, visible = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    count = jnp.zeros(2, jnp.int32)
    assert explain(ids, visible, key_count=64, k=4, count=count, arch="sm_90") == {"chosen": "bitmap_plan"}
    assert "int16" in explain(ids.astype(jnp.int16), visible, key_count=64, k=4, kind="ids", arch="sm_90")["bitmap_plan"]
    with pytest.raises(ValueError, match="kind"):
        sparse_plan(ids, visible, key_count=64, k=4, kind="sorted")
    with pytest.raises(ValueError, match="count"):
        sparse_plan(ids, visible, key_count=64, k=4)
    with pytest.raises(ValueError, match=r"flags u8 or bool \[2, 8\]"):
        sparse_plan(ids, visible, key_count=64, k=4, kind="flags")
    with pytest.raises(ValueError, match=r"valid bool\[2\]"):
        sparse_plan(ids, visible, key_count=64, k=4, kind="ids", valid=jnp.ones(3, bool))


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles(target, record_property):
    names = ("verify_prefix", "verify_flags", "verify_ids", "long_ids")
    compiled = deviceless.compile_all(target, "pallas_kernels.sparse_plan.specs:deviceless_case", names)
    for name, result in compiled.items():
        own = result.matching("sparse_plan")
        record_property(name, str(own.kernels))
        assert len(result.kernels) == 1, "the plan is one kernel"
        assert "griddepcontrol.wait" in own.ptx
        assert "ld.global.nc" not in own.ptx  # ptxas moves such loads over the wait
        assert ("red.shared.or" in own.ptx) == ("ids" in name)
        assert own.spill_bytes == 0, own.kernels


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
class TestCompiled:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("with_valid", [False, True])
    def test_specs(self, spec, with_valid):
        args, kwargs = spec.make_inputs(seed=13)
        if with_valid:
            kwargs["valid"] = jnp.arange(spec.rows) % 3 != 1
        static = {"key_count": spec.key_count, "k": spec.k, "kind": spec.kind}
        got = jax.jit(functools.partial(sparse_plan, impl="bitmap_plan", **static))(*args, **kwargs)
        want = jax.jit(functools.partial(reference.sparse_plan, **static))(*args, **kwargs)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
