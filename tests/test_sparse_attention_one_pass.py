"""The Pallas kernel of sparse attention, interpreted on the CPU: against the float64 loop, with poison, window edges, draft
bounds, every code of both record formats; compiled for three architectures without a GPU."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codecs
from pallas_kernels.sparse_attention import one_pass, specs
from tests import deviceless
from tests.test_sparse_attention import behind, loop, poisoned, turned

TILE = 4  # several tiles of window and selected keys, the last of each not full
SMALL = dataclasses.replace(specs.TINY, dim=128)  # the fewest channels whose records are whole words


def run(inputs, spec, **options):
    return np.asarray(one_pass.sparse_attention(**inputs, **spec.options, interpret=True, tile=TILE, **options))


def check(got, want):
    assert np.isfinite(got.astype(np.float32)).all()
    assert np.linalg.norm(got.astype(np.float64) - want) < 6e-3 * max(np.linalg.norm(want), 1e-30)


def test_equals_the_loop_whatever_unread_bytes_hold():
    spec = dataclasses.replace(SMALL, batch=4, context=5, sparsity=0.5)
    inputs = spec.make_inputs(seed=3)
    inputs["slots"][1] = -1  # invalid request
    inputs["positions"][2, 2] = -1  # padding row
    inputs["global_slots"][0] = -1  # window only
    dirty = poisoned(inputs, spec) | {name: inputs[name].copy() for name in ("q", "cos", "sin", "global_slots")}
    dirty["q"][1], dirty["q"][2, 2] = np.nan, np.inf
    dirty["cos"][1], dirty["sin"][2, 2] = np.nan, np.nan
    entries = dirty["global_pool"].shape[0] * spec.page_entries
    dirty["global_slots"][0] = np.resize([-1, -7, entries, 2**31 - 1], dirty["global_slots"][0].shape)
    got = run(dirty, spec, rotate_query=True)
    want = loop(**turned(inputs), **spec.options)
    check(got, want)
    assert not got[1].any() and not got[2, 2].any() and want[0].any() and want[2, 1].any()


def test_window_edges():
    """Sequences shorter than, equal to and longer than a tile, the window and the ring; the query is rotated already."""
    for context in (0, 1, 3, 4, 6, 7, 8, 11, 12, 40):
        spec = dataclasses.replace(SMALL, context=context, selected=0)
        inputs = spec.make_inputs(seed=context)
        check(run(inputs, spec), loop(**inputs, **spec.options))


def test_draft_bounds_and_empty_rows():
    spec = dataclasses.replace(SMALL, selected=0, span=5, ring=13, window=13)
    for prefix in (1, 7, 8, 9, 30):
        inputs = dataclasses.replace(spec, context=prefix).make_inputs(seed=prefix)
        start = np.full((spec.batch, 5), max(0, prefix - 8), np.int32)
        end = np.full((spec.batch, 5), prefix + 5, np.int32)
        end[1] = start[1]  # a request without keys
        got = run(inputs, spec, window_start=start, window_end=end)
        check(got, loop(**inputs, **spec.options, bounds=(start, end)))
        assert not got[1].any() and got[0].any()


@pytest.mark.parametrize("rotate", [False, True])
def test_queries_are_read_behind_other_columns(rotate):
    inputs = SMALL.make_inputs(seed=4)
    got = run(behind(inputs, 3 * SMALL.dim), SMALL, rotate_query=rotate, first=3 * SMALL.dim)
    np.testing.assert_array_equal(got, run(inputs, SMALL, rotate_query=rotate))


def words(records):
    return jnp.asarray(records.view(np.int32))


def test_decodes_every_code_exactly():
    """All payload bytes under all scales of normal size: the values of the codecs, bit for bit."""
    rng = np.random.default_rng(0)
    payload = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    fp8 = np.where((payload & 0x7F) == 0x7F, 0, payload).astype(np.uint8)
    scale = np.repeat(np.clip(np.arange(256), 16, 240)[:, None], 8, 1).astype(np.uint8)
    want = codecs.dequantize_fp8(fp8.view(jnp.float8_e4m3fn), jnp.asarray(scale))
    got = one_pass.decode_window(words(fp8), words(scale))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want))
    scale = np.ascontiguousarray(rng.permuted(np.tile(np.arange(127, dtype=np.uint8), (256, 1)), axis=1)[:, :32])
    want = codecs.dequantize_nvfp4(jnp.asarray(payload), scale.view(jnp.float8_e4m3fn))
    got = one_pass.decode_global(words(payload), words(scale))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want))


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
def test_records_of_a_pool_of_19_gb_have_addresses_of_64_bits():
    case = "pallas_kernels.sparse_attention.specs:deviceless_case", "m384_1m:one_pass"
    ptx = deviceless.compile_for("sm_103a", *case).matching("sparse_attention_one_pass").ptx
    assert re.search(r"mul\.wide\.[su]32\s[^;]*, 288;", ptx) and not re.search(r"\.lo\.[su]32\s[^;]*, 72[,;]", ptx)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_tensor_cores_with_one_decoding_of_each_tile(target):
    compiled = deviceless.compile_for(target, "pallas_kernels.sparse_attention.specs:deviceless_case", "m384_r1:one_pass")
    assert "copy(" not in compiled.hlo, "no pool may be copied on its way to the kernel"
    kernel = compiled.matching("sparse_attention_one_pass")
    assert kernel.kernels == compiled.kernels and len(kernel.kernels) == 1, "nor pass through another one"
    assert "mma.sync" not in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
    assert ("wgmma.mma_async" if target == "sm_90a" else "tcgen05.mma") in kernel.ptx
    assert deviceless.unfenced_products(kernel.ptx) == 0
    assert "cp.async.cg.shared.global" in kernel.ptx, "records are gathered 16 bytes at a time"
    waits = re.findall(r"cp\.async\.wait_group\s+([1-9])", kernel.ptx)
    assert len(waits) >= 2, "both loops leave the next tile's bytes in flight while they decode one"
    # On Blackwell the first turn of each loop stands before it, so a tile's decoding is found twice per format.
    per_tile = one_pass.TILE * 512 // (32 * one_pass.WARPS) // 2
    copies = 2 if target == "sm_90a" else 4
    assert kernel.ptx.count("cvt.rn.f16x2.e4m3x2") < copies * 1.1 * per_tile
    # A program has the multiprocessor for itself, so 255 registers are free to use. A few addresses and descriptors that are
    # the same in every turn go to the stack.
    report = kernel.kernels[0]
    assert report.registers <= 255 and report.spill_bytes <= (32 if target == "sm_90a" else 128), report
