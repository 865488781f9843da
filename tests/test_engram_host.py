# ruff: noqa: F401, F811 (fixtures are imported by name)
"""Engram tables in the files of the checkpoint: steps, caches and text are bit for bit those of tables on the device."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest
from cli_harness import run

from dsv41_jax import checkpoint, engram, engram_host
from dsv41_jax.cache import CacheGeometry
from dsv41_jax.generate import GenerationResult
from dsv41_jax.inspect import rank_weights, report
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.model import Network
from dsv41_jax.params import flat_paths
from dsv41_jax.precision import RELEASED
from dsv41_jax.presets import FLASH, TINY
from dsv41_jax.step import Steps

CONFIG = dataclasses.replace(
    TINY, num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=(0, 1, 0), kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,), candidate_source_layer_id=1, candidate_topk_blocks=4, index_topk=8, engram_layer_ids=(0, 1),
    dspark_target_layer_ids=(0, 1), dspark_block_size=2, n_routed_experts=4, num_experts_per_tok=2, dspark_n_routed_experts=4,
    hc_sinkhorn_iters=2, max_position_embeddings=64,
)  # fmt: skip
FAILED = (jax.errors.JaxRuntimeError, ValueError)  # what a step raises depends on whether it was waited for


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one geometry in several files each."""
    out = tmp_path_factory.mktemp("engram_host")
    made = [make_checkpoint(CONFIG, out / str(seed), seed=seed, shard_bytes=200_000) for seed in (1, 2)]
    assert all(len(list(folder.glob("*.safetensors"))) > 2 for folder in made)
    return made


@pytest.fixture(scope="module")
def pair(folders):
    """{place: Steps}, both with the weights of the first folder."""
    net = Network(CONFIG, CacheGeometry(slots=2, pages=9, page_tokens=16, span=9), RELEASED)
    load = lambda place: checkpoint.load(folders[0], engram=place, progress=False)
    return {place: Steps(net, load(place)) for place in ("device", "host")}


def assert_equal(a, b):
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        np.testing.assert_array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8), err_msg=str(path))


def run_steps(steps, count: int):
    """([StepOutput, ...], state) of `count` speculative steps of two requests and a padding row, each from one token on."""
    batch = harness.decode_batch([1, 0, -1], harness.page_tables([4, 4, 0], CONFIG, columns=4, pages=9))
    state, outs = dataclasses.replace(harness.blank_state(steps), anchor=jnp.asarray([7, 300], jnp.int32)), []
    for _ in range(count):
        state, out = steps.decode(state, batch)
        outs.append(out)
    return outs, state


def test_steps_and_reloaded_steps_are_the_same(pair, folders):
    device, host = pair["device"], pair["host"]
    before = run_steps(device, 4)
    live = jax.tree.unflatten(host._treedef, host.leaves)
    new = {"device": checkpoint.load(folders[1], progress=False), "host": checkpoint.reload(live, folders[1], progress=False)}
    on_its_way = run_steps(host, 4)
    host.reload(new["host"])  # steps on their way read the tables of their own weights
    assert_equal(before, on_its_way)
    assert all(np.asarray(out.count)[2] == 0 and np.asarray(out.count)[:2].min() >= 1 for out in before[0])
    device.reload(new["device"])
    after = run_steps(device, 4)
    assert_equal(after, run_steps(host, 4))
    assert np.asarray(after[0][3].tokens).tolist() != np.asarray(before[0][3].tokens).tolist()
    assert host._mtp._cache_size() == 1
    with pytest.raises(ValueError, match="expected engram tables on the host, got them on the device"):
        host.reload(new["device"])
    engram_host.close(live)
    engram_host.close(live)  # closed already
    assert_equal(after, run_steps(host, 4))  # those of the new weights are open
    engram_host.close(new["host"])
    with pytest.raises(FAILED, match="was closed or never opened"):
        jax.block_until_ready(run_steps(host, 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_those_of_the_device_and_zeros_outside(folders, dtype):
    on_device = flat_paths(checkpoint.load(folders[0], progress=False))
    number = checkpoint.load(folders[0], engram="host", progress=False).engram_host[...]
    rng, rows = np.random.default_rng(0), []
    for count in CONFIG.engram_num_embeddings:
        rows.append(rng.integers(0, count, (1 << 14, 5)).astype(np.int32))  # as many as a long chunk of a prompt has
        rows[-1][0], rows[-1][-1] = (0, count - 1, -1, count, -(2**31)), 2**31 - 1
    got = jax.jit(lambda n, r: [engram_host.values(x, dtype) for x in engram_host.fetch(n, r, CONFIG)])(number, rows)
    for layer, (at, x) in enumerate(zip(rows, got, strict=True)):
        table, scale = (on_device[f"layers.{layer}.engram.{leaf}"] for leaf in ("table", "table_scale"))
        assert_equal(engram.lookup(table, scale, jnp.asarray(at), dtype), x)
        assert np.asarray(x, np.float32)[1:-1].any() and not np.asarray(x, np.float32)[-1].any()


def test_parameters_hold_everything_but_the_tables(folders):
    whole = flat_paths(checkpoint.load(folders[0], progress=False))
    held = flat_paths(checkpoint.load(folders[0], engram="host", progress=False))
    tables = {f"layers.{i}.engram.{leaf}" for i in (0, 1) for leaf in ("table", "table_scale")}
    assert set(held) - set(whole) == {"engram_host"} and set(whole) - set(held) == tables
    assert_equal([whole[path] for path in held if path != "engram_host"], [held[p] for p in held if p != "engram_host"])


def test_what_does_not_belong_together_is_refused(folders, tmp_path):
    params = checkpoint.load(folders[0], engram="host", progress=False)
    with pytest.raises(ValueError, match=r"engram: expected one of \('device', 'host'\), got 'disk'"):
        checkpoint.load(folders[0], engram="disk")
    other = dataclasses.replace(CONFIG, engram_num_embeddings=(1172, 1300))
    rows = [jnp.zeros((3, 4), jnp.int32)] * 2
    with pytest.raises(FAILED, match=r"expected \(\(1172, 32\), \(1300, 32\)\), number \d+ has .*1392"):
        jax.block_until_ready(jax.jit(lambda n: engram_host.fetch(n, rows, other))(params.engram_host[...]))
    engram_host.close(checkpoint.load(folders[0], progress=False))  # has none
    none = dataclasses.replace(CONFIG, engram_layer_ids=(), engram_num_embeddings=())
    folder = make_checkpoint(none, tmp_path / "none")
    assert checkpoint.load(folder, engram="host", progress=False).engram_place == "device"


@pytest.fixture
def commands(pair, monkeypatch):
    """Replaces what the commands call by the steps above over the parameters that they loaded: nothing compiles again.
    Returns the places of those parameters' tables."""
    seen = []

    def tokens(params):
        seen.append(params.engram_place)
        outs, _ = run_steps(Steps(pair["device"].net, params), 4)
        return np.concatenate([np.asarray(out.tokens)[1, : out.count[1]] for out in outs])

    def engine(params, *rest, **more):
        raise ValueError(f"engine: tables on the {params.engram_place}")

    result = lambda params: [GenerationResult(tokens(params).tolist(), "length")]
    monkeypatch.setattr("dsv41_jax.generate.generate", lambda params, *rest, **more: result(params))
    monkeypatch.setattr("dsv41_jax.score.score", lambda params, *rest, **more: {"tokens": tokens(params)})
    monkeypatch.setattr("dsv41_jax.engine.Engine", engine)
    return seen


def test_text_at_the_command_line(run, folders, tmp_path, commands):
    np.save(tmp_path / "ids.npy", np.ones((1, 4), np.int32))
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [5, 6]}')
    texts, arrays = [], []
    for place in ("device", "host"):
        rest = ["--checkpoint", folders[0], "--no-progress", "--engram", place]
        code, text, err = run("generate", *rest, "--prompt-ids", "5,6", "--json")
        assert code == 0, err
        texts.append(text)
        code, _, err = run("score", *rest, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz")
        assert code == 0, err
        arrays.append(np.load(tmp_path / "out.npz")["tokens"])
        code, _, err = run("generate", *rest, "--prompts", tmp_path / "in.jsonl", "--out", tmp_path / f"{place}.jsonl")
        assert code == 2 and f"engine: tables on the {place}" in err
    assert commands == ["device", "device", "host", "host"]
    assert texts[0] == texts[1] and len(json.loads(texts[0])["token_ids"]) >= 4
    assert arrays[0].tolist() == arrays[1].tolist() == json.loads(texts[0])["token_ids"]


def test_inspect_counts_what_stays_on_the_host(run, folders):
    on_device, on_host = (report(FLASH, batch=64, context=32768, ranks=4, engram=place) for place in ("device", "host"))
    assert on_device["host"] == {} and on_host["host"] == {"engram tables": (384006168 + 384016682) * 264}
    assert on_host["rank_weights"]["engram tables"] == 0
    saved = rank_weights(FLASH, 4)["engram tables"] - 4  # the number of the tables
    assert on_device["gpu_total"] - on_host["gpu_total"] == saved > 50e9
    code, out, _ = run("inspect", "--checkpoint", folders[0], "--engram", "host")
    assert code == 0 and f"in the host's page cache: engram tables │ {(1172 + 1392) * 33:,}" in " ".join(out.split())
