"""index_score and index_score_blocks against loops in numpy, with poisoned pages, odd page sizes and odd bounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codecs, gluon_call
from pallas_kernels.index_score import explain, explain_blocks, hopper, index_score, index_score_blocks, specs
from tests.index_score_harness import BF16, check, kernel_against_reference, key_of, loop_blocks, loop_dense


def as_values(inputs, spec):
    """The same problem in fp32 with a value pool (precision `float32`)."""
    pages, dim, entries = len(inputs["index_pool"]), spec.dim, spec.page_entries
    table = np.arange(pages).reshape(1, pages)
    zero = np.zeros(dim)
    pool = [[key_of(inputs["index_pool"], table[0], p * entries + e, entries, dim) for e in range(entries)]
            for p in range(pages)]  # fmt: skip
    pool = np.array([[zero if k is None else k for k in page] for page in pool], np.float32)
    pool[0] = np.nan
    return inputs | dict(
        q=inputs["q"].astype(np.float32), head_weights=inputs["head_weights"].astype(np.float32), index_pool=pool
    )


@pytest.mark.parametrize("spec", specs.CPU_SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("precision", ["released", "float32"])
def test_dense_matches_loop(spec, precision):
    inputs = spec.make_inputs(seed=1)
    if precision == "float32":
        inputs = as_values(inputs, spec)
    got = jax.jit(lambda kw: index_score(**kw))(inputs)
    check(got, loop_dense(inputs, spec), inputs["head_weights"].dtype)


@pytest.mark.parametrize("spec", specs.CPU_BLOCK_SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("precision", ["released", "float32"])
def test_blocks_match_loop(spec, precision):
    inputs = spec.make_inputs(seed=2)
    if precision == "float32":
        inputs = as_values(inputs, spec)
    got = jax.jit(lambda kw: index_score_blocks(**kw, block_size=spec.block_size))(inputs)
    check(got, loop_blocks(inputs, spec), inputs["head_weights"].dtype)


@pytest.mark.parametrize("page", [0, -1, -7, -99, 10_000])
def test_unallocated_pages_score_zero(page):
    spec = specs.TINY
    inputs = spec.make_inputs(seed=3)
    inputs["table"][1, 1] = page
    got = np.asarray(index_score(**inputs)).astype(np.float64)
    check(index_score(**inputs), loop_dense(inputs, spec), BF16)
    assert not got[spec.span :, spec.page_entries : 2 * spec.page_entries].any()
    blocks = specs.TINY_BLOCKS.make_inputs(seed=3)
    blocks["table"][0, 2] = page
    check(index_score_blocks(**blocks), loop_blocks(blocks, specs.TINY_BLOCKS), BF16)


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 1, 27, 28, 29, 2**31 - 1])
def test_any_length_is_defined(length):
    spec = specs.TINY
    inputs = spec.make_inputs(seed=4)
    inputs["visible"][2] = length
    check(index_score(**inputs), loop_dense(inputs, spec), BF16)
    blocks = specs.TINY_BLOCKS.make_inputs(seed=4)
    blocks["end"][2] = length
    check(index_score_blocks(**blocks), loop_blocks(blocks, specs.TINY_BLOCKS), BF16)


def test_poison_of_an_invalid_request_stays_there():
    spec = specs.TINY
    inputs = spec.make_inputs(seed=5)
    clean = np.asarray(index_score(**inputs))
    inputs["visible"][: spec.span] = 0
    inputs["q"][: spec.span] = np.nan
    inputs["head_weights"][: spec.span] = np.inf
    got = np.asarray(index_score(**inputs))
    assert np.isneginf(got[: spec.span].astype(np.float32)).all()
    np.testing.assert_array_equal(got[spec.span :], clean[spec.span :])


def test_packed_queries_are_the_same_queries():
    spec = specs.TINY_ODD
    inputs = spec.make_inputs(seed=6)
    packed = codecs.quantize_mxfp4(jnp.asarray(inputs["q"]))
    np.testing.assert_array_equal(
        np.asarray(index_score(**inputs)), np.asarray(index_score(**inputs | dict(q=packed)))
    )


def test_candidates_score_what_the_dense_scorer_scores():
    spec = specs.TINY_BLOCKS
    inputs = spec.make_inputs(seed=7)
    blocks = np.asarray(index_score_blocks(**inputs))
    kw = {k: v for k, v in inputs.items() if k not in ("block_ids", "end")}
    dense = np.asarray(index_score(**kw, visible=np.full(spec.rows, spec.capacity, np.int32)))
    column = np.arange(spec.blocks * spec.block_size)
    position = inputs["block_ids"][:, column // 8] * 8 + column % 8
    for t in range(spec.rows):
        np.testing.assert_array_equal(blocks[t, : inputs["end"][t]], dense[t, position[t, : inputs["end"][t]]])


def test_requests_are_scored_in_turn_when_they_do_not_fit(monkeypatch):
    spec = dataclasses.replace(specs.TINY, batch=5)
    inputs = spec.make_inputs(seed=8)
    whole = np.asarray(index_score(**inputs))
    from pallas_kernels.index_score import reference

    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2 * spec.span * spec.heads * spec.capacity)
    np.testing.assert_array_equal(np.asarray(index_score(**inputs)), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(visible=np.zeros(5, np.int32)), "visible expected"),
        (dict(table=np.zeros((4, 3), np.int32)), "table expected"),
        (dict(index_pool=np.zeros((3, 70), np.uint8)), "index_pool expected"),
        (dict(q=np.zeros((6, 4, 32), np.float32)), "q.dtype expected"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        index_score(**specs.TINY.make_inputs(seed=0) | change)


def test_explain_names_the_choice():
    dense, blocks = specs.TINY.make_inputs(seed=0), specs.TINY_BLOCKS.make_inputs(seed=0)
    assert explain(*dense.values(), arch="cpu")["chosen"] == "reference"
    assert explain_blocks(*blocks.values(), arch="cpu")["chosen"] == "reference"


# --- the Hopper kernels ---------------------------------------------------------------------------------------------


def on_hopper():
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


needs_hopper = pytest.mark.skipif("not on_hopper()", reason="the kernels run on an sm_90 GPU")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("spec", [*specs.GPU_SPECS, specs.M384_16K], ids=lambda s: s.name)
def test_kernel_matches_reference(spec):
    inputs = spec.make_inputs(seed=21)
    if spec.batch > 2:
        inputs["table"][1, 1:3] = (0, -7)
        inputs["visible"][-spec.span :] = 0
        inputs["q"][-spec.span :] = np.nan
    kernel_against_reference(inputs, index_score)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("spec", [*specs.GPU_BLOCK_SPECS, specs.M384_BLOCKS], ids=lambda s: s.name)
def test_block_kernel_matches_reference(spec):
    inputs = spec.make_inputs(seed=22)
    inputs["table"][1, 1:3] = (0, -7)
    inputs["end"][-1] = 0
    inputs["block_ids"][-1] = 2**27
    got = kernel_against_reference(inputs, index_score_blocks)
    gathered = jax.jit(lambda kw: hopper.index_score_blocks(**kw, block_size=8, window=None))(jax.device_put(inputs))
    np.testing.assert_array_equal(np.asarray(gathered).astype(np.float64), got)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("span", [1, 2, 3, 5, 6, 8, 16])
def test_kernel_lengths(span):
    spec = dataclasses.replace(specs.SMALL, batch=7, span=span, columns=3, context=300)
    inputs = spec.make_inputs(seed=span)
    inputs["visible"][:] = np.random.default_rng(span).integers(-5, 500, spec.rows)
    inputs["visible"][0], inputs["visible"][-1] = 2**31 - 1, -(2**31)
    got = kernel_against_reference(inputs, index_score)
    live = np.arange(spec.capacity) < inputs["visible"][:, None]
    bare = np.asarray(index_score(**inputs, fill=False, impl="hopper")).astype(np.float64)
    np.testing.assert_array_equal(bare[live], got[live])


@pytest.mark.gpu
@needs_hopper
def test_kernels_read_a_pool_of_9_gb():
    """That of 128 requests of 2**20 tokens, zeros but for a small pool's pages, which lie far apart, the last one last."""
    shape = specs.CAPACITY_1M.pool_shape
    for spec, function in ((specs.SMALL, index_score), (specs.SMALL_BLOCKS, index_score_blocks)):
        inputs = spec.make_inputs(seed=23)
        far = np.linspace(0, shape[0] - 1, len(inputs["index_pool"])).astype(np.int32)
        make = jax.jit(lambda pages, far=far: jnp.zeros(shape, jnp.uint8).at[far].set(pages))
        there = inputs | dict(index_pool=make(inputs["index_pool"]), table=far[inputs["table"]])
        assert int(there["table"].max()) * (shape[1] // 4) > 2**31, "an offset in words of more than 32 bits"
        got = kernel_against_reference(there, function, same=inputs)
    gathered = jax.jit(lambda kw: hopper.index_score_blocks(**kw, block_size=8, window=None))(there)
    np.testing.assert_array_equal(np.asarray(gathered).astype(np.float64), got)


def test_keys_are_shared_only_where_the_kernel_fits_and_pays():
    inputs = specs.M384_BLOCKS
    shape = jax.ShapeDtypeStruct

    def refusal(span=6, heads=32, entries=128, columns=264, blocks=2048, size=8):
        rows = 64 * span
        pool = shape((64 * columns, entries * codecs.index_record_bytes(inputs.dim)), jnp.uint8)
        return hopper.refuses_sharing(
            shape((rows, heads, inputs.dim), BF16), shape((rows, heads), BF16), pool, shape((64, columns), jnp.int32),
            shape((rows, blocks), jnp.int32), size,
        )  # fmt: skip

    assert refusal() is None
    assert "1 rows" in refusal(span=1)
    assert "9 rows" in refusal(span=9)
    assert "64 heads" in refusal(heads=64)
    assert "96 entries" in refusal(entries=96)
    assert "blocks of 16" in refusal(size=16)
    assert "1048576 keys" in refusal(columns=8192)


def test_explain_says_why_the_kernel_is_passed_over():
    inputs = specs.SMALL.make_inputs(seed=0)
    answer = explain(*inputs.values(), arch="sm_103")
    assert answer["chosen"] != "hopper" and "sm_103" in answer["hopper"]
    pool = jax.ShapeDtypeStruct(specs.CAPACITY_1M.pool_shape, jnp.uint8)
    assert hopper.refuses(**inputs | dict(index_pool=pool)) == gluon_call.unavailable()
    odd = specs.TINY_ODD.make_inputs(seed=0)
    assert explain(*odd.values(), arch="sm_90")["chosen"] == "reference"
