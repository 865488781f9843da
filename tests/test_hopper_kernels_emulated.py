"""The Hopper kernels of the index scores and of sparse attention: their PTX run on the CPU against the references.

Each kernel is compiled for sm_90a and launched by its own module (tests/ptx_emulator.py says what of the machine is
modelled). Broken kernels show that a wrong constant, a missing barrier and a missing arrival do not go unseen.
"""

import dataclasses
import functools
import importlib.util
import re

import jax
import numpy as np
import pytest

from pallas_kernels import gluon_call
from pallas_kernels.index_score import hopper as scores_hopper
from pallas_kernels.index_score import reference as scores_reference
from pallas_kernels.index_score import specs as scores_specs
from pallas_kernels.sparse_attention import hopper as attention_hopper
from pallas_kernels.sparse_attention import reference as reference_attention
from pallas_kernels.sparse_attention import specs as attention_specs
from tests import ptx_emulator
from tests.index_score_harness import check_kernel
from tests.ptx_emulator import emulated
from tests.ptx_instructions import PtxError
from tests.test_sparse_attention import behind, poisoned

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# two windows a request of the kernel that shares keys, whose two groups of warps get two rows and one
BLOCKS = dataclasses.replace(scores_specs.SMALL_BLOCKS, batch=2, span=3, context=1021, blocks=40, columns=9)
SHARE = {"window": (*scores_hopper.WINDOW[:4], 2)}  # 2 programs a request
GATHER = {"window": None, "chunk": 256}  # 4 tiles of a row and the fifth
DENSE = dataclasses.replace(scores_specs.SMALL, batch=3, span=2, columns=3, context=200)
ATTENTION = dataclasses.replace(
    attention_specs.SMALL, batch=4, span=1, selected=70, context=140, ratio=1, page_entries=8
)


@functools.cache
def blocks_reference():
    return jax.jit(functools.partial(scores_reference.index_score_blocks, block_size=8))


def run_blocks(inputs, **options):
    return np.asarray(scores_hopper.index_score_blocks(**inputs, block_size=8, **options)).astype(np.float64)


def check_scores(got, want):
    """Within the operator's bound, and the same bits but where the fp32 sum of heads rounds to the other side."""
    want = np.asarray(want).astype(np.float64)
    check_kernel(got, want)
    assert (got == want).mean() > 0.99


def plain(inputs):
    pass


def lengths(inputs):
    """A row that ends inside a block, one without candidates and one that sees them all; ids below 0."""
    inputs["end"][:] = 9, -5, 2**31 - 1, 64, 65, 0
    inputs["block_ids"][2, :2] = -3, -2


def foreign_pages(inputs):
    """Pages that are unallocated, below 0 and outside the pool."""
    inputs["table"][0, 1:4] = 0, -7, 10**6


def far_and_equal_ids(inputs):
    """Blocks outside the table, one block for all of a row, blocks in pairs, a short row."""
    inputs["block_ids"][0, -10:] = 2**20 + np.arange(10)
    inputs["block_ids"][1] = 3
    inputs["block_ids"][2] = np.sort(np.r_[inputs["block_ids"][2, :20], inputs["block_ids"][2, :20]])
    inputs["end"][:3] = BLOCKS.blocks * 8, BLOCKS.blocks * 8 - 3, 77


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (plain, "ascending"), (plain, "descending"), (lengths, "ascending"), (foreign_pages, "descending"),
        (far_and_equal_ids, "ascending"), (far_and_equal_ids, "descending"),
    ],
)  # fmt: skip
def test_candidate_kernels_score_what_the_reference_scores(change, order):
    inputs = BLOCKS.make_inputs(seed=41)
    change(inputs)
    with emulated(order):
        gathered, shared = run_blocks(inputs, **GATHER), run_blocks(inputs, **SHARE)
    check_scores(gathered, blocks_reference()(**inputs))
    np.testing.assert_array_equal(shared, gathered)


def test_candidates_that_fill_the_list_of_a_window():
    """One group of warps a program, and rows with more candidates in a window than its list holds."""
    spec = dataclasses.replace(BLOCKS, batch=1, span=2, blocks=70)
    inputs = spec.make_inputs(seed=48)
    inputs["block_ids"][0], inputs["block_ids"][1] = 3, 2**20
    inputs["block_ids"][1, :3] = -1, 5, 90
    inputs["end"][:] = 8 * spec.blocks, 8 * spec.blocks - 3
    want = blocks_reference()(**inputs)
    for order in ("ascending", "descending"):
        with emulated(order):
            got = run_blocks(inputs, window=(32, 12, 1, 128, 2))
        check_scores(got, want)


@pytest.mark.parametrize(("span", "order"), [(2, "ascending"), (3, "descending"), (6, "ascending")])
def test_dense_kernel_scores_what_the_reference_scores(span, order):
    """One or three products a tile, shares that cross requests, foreign pages, any length, a poisoned request that sees
    nothing."""
    spec = dataclasses.replace(DENSE, span=span)
    inputs = spec.make_inputs(seed=42)
    inputs["table"][1, :2] = -7, 10_000
    inputs["visible"][:span] = np.resize([2**31 - 1, 65], span)
    inputs["visible"][-span:] = np.resize([-5, 0], span)
    inputs["q"][-span:], inputs["head_weights"][-span:] = np.nan, np.inf
    inputs["head_weights"][0] = -abs(inputs["head_weights"][0])  # its zeros would come out negative
    want = jax.jit(scores_reference.index_score)(**inputs)
    with emulated(order):
        got = np.asarray(scores_hopper.index_score(**inputs, programs=3)).astype(np.float64)
    check_scores(got, want)


def scattered(inputs, path):
    """The same problem with its pages far apart, the last one last, in the pool of 128 requests of 2**20 tokens: 9 GB, a
    file of which nothing but those pages takes space; all else is zeros."""
    shape, pages = scores_specs.CAPACITY_1M.pool_shape, inputs["index_pool"]
    pool = np.memmap(path, np.uint8, "w+", shape=shape)
    far = np.linspace(0, shape[0] - 1, len(pages)).astype(np.int32)
    pool[far] = pages
    return inputs | dict(index_pool=pool, table=far[inputs["table"]])


@pytest.mark.parametrize("kernel", ["dense", "blocks", "request_blocks"])
def test_score_kernels_read_a_pool_of_9_gb(kernel, monkeypatch, tmp_path):
    spec = dataclasses.replace(DENSE if kernel == "dense" else BLOCKS, batch=1, span=2)
    inputs = spec.make_inputs(seed=50)
    far = scattered(inputs, tmp_path / "pool")
    assert far["table"].max() == len(far["index_pool"]) - 1 >= 2**33 / far["index_pool"].shape[1]
    if kernel == "dense":
        want = jax.jit(scores_reference.index_score)(**inputs)
        run = lambda: np.asarray(scores_hopper.index_score(**far, programs=3)).astype(np.float64)
    else:
        want = blocks_reference()(**inputs)
        run = lambda: run_blocks(far, **(GATHER if kernel == "blocks" else SHARE))
    with emulated():
        check_scores(run(), want)
    if kernel == "request_blocks":
        return  # its offsets have 64 bits in pools of any size
    monkeypatch.setattr(scores_hopper, "wide", lambda pool: False)
    with emulated(), pytest.raises((PtxError, AssertionError)):  # outside the pool, or zeros
        check_scores(run(), want)


def check_attention(got, want):
    """The bound of tests/test_sparse_attention.py between kernel and reference on a GPU."""
    got, want = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)
    assert np.abs(got - want).max() < 2e-2 * np.abs(want).max()


def attention_reference(inputs, **options):
    return jax.jit(functools.partial(reference_attention.sparse_attention, **options))(**inputs)


@pytest.mark.parametrize("ahead", [False, True])
def test_attention_kernel_attends_as_the_reference_does(ahead):
    """Two rows a program: one at the start of its ring, one whose window wraps around it, an invalid and a padding row;
    slots that select nothing; what no row may read is poison; the query is rotated."""
    inputs = ATTENTION.make_inputs(seed=43)
    inputs["positions"][:, 0] = 20, 140, 50, -1
    inputs["slots"][2] = -1
    inputs["global_slots"][0, 0, ::3] = -1
    inputs = poisoned(inputs, ATTENTION)
    inputs["q"][2:] = np.nan
    entries = inputs["global_pool"].shape[0] * ATTENTION.page_entries
    inputs["global_slots"][1, 0, :3] = -7, entries, 2**31 - 1
    want = attention_reference(inputs, **ATTENTION.options, rotate_query=True)
    for order in ("ascending", "descending"):
        with emulated(order):
            options = ATTENTION.options | {"rotate_query": True, "programs": 2, "ahead": ahead}
            got = attention_hopper.sparse_attention(**inputs, **options)
        check_attention(got, want)
        assert not got[2:].any()


def capacity_1m(inputs, path):
    """The same problem with its records far apart, the last one last, in the pool of 64 requests of 2**20 tokens: 19 GB, a
    file of which nothing but the records takes space; all else is zeros."""
    shape = attention_specs.M384_1M.pool_shape
    pool, records = np.memmap(path, np.uint8, "w+", shape=shape), inputs["global_pool"].reshape(-1, shape[2])
    far = np.linspace(0, shape[0] * shape[1] - 1, len(records)).astype(np.int32)
    pool.reshape(-1, shape[2])[far] = records
    slots = inputs["global_slots"]
    return inputs | dict(global_pool=pool, global_slots=np.where(slots >= 0, far[slots], -1))


@pytest.mark.parametrize("ahead", [False, True])
def test_attention_kernel_reads_a_pool_of_19_gb(ahead, monkeypatch, tmp_path):
    spec = dataclasses.replace(ATTENTION, batch=2)
    inputs = spec.make_inputs(seed=49)
    inputs["global_slots"][:, 0, 0] = inputs["global_pool"].shape[0] * spec.page_entries - 1
    want, far = attention_reference(inputs, **spec.options), capacity_1m(inputs, tmp_path / "pool")
    words = 72 * np.sort(far["global_slots"].ravel()).astype(np.int64)
    assert np.histogram(words, [0, 2**31, 2**32, 2**33])[0].all(), "offsets of 31, of 32 and of more bits"
    run = functools.partial(attention_hopper.sparse_attention, **far, **spec.options, ahead=ahead)
    with emulated():
        check_attention(run(), want)
    call = gluon_call.gluon_call
    monkeypatch.setattr(gluon_call, "gluon_call", lambda *args, **kw: call(*args, **kw | {"WIDE": False}))
    with emulated(), pytest.raises((PtxError, AssertionError)):  # outside the pool, or zeros
        check_attention(run(), want)


def test_attention_kernel_reads_queries_behind_other_columns_and_explicit_bounds():
    spec = dataclasses.replace(ATTENTION, batch=2, selected=0, context=30)
    inputs = spec.make_inputs(seed=44)
    bounds = {"window_start": np.int32([[25], [31]]), "window_end": np.int32([[33], [31]])}
    with emulated():
        got = attention_hopper.sparse_attention(**behind(inputs, 64), **spec.options, **bounds, first=64)
    check_attention(got, attention_reference(inputs | bounds, **spec.options))
    assert not got[1].any(), "a row with an empty window is 0"


# --- broken kernels are seen ------------------------------------------------------------------------------------------


def replace(old, new, which=0):
    """An edit of the PTX: the `which`-th match of the pattern `old` becomes `new`."""

    def edit(ptx):
        match = list(re.finditer(old, ptx))[which]
        return ptx[: match.start()] + match.expand(new) + ptx[match.end() :]

    return edit


BOUND = r"(setp\.lt\.u32\s+%p\d+, %r\d+), {};"
BARRIER = r"\bbar\.sync\s+{};"
CAPACITY, PAGES = BLOCKS.capacity, len(BLOCKS.make_inputs(seed=0)["index_pool"])
BROKEN = {  # what is wrong: (kernel's options, edit of the PTX, order, what the run stops with)
    "one bit of eight codes": (GATHER, replace("0x77777777", "0x37777777"), "together", None),
    "the sign of a channel": (SHARE, replace("0xD9C8", "0xD9C9"), "together", None),
    "positions outside the table are read": (GATHER, replace(BOUND.format(CAPACITY), r"\1, -1;"), "together", "global"),
    "pages outside the pool are read": (GATHER, replace(BOUND.format(PAGES), r"\1, -1;"), "together", "global"),
    "no barrier behind the queries": (GATHER, replace(BARRIER.format("0"), ""), "ascending", None),
    "no barrier behind the lists": (SHARE, replace(BARRIER.format("15, 256"), "", 1), "descending", "shared|deadlock"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_seen(name):
    options, edit, order, error = BROKEN[name]
    inputs = BLOCKS.make_inputs(seed=45)
    inputs["table"][0, 1] = 10**6
    inputs["block_ids"][0, -8:] = 2**20
    want = blocks_reference()(**inputs)
    with emulated(order):
        check_scores(run_blocks(inputs, **options), want)
    with emulated(order, edit):
        if error:
            with pytest.raises(PtxError, match=error):
                run_blocks(inputs, **options)
            return
        got = run_blocks(inputs, **options)
    with pytest.raises(AssertionError):
        check_scores(got, want)


def test_a_missing_arrival_is_a_deadlock():
    spec = dataclasses.replace(ATTENTION, batch=1, selected=0, context=20)
    edit = replace(r"@%p\d+ mbarrier\.arrive[^;]*;", "", -1)
    with emulated(edit=edit), pytest.raises(PtxError, match=r"deadlock: warp \d+ of program 0 at line \d+"):
        attention_hopper.sparse_attention(**spec.make_inputs(seed=46), **spec.options)


@pytest.mark.parametrize("instruction", ["brev.b32 %r1, %r2", "add.sat.s32 %r1, %r2, %r3", "ld.global.s8 %r1, [%rd1]"])
def test_an_unknown_instruction_is_refused_with_its_line(instruction):
    edited = []

    def edit(ptx):
        edited.append(replace(r"\bret;", instruction + "; ret;")(ptx))
        return edited[0]

    with emulated(edit=edit), pytest.raises(PtxError) as error:
        run_blocks(BLOCKS.make_inputs(seed=47), **GATHER)
    line = 1 + edited[0][: edited[0].index(instruction)].count("\n")
    assert str(error.value) == f"line {line}: '{instruction}' is no instruction that the emulator knows"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 bra out; out:", "@%p1 bra out: lanes of a warp part ways"),
        ("st.shared.b32 [global_smem+1000000], 1;", "4 bytes at shared address 0xf4240 lie outside what"),
        (
            "ld.param.b64 %rd1, [blocks_param_0]; st.global.b32 [%rd1], 1;",
            "4 bytes at global address 0x10000000000 lie",
        ),
        ("ld.param.b64 %rd1, [blocks_param_0]; ld.global.b32 %r1, [%rd1+2];", "or are misaligned"),
        ("mov.u32 %r1, %laneid;", "%laneid is no special register"),
        ("bar.sync 1, 64;", "deadlock"),
    ],
)
def test_a_program_that_goes_astray_is_stopped(code, message):
    with emulated(edit=replace(r"griddepcontrol\.wait;", code)), pytest.raises(PtxError, match=re.escape(message)):
        run_blocks(BLOCKS.make_inputs(seed=47), **GATHER)


def test_a_program_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(ptx_emulator, "MOST_BLOCKS", 100)
    edit = replace(r"griddepcontrol\.wait;", "again: bra again;")
    with emulated(edit=edit), pytest.raises(PtxError, match=r"no end after 100 basic blocks, at line \d+"):
        run_blocks(BLOCKS.make_inputs(seed=47), **GATHER)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order expected one of"), emulated("backwards"):
        pass
