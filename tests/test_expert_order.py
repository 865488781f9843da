"""Routed experts in the order of the Hopper kernel: what load, reload and a mesh's parts hold."""

import dataclasses

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax import expert_order
from dsv41_jax.checkpoint import load, load_ranks, reload
from dsv41_jax.params import flat_paths
from dsv41_jax.presets import TINY
from pallas_kernels.experts import layout
from sharding.rules import is_split

# the smallest sizes that the kernel's order is for
WIDE = dataclasses.replace(
    TINY, hidden_size=256, moe_intermediate_size=256, n_routed_experts=4, num_hidden_layers=3, compress_ratios=(0, 2, 1, 0),
    kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2), candidate_source_layer_id=2, engram_layer_ids=(),
    engram_num_embeddings=(), num_nextn_predict_layers=1, dspark_target_layer_ids=(1, 2), dspark_n_routed_experts=4,
)  # fmt: skip
NAMES = ("w13", "s13", "w2", "s2")


@pytest.fixture
def folders():
    return harness.checkpoint_pair(WIDE)


def assert_same_experts(shuffled: dict, plain: dict):
    """Every expert of `shuffled` is the kernel's order of what `plain` has; everything else is equal."""
    stems = expert_order.stems(plain)
    assert len(stems) == 4 and expert_order.shuffled_stems(shuffled) == set(stems)
    for stem in stems:
        back = layout.unshuffle_weights(*(shuffled[f"{stem}.{n}"] for n in NAMES))
        for name, got in zip(NAMES, back, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(plain[f"{stem}.{name}"]))
    for path in plain:
        if path.rpartition(".")[0] not in stems:
            assert np.asarray(shuffled[path]).tobytes() == np.asarray(plain[path]).tobytes()


def test_load_shuffles_on_request_and_loses_nothing(folders):
    plain = load(folders[0], progress=False)
    shuffled = load(folders[0], expert_order="shuffled", progress=False)
    assert not expert_order.shuffled_stems(flat_paths(plain))  # auto, on a CPU
    assert_same_experts(flat_paths(shuffled), flat_paths(plain))


def test_reload_keeps_the_live_order(folders):
    live = load(folders[0], expert_order="shuffled", progress=False)
    new = reload(live, folders[1], progress=False)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(new)] == [(x.shape, x.dtype) for x in jax.tree.leaves(live)]
    assert_same_experts(flat_paths(new), flat_paths(load(folders[1], progress=False)))


def test_ranks_hold_their_own_experts_shuffled(folders):
    device = jax.devices()[0]
    plain = load_ranks(folders[0], devices=[device] * 2, split=is_split, progress=False)[1]
    shuffled = load_ranks(folders[0], devices=[device] * 2, split=is_split, expert_order="shuffled", progress=False)[1]
    for a, b in zip(shuffled, plain, strict=True):
        assert_same_experts(a, b)


def spread(octaves: int) -> dict:
    """One layer's experts, the scales of one row of s2 `octaves` apart."""
    stem = "layers.0.ffn.experts"
    scale = jnp.full((2, 256, 8), 120, jnp.uint8).at[1, 7, 2].add(octaves)
    zeros = lambda rows: jnp.zeros((2, rows, 128), jnp.uint8)
    arrays = zeros(512), jnp.full((2, 512, 8), 120, jnp.uint8), zeros(256), scale
    return {f"{stem}.{n}": a for n, a in zip(NAMES, arrays, strict=True)}


def test_scales_beyond_the_table_stay_in_the_checkpoints_order_on_every_rank():
    fitting = spread(layout.LEVELS - 1)
    assert expert_order.shuffle([fitting]) == [] and layout.is_shuffled(fitting["layers.0.ffn.experts.w13"])
    ranks = [spread(0), spread(layout.LEVELS)]
    assert expert_order.shuffle(ranks) == ["layers.0.ffn.experts"]
    assert not any(expert_order.shuffled_stems(arrays) for arrays in ranks)
    with pytest.warns(UserWarning, match=r"octaves in layers.0.ffn.experts: .* slower"):
        expert_order.warn_of(["layers.0.ffn.experts"])


def test_orders_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="expert_order: expected one of"):
        expert_order.wanted("hopper", WIDE, None)
    with pytest.raises(ValueError, match="multiple of 256"):
        expert_order.wanted("shuffled", TINY, None)
    assert not expert_order.wanted("auto", WIDE, jax.devices()[0])


def test_placeholders_take_the_held_order():
    stem = "layers.0.ffn.experts"
    plain = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in spread(0).items()}
    held = spread(0)
    assert expert_order.as_held(plain, held) == plain
    expert_order.shuffle([held])
    got = expert_order.as_held(plain, held)
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {k: (v.shape, v.dtype) for k, v in held.items()}
    assert got[f"{stem}.w13"].shape == (2, 8, 2, 8, 128)
