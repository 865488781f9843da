"""Engram tables on the host, over four CPU devices: pytest functions that tests/test_sharding.py runs in a process of their
own."""

import dataclasses

import jax
import numpy as np
import pytest
from test_engram_host import CONFIG, assert_equal

from dsv41_jax import checkpoint, engram_host
from dsv41_jax.cache import CacheGeometry, PageTables
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.model import Network
from dsv41_jax.params import flat_paths
from dsv41_jax.precision import RELEASED
from dsv41_jax.sampling import pack_sampling
from dsv41_jax.step import DecodeBatch
from sharding.load import load_sharded
from sharding.mesh import make_mesh
from sharding.rules import init_sharded_state
from sharding.step import ShardedSteps, stack_ranks

R = 4


def test_steps_over_a_mesh_read_the_same_rows(tmp_path):
    """Tables split over four devices and tables on the host: the same outputs and caches in every bit, before and after a
    reload; every rank has other tokens, one has none."""
    folders = [make_checkpoint(CONFIG, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    mesh = make_mesh(R)
    net = Network(CONFIG, CacheGeometry(slots=2, pages=5, page_tokens=16, span=9), RELEASED)
    load = lambda folder, place: load_sharded(folder, mesh, engram=place, progress=False)
    params = {place: load(folders[0], place) for place in ("device", "host")}
    steps = {place: ShardedSteps(net, p, mesh, gamma=0) for place, p in params.items()}
    assert not any(".engram.table" in path for path in flat_paths(params["host"]))

    slots = lambda rank: np.array([-1, -1] if rank == 2 else [1, 0], np.int32)
    table = PageTables.shared(np.array([[1, 2], [3, 4]], np.int32), CONFIG)
    batch = stack_ranks([DecodeBatch(slots(r), table, pack_sampling([None] * 2, [0] * 2, CONFIG.eos_token_id)) for r in range(R)])

    def run(place):
        state = init_sharded_state(CONFIG, net.geometry, RELEASED, mesh)
        anchors = np.random.default_rng(3).integers(3, 500, 2 * R).astype(np.int32)
        state = dataclasses.replace(state, anchor=jax.device_put(anchors, state.anchor.sharding))
        outs = []
        for _ in range(5):
            state, out = steps[place].decode(state, batch)
            outs.append(out)
        return outs, state

    before = run("device")
    assert_equal(before, run("host"))
    assert np.asarray(before[0][-1].count).tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
    for place, each in steps.items():
        each.reload(load(folders[1], place))
    after = run("device")
    assert_equal(after, run("host"))
    assert np.asarray(after[0][-1].tokens).tolist() != np.asarray(before[0][-1].tokens).tolist()
    with pytest.raises(ValueError, match="expected engram tables on the host, got them on the device"):
        steps["host"].reload(params["device"])
    with pytest.raises(ValueError, match=r"params: draft.confidence expected P\(\) over"):
        ShardedSteps(net, checkpoint.load(folders[0], engram="host", progress=False), mesh, gamma=0)
    engram_host.close(params["host"])  # the first weights'; the second are still open
    assert_equal(after, run("host"))
