"""The experts' plan: definition, interpreted and emulated kernel against a loop over slots, every element."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_plan import Plan, counting_sort, expert_plan, explain, reference
from pallas_kernels.expert_plan.specs import BY_NAME, SPECS, ExpertPlanSpec
from tests import deviceless

SMALL = [s for s in SPECS if s.name.startswith("tiny")]
RUNS = ("reference", "counting_sort")
FIELDS = [f.name for f in dataclasses.fields(Plan)]


def numpy_plan(ids, weights, first, *, local, tile_rows):
    """{field: array}: experts one after the other, slots in order."""
    (t, k), slots = ids.shape, ids.size
    size = -(-(slots + 3 * min(local, slots)) // 8) * 8 + tile_rows
    token, weight, row, tiles = np.zeros(size, np.int32), np.zeros(size, np.float32), 0, []
    found = [[] for _ in range(t)]
    for expert in range(local):
        mine = np.flatnonzero(ids.ravel() == first + expert)
        for i, slot in enumerate(mine):
            token[row + i], weight[row + i] = slot // k, weights.ravel()[slot]
            found[slot // k].append(row + i)
        tiles += [(expert, row + i, min(tile_rows, len(mine) - i)) for i in range(0, len(mine), tile_rows)]
        row += -(-len(mine) // 4) * 4
    table = np.zeros((4, min(slots, local + slots // tile_rows)), np.int32)
    table[:3, : len(tiles)] = np.array(tiles, np.int32).reshape(-1, 3).T
    table[3] = len(tiles)
    position = np.array([rows + [row] * (k - len(rows)) for rows in found], np.int32)
    return dict(position=position, count=np.int32(row), token=token, weight=weight, tiles=table)


def check(got, want):
    for name in FIELDS:
        a = np.asarray(getattr(got, name))
        assert a.dtype == want[name].dtype
        np.testing.assert_array_equal(a, want[name], err_msg=name)


# one program for all routings of a shape
definition = functools.partial(jax.jit, static_argnames=("local", "tile_rows"))(reference.expert_plan)


def check_a_loop_over_slots(spec, ids, weights, first, run):
    want = numpy_plan(np.asarray(ids), np.asarray(weights), int(first), **spec.options)
    plan = counting_sort.emulated if run == "counting_sort" else definition
    check(plan(ids, weights, first, **spec.options), want)


@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("run", RUNS)
def test_equals_a_loop_over_slots(spec, run):
    check_a_loop_over_slots(spec, *spec.make_inputs(3), run)


@pytest.mark.parametrize("run", RUNS)
def test_takes_any_foreign_id(run):
    spec = BY_NAME["tiny_foreign"]
    ids, weights, first = spec.make_inputs(4)
    ids = ids.at[0].set(jnp.array([-1, 9, -(2**31)])).at[1].set(2**31 - 1).at[2, 0].set(14)
    check_a_loop_over_slots(spec, ids, weights, first, run)


@pytest.mark.parametrize("run", RUNS)
def test_repeated_ids_keep_the_order_of_the_slots(run):
    spec = BY_NAME["tiny_foreign"]
    ids, weights, first = spec.make_inputs(6)
    check_a_loop_over_slots(spec, ids.at[3].set(10).at[4].set(jnp.array([12, 2, 12])), weights, first, run)


@pytest.mark.parametrize(
    "spec",
    [
        BY_NAME["verify"],
        ExpertPlanSpec("several_experts_a_block", 777, 6, 300, 24, total=310, first=4),
        ExpertPlanSpec("most_experts_and_slots", 8192, 4, 512, 64, total=530, first=7),
        ExpertPlanSpec("more_tiles_than_threads", 1200, 1, 3, 2, "one"),
    ],
    ids=lambda s: s.name,
)
def test_counting_sort_at_sizes_of_use_and_limits(spec):
    check_a_loop_over_slots(spec, *spec.make_inputs(7), "counting_sort")


def test_sort_and_pairwise_ranks_agree(monkeypatch):
    key = jnp.asarray(np.random.default_rng(0).integers(0, 9, 500), jnp.int32)
    pairwise = reference._ranks(key)
    monkeypatch.setattr(reference, "_PAIRWISE", 10)
    np.testing.assert_array_equal(np.asarray(reference._ranks(key)), np.asarray(pairwise))


def test_falls_back_with_a_reason():
    ids, weights, first = BY_NAME["tiny"].make_inputs(0)
    told = explain(ids, weights, first, local=12, tile_rows=8, arch="sm_90")
    assert told["chosen"] == "counting_sort"
    told = explain(ids, weights, first, local=12, tile_rows=8, arch="cpu")
    assert told["chosen"] == "reference" and "is for sm_90" in told["counting_sort"]
    told = explain(ids, weights, first, local=513, tile_rows=8, arch="sm_90")
    assert told["chosen"] == "reference" and "at most 512" in told["counting_sort"]
    many = jax.ShapeDtypeStruct((5000, 8), jnp.int32), jax.ShapeDtypeStruct((5000, 8), jnp.float32), 0
    told = explain(*many, local=96, tile_rows=8, arch="sm_90")
    assert told["chosen"] == "reference" and "40000 slots" in told["counting_sort"]
    with pytest.raises(ValueError, match=r"ids and weights \[T, K\]"):
        expert_plan(ids, weights[:-1], first, local=12, tile_rows=8)
    with pytest.raises(ValueError, match="a scalar first_expert"):
        expert_plan(ids, weights, jnp.zeros(2, jnp.int32), local=12, tile_rows=8)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_to_one_kernel_without_spills(target):
    names = ("verify", "verify_2_ranks", "verify_4_ranks")
    for compiled in deviceless.compile_all(target, "pallas_kernels.expert_plan.specs:deviceless_case", names).values():
        (kernel,) = compiled.kernels
        assert "expert_plan" in kernel.name and kernel.spill_bytes == 0 and kernel.registers <= 64
        assert "red.shared.add" in compiled.ptx and "griddepcontrol.wait" in compiled.ptx
        assert "ld.global.nc" not in compiled.ptx  # ptxas would move such loads over the wait


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    want = expert_plan(*inputs, **spec.options, impl="reference")
    check(expert_plan(*inputs, **spec.options, impl="counting_sort"), {f: np.asarray(getattr(want, f)) for f in FIELDS})
