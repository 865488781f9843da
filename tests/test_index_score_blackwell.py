"""The Triton kernels of the index scores: interpreted against loops in numpy, compiled without a GPU for three
architectures, and on a GPU (Hopper too, where their product is decoded first) against the reference."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codecs
from pallas_kernels.index_score import blackwell, explain, explain_blocks, index_score, index_score_blocks, specs
from tests import deviceless, triton_interpreter
from tests.index_score_harness import BF16, check, kernel_against_reference, loop_blocks, loop_dense

MODULE = "pallas_kernels.index_score.blackwell"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_jax_triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")


def released():
    """Six rows a request in pairs: three products a tile, shares that cross requests, unallocated and foreign pages."""
    spec = specs.SMALL
    inputs = spec.make_inputs(seed=31)
    inputs["table"][1, 1:4] = (0, 10_000, -7)
    inputs["head_weights"][7] = -abs(inputs["head_weights"][7])  # its zeros would come out negative
    return spec, inputs, dict(launch=(128, 4, 5))


def invalid_request():
    """Pages of 64 entries (two a tile) and a padding request whose poison stays in its own rows."""
    spec = specs.SMALL_R2
    inputs = spec.make_inputs(seed=32)
    inputs["visible"][-spec.span :] = 0
    inputs["q"][-spec.span :] = np.nan
    inputs["head_weights"][-spec.span :] = np.inf
    return spec, inputs, dict(launch=(128, 4, 4))


def any_length():
    """Lengths outside the table, and a capacity that is no multiple of a tile; tiles as on Hopper."""
    spec = dataclasses.replace(specs.SMALL, batch=4, span=3, heads=16, page_entries=12, columns=25, context=250)
    inputs = spec.make_inputs(seed=33)
    inputs["visible"][:] = np.random.default_rng(33).integers(-5, 400, spec.rows)
    inputs["visible"][[0, 3, 4, 5, -1]] = 2**31 - 1, 0, -1, 1, -(2**31)
    return spec, inputs, dict(launch=(64, 4, 3))


def unfilled():
    """A short context in a long table: nothing beyond the last live tile is written."""
    spec = dataclasses.replace(specs.SMALL, batch=1, span=1, heads=64, columns=9, context=130)
    return spec, spec.make_inputs(seed=34), dict(fill=False, launch=(128, 4, 2))


DENSE = {case.__name__: case for case in (released, invalid_request, any_length, unfilled)}


def candidates():
    """Filler of any id, a row without candidates, pages that are unallocated or outside the pool; several chunks."""
    spec = dataclasses.replace(specs.SMALL_BLOCKS, span=3)
    inputs = spec.make_inputs(seed=35)
    inputs["table"][1, 1:3] = (0, 10_000)
    inputs["head_weights"][4] = -abs(inputs["head_weights"][4])
    for t in range(spec.rows):
        inputs["block_ids"][t, 40:] = 2**27
        inputs["end"][t] = 40 * spec.block_size - 3
    inputs["end"][2], inputs["end"][3], inputs["end"][5] = 0, -(2**31), 2**31 - 1
    inputs["block_ids"][5, 50:52] = (-1, -(2**31))
    return spec, inputs, dict(chunk=256)


def few_candidates():
    """Fewer columns than a tile, blocks in pages of three, 16 heads."""
    spec = dataclasses.replace(specs.SMALL_BLOCKS, span=1, heads=16, page_entries=24, columns=7, context=150, blocks=5)
    return spec, spec.make_inputs(seed=36), dict(launch=(128, 4))


BLOCKS = {case.__name__: case for case in (candidates, few_candidates)}


@pytest.fixture(scope="module")
def interpreted():
    """{case: output}, all from one child process."""
    cases = {name: make() for name, make in (DENSE | BLOCKS).items()}
    runs = [(f"{MODULE}:index_score_blocks", inputs, options | dict(block_size=spec.block_size)) if spec.blocks
            else (f"{MODULE}:index_score", inputs, options) for spec, inputs, options in cases.values()]  # fmt: skip
    _, inputs, options = cases["any_length"]
    packed = codecs.quantize_mxfp4(jnp.asarray(inputs["q"]))
    runs.append((f"{MODULE}:index_score", inputs | dict(q=tuple(map(np.asarray, packed))), options))
    runs.append((f"{MODULE}:index_score", inputs | dict(visible=np.zeros_like(inputs["visible"])), options))
    return dict(zip([*cases, "packed", "nothing"], triton_interpreter.run(runs), strict=True))


@needs_triton
@pytest.mark.parametrize("name", DENSE)
def test_interpreted_dense_matches_loop(interpreted, name):
    spec, inputs, options = DENSE[name]()
    got, want = interpreted[name], loop_dense(inputs, spec)
    if options.get("fill", True):
        return check(got, want, BF16)
    written = -(-int(inputs["visible"].max()) // 128) * 128
    check(got[:, :written], want[:, :written], BF16)
    assert np.isnan(got[:, written:].astype(np.float32)).all()


@needs_triton
@pytest.mark.parametrize("name", BLOCKS)
def test_interpreted_blocks_match_loop(interpreted, name):
    spec, inputs, _ = BLOCKS[name]()
    check(interpreted[name], loop_blocks(inputs, spec), BF16)


@needs_triton
def test_packed_queries_are_the_same_queries(interpreted):
    np.testing.assert_array_equal(interpreted["packed"].view(np.uint16), interpreted["any_length"].view(np.uint16))


@needs_triton
def test_nothing_visible_is_all_filler(interpreted):
    assert np.isneginf(interpreted["nothing"].astype(np.float32)).all()


@pytest.mark.parametrize("span", [1, 2, 3, 4, 5, 6, 8, 12, 16, 384])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_products_cover_the_rows_of_a_request(span, heads):
    groups, per = blackwell.products(span, heads)
    assert span % (groups * per) == 0 and groups <= 3 and per * heads <= 64
    assert (heads, span) != (32, 6) or (groups, per) == (3, 2)


@needs_jax_triton
@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
def test_chosen_on_blackwell_for_the_released_shapes_only(arch):
    dense, blocks = specs.SMALL.make_inputs(seed=0), specs.SMALL_BLOCKS.make_inputs(seed=0)
    assert explain(*dense.values(), arch=arch)["chosen"] == "blackwell"
    assert explain_blocks(*blocks.values(), arch=arch)["chosen"] == "blackwell"
    assert explain(*dense.values(), arch="sm_90")["chosen"] != "blackwell"
    odd = explain(*specs.TINY.make_inputs(seed=0).values(), arch=arch)
    assert odd["chosen"] == "reference" and "4 heads of 32 channels" in odd["blackwell"]
    with pytest.raises(ValueError, match="blocks of 5 cross pages of 128 entries"):
        index_score_blocks(**blocks, block_size=5, impl="blackwell")


# --- compiled without a GPU -----------------------------------------------------------------------------------------

# target: (instruction, most registers a thread of the dense and of the candidates' kernel)
TENSOR_CORES = {
    "sm_90a": ("wgmma.mma_async.sync.aligned", 255, 128),
    "sm_100a": ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale", 240, 112),
    "sm_103a": ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale", 240, 112),
}


@pytest.mark.deviceless
@needs_jax_triton
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", TENSOR_CORES)
def test_compiles_to_tensor_cores_without_spills(target):
    instruction, *registers = TENSOR_CORES[target]
    cases = ("m384_16k:blackwell", "m384_blocks:blackwell")
    compiled = deviceless.compile_all(target, "pallas_kernels.index_score.specs:deviceless_case", cases)
    for case, entry, most in zip(cases, ("index_score_dense", "index_score_candidates"), registers, strict=True):
        kernel = compiled[case].matching(entry)
        assert [k.name for k in kernel.kernels] == [entry]
        assert instruction in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
        assert deviceless.unfenced_products(kernel.ptx) == 0
        assert kernel.registers <= most and kernel.spill_bytes == 0, kernel.kernels
        assert "copy(" not in compiled[case].hlo, "no pool may be copied on its way to the kernel"


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_jax_triton
@pytest.mark.parametrize("spec", [*specs.GPU_SPECS, specs.M384_16K], ids=lambda s: s.name)
def test_kernel_matches_reference(spec):
    inputs = spec.make_inputs(seed=41)
    inputs["table"][1, 1:3] = (0, -7)
    inputs["head_weights"][spec.span] = -abs(inputs["head_weights"][spec.span])
    if spec.batch > 2:
        inputs["visible"][-spec.span :] = 0
        inputs["q"][-spec.span :] = np.nan
    kernel_against_reference(inputs, index_score, "blackwell")


@pytest.mark.gpu
@needs_jax_triton
@pytest.mark.parametrize("spec", [*specs.GPU_BLOCK_SPECS, specs.M384_BLOCKS], ids=lambda s: s.name)
def test_block_kernel_matches_reference(spec):
    inputs = spec.make_inputs(seed=42)
    inputs["table"][1, 1:3] = (0, -7)
    inputs["end"][-1] = 0
    inputs["block_ids"][-1] = 2**27
    kernel_against_reference(inputs, index_score_blocks, "blackwell")


@pytest.mark.gpu
@needs_jax_triton
@pytest.mark.parametrize("span", [1, 3, 6, 16])
def test_kernel_lengths(span):
    spec = dataclasses.replace(specs.SMALL, batch=7, span=span, columns=3, context=300)
    inputs = spec.make_inputs(seed=span)
    inputs["visible"][:] = np.random.default_rng(span).integers(-5, 500, spec.rows)
    inputs["visible"][0], inputs["visible"][-1] = 2**31 - 1, -(2**31)
    got = kernel_against_reference(inputs, index_score, "blackwell")
    live = np.arange(spec.capacity) < inputs["visible"][:, None]
    bare = jax.jit(lambda kw: index_score(**kw, fill=False, impl="blackwell"))(inputs)
    np.testing.assert_array_equal(np.asarray(bare).astype(np.float64)[live], got[live])
