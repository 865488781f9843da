"""Loading: golden weights bit for bit, shards, ranks, blocks, every kind of broken folder, reload without compiling."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import CHECKPOINT

from dsv41_jax import checkpoint
from dsv41_jax.checkpoint import TOKEN_MAP, CheckpointError, load, reload
from dsv41_jax.checkpoint_listing import INDEX, SINGLE
from dsv41_jax.config import ModelConfig
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.presets import TINY
from dsv41_jax.safetensors_io import MappedFile, Writer
from dsv41_jax.schedule import ConfigError
from dsv41_jax.tensors import released_tensors


def bits(array) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same(a, b):
    for (name, x), y in zip(flat_paths(a).items(), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        np.testing.assert_array_equal(bits(x), bits(y), err_msg=name)


def read_tensors(folder) -> dict[str, tuple[str, np.ndarray]]:
    with MappedFile(folder / SINGLE) as f:
        return {name: (entry.dtype, f.view(name).copy()) for name, entry in f.entries.items()}


def write_tensors(path, tensors: dict[str, tuple[str, np.ndarray]]):
    path.unlink(missing_ok=True)
    with Writer(path, {name: (dtype, a.shape) for name, (dtype, a) in tensors.items()}) as w:
        for name, (_, a) in tensors.items():
            w.write(name, a)


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_file(CHECKPOINT)


@pytest.fixture(scope="module")
def golden():
    return load(CHECKPOINT, progress=False)


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden checkpoint that may be broken."""
    for name in ("config.json", SINGLE, TOKEN_MAP):
        shutil.copyfile(CHECKPOINT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def no_allocation(monkeypatch):
    """Fails the test if the loader touches a device."""

    def refuse(*a, **k):
        raise AssertionError("a device allocation before the checkpoint was known to be whole")

    monkeypatch.setattr(checkpoint.jax, "device_put", refuse)
    monkeypatch.setattr(checkpoint.jnp, "zeros", refuse)


def test_golden_weights_arrive_bit_for_bit(config, golden):
    raw = read_tensors(CHECKPOINT)
    leaves = flat_paths(golden)
    sources = released_tensors(config)
    assert set(leaves) == set(sources) | {"token_map"}
    for path, source in sources.items():
        if source.per_expert:
            want = np.concatenate([bits(raw[t.name][1]) for parts in source.parts for t in parts])
        else:
            want = np.concatenate([bits(raw[t.name][1]) for t in source.parts])
        np.testing.assert_array_equal(bits(leaves[path]), want, err_msg=path)
    np.testing.assert_array_equal(golden.token_map[...], np.load(CHECKPOINT / TOKEN_MAP))


def test_merged_parameters_hold_their_parts_in_order(golden):
    raw = read_tensors(CHECKPOINT)
    attn, ffn = golden.layers[2].attn, golden.layers[2].ffn
    got = attn.qb.weight[...]
    np.testing.assert_array_equal(bits(got[:512]), bits(raw["layers.2.attn.indexer.wq_b.weight"][1]))
    np.testing.assert_array_equal(bits(got[512:]), bits(raw["layers.2.attn.wq_b.weight"][1]))
    np.testing.assert_array_equal(bits(attn.front.scale[...][2:]), bits(raw["layers.2.attn.wkv.scale"][1]))
    np.testing.assert_array_equal(bits(ffn.experts.w13[...][7, 64:]), bits(raw["layers.2.ffn.experts.7.w3.weight"][1]))


def test_types_and_shapes_are_the_placeholders(config, golden):
    for (path, want), got in zip(flat_paths(Transformer(config)).items(), jax.tree.leaves(golden), strict=True):
        assert isinstance(got, jax.Array) and (got.shape, got.dtype) == (want.shape, want.dtype), path


def test_large_parameters_are_filled_in_blocks_of_bounded_size(golden, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 8192)
    sizes = []
    rows = checkpoint._Reader.rows

    def spy(self, source, leaf, low, high):
        block = rows(self, source, leaf, low, high)
        sizes.append((block.nbytes, high - low))
        return block

    monkeypatch.setattr(checkpoint._Reader, "rows", spy)
    assert_same(load(CHECKPOINT, progress=False), golden)
    assert len(sizes) > 400
    assert all(nbytes <= 8192 or rows == 1 for nbytes, rows in sizes)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_hold_their_experts_and_engram_rows(golden, ranks):
    parts = [flat_paths(load(CHECKPOINT, ranks=ranks, rank=r, progress=False)) for r in range(ranks)]
    for path, whole in flat_paths(golden).items():
        whole = np.asarray(whole)
        pieces = [np.asarray(p[path]) for p in parts]
        if ".experts." in path:
            assert pieces[0].shape[0] * ranks == whole.shape[0]
            np.testing.assert_array_equal(bits(np.concatenate(pieces)), bits(whole), err_msg=path)
        elif ".engram.table" in path:
            joined = np.concatenate(pieces)
            assert pieces[0].shape[0] == -(-whole.shape[0] // ranks)
            np.testing.assert_array_equal(bits(joined[: len(whole)]), bits(whole), err_msg=path)
            assert not bits(joined[len(whole) :]).any()
        else:
            for piece in pieces:
                np.testing.assert_array_equal(bits(piece), bits(whole), err_msg=path)


def test_a_rank_reads_nothing_of_the_others(monkeypatch):
    seen = set()
    view = MappedFile.view
    monkeypatch.setattr(MappedFile, "view", lambda self, name: (seen.add(name), view(self, name))[1])
    load(CHECKPOINT, ranks=2, rank=1, progress=False)
    experts = {int(n.split(".experts.")[1].split(".")[0]) for n in seen if n.startswith("layers.") and ".experts." in n}
    assert experts == set(range(8, 16))
    assert not any(n.endswith("bias_vl") for n in seen)


@pytest.mark.parametrize(("ranks", "rank"), [(3, 0), (2, 2), (0, 0), (2, -1)])
def test_impossible_ranks_are_refused(ranks, rank, no_allocation):
    with pytest.raises(ValueError, match="rank"):
        load(CHECKPOINT, ranks=ranks, rank=rank)


def test_shards_are_found_through_the_index_whatever_they_hold(folder, golden):
    tensors = read_tensors(folder)
    (folder / SINGLE).unlink()
    names = sorted(tensors, key=lambda n: n[::-1])  # scatters every layer over the shards
    weight_map = {}
    for shard in range(3):
        part = {n: tensors[n] for n in names[shard::3]}
        write_tensors(folder / f"part-{shard}.safetensors", part)
        weight_map |= dict.fromkeys(part, f"part-{shard}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(load(folder, progress=False), golden)


def test_every_problem_is_in_one_error_before_any_allocation(folder, no_allocation):
    tensors = read_tensors(folder)
    del tensors["layers.3.attn.wq_a.weight"], tensors["mtp.1.ffn.experts.4.w2.scale"]
    tensors["norm.weight"] = ("BF16", np.zeros(64, "uint16").view(jnp.bfloat16))
    tensors["head.weight"] = ("F32", np.zeros((512, 128), np.float32))
    tensors["layers.9.surprise"] = ("F32", np.zeros(3, np.float32))
    tensors["vision.patch.weight"] = ("F32", np.zeros(3, np.float32))  # of the release, not of text decode
    write_tensors(folder / SINGLE, tensors)
    np.save(folder / TOKEN_MAP, np.zeros(512, np.int64))
    with pytest.raises(CheckpointError) as e:
        load(folder)
    assert len(e.value.problems) == 6
    text = str(e.value)
    for line in (
        "layers.3.attn.wq_a.weight: missing, expected F8_E4M3 [64, 128]",
        "mtp.1.ffn.experts.4.w2.scale: missing, expected F8_E8M0 [128, 2]",
        "norm.weight: expected BF16 [128], got BF16 [64] in model.safetensors",
        "head.weight: expected BF16 [512, 128], got F32 [512, 128]",
        "layers.9.surprise: unexpected in model.safetensors",
        "token map expected int32 [512], got int64 [512]",
    ):
        assert line in text
    assert "vision" not in text and "6 problems" in text


def test_a_scale_that_no_kernel_applies_exactly_is_refused(folder, no_allocation):
    tensors = read_tensors(folder)
    tensors["layers.3.attn.wq_a.scale"][1][1, 2] = 167
    write_tensors(folder / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=r"layers.3.attn.wq_a.scale: expected scale bytes up to 166, got 167"):
        load(folder)


@pytest.mark.parametrize("cut", [3, 5000, 2_000_000, -1])
def test_a_truncated_file_is_refused(folder, cut, no_allocation):
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=f"{SINGLE}: truncated"):
        load(folder)


def test_shard_problems_and_tensor_problems_come_together(folder, no_allocation):
    tensors = read_tensors(folder)
    (folder / SINGLE).unlink()
    names = list(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in halves.items():
        write_tensors(folder / shard, {n: tensors[n] for n in part})
    weight_map = {n: shard for shard, part in halves.items() for n in part} | {"extra": "gone.safetensors"}
    moved, unlisted = names[0], names[2]
    weight_map[moved] = "b.safetensors"
    del weight_map[unlisted]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as e:
        load(folder)
    text = str(e.value)
    assert "gone.safetensors: No such file" in text
    assert f"{moved}: the index says b.safetensors, it is in a.safetensors" in text
    assert f"{unlisted}: in a.safetensors but not in the index" in text
    assert len(e.value.problems) == 3


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors = read_tensors(folder)
    (folder / SINGLE).rename(folder / "a.safetensors")
    write_tensors(folder / "b.safetensors", {"norm.weight": tensors["norm.weight"]})
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"norm.weight": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="norm.weight: in a.safetensors and again in b.safetensors"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"x": "../elsewhere"}}', '{"weight_map": {"x": 3}}'])
def test_a_broken_index_is_refused(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX}: not an index"):
        load(folder)


def test_an_index_or_file_without_tensors_misses_them_all(folder, no_allocation):
    write_tensors(folder / SINGLE, {})
    with pytest.raises(CheckpointError, match="norm.weight: missing"):
        load(folder)
    (folder / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="norm.weight: missing"):
        load(folder)


def test_another_vocabulary_is_refused_without_a_map_of_its_size(folder, no_allocation):
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["vocab_size"] = 10**14  # a map of it would take 400 TB
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / TOKEN_MAP).unlink()
    with pytest.raises(CheckpointError, match=r"embed.weight: expected BF16 \[100000000000000, 128\], got BF16 \[512, 128\]"):
        load(folder)


@pytest.mark.parametrize("kind", ["archive", "half an archive"])
def test_a_token_map_that_is_no_array(folder, kind, no_allocation):
    with (folder / TOKEN_MAP).open("wb") as f:
        if kind == "archive":
            np.savez(f, ids=np.zeros(512, np.int32))
        else:
            f.write(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=f"{TOKEN_MAP}: "):
        load(folder)


def test_folders_that_hold_no_checkpoint(tmp_path, config):
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "nowhere", config)
    with pytest.raises(CheckpointError, match="no config.json"):
        load(tmp_path)
    shutil.copyfile(CHECKPOINT / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError) as e:
        load(tmp_path)
    assert "neither model.safetensors nor" in str(e.value) and "engram needs one of them" in str(e.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.arange(512, dtype=np.int32), r"expected ids 0..255, got 0..511"),
        (np.arange(512, dtype=np.int32) - 1, r"expected ids 0..255, got -1..510"),
        (np.arange(512, dtype=np.int32) % 255, "expected 256 distinct ids .*, got 255"),
        (np.arange(511, dtype=np.int32) // 2, r"got int32 \[511\]"),
    ],
)
def test_token_maps_are_checked(folder, ids, message):
    np.save(folder / TOKEN_MAP, ids)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_the_token_map_of_a_folder_with_a_tokenizer_is_derived(tmp_path):
    path = make_checkpoint(TINY, tmp_path / "tiny")
    assert not (path / TOKEN_MAP).exists()
    ids = np.asarray(load(path, progress=False).token_map[...])
    assert ids.shape == (512,) and len(np.unique(ids)) == TINY.engram_compressed_vocab_size
    assert ids[3 + ord("a") - ord("!")] == ids[3 + ord("A") - ord("!")]  # a and A, after the three special tokens


def test_table_sizes_that_the_hash_cannot_address_are_refused(folder, no_allocation):
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["engram_num_embeddings"] = [433, 606]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="engram_num_embeddings"):
        load(folder)


# reload ---------------------------------------------------------------------------------------------------------------


@jax.jit
def _probe(params):
    """A number that every part of the parameters takes part in."""
    return sum(jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.float32)) if x.dtype.itemsize == 1
               else jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(params))  # fmt: skip


@pytest.mark.parametrize("by_name", [False, True])
def test_reload_changes_the_weights_and_compiles_nothing(tmp_path, by_name):
    first = make_checkpoint(TINY, tmp_path / "first", seed=1)
    second = make_checkpoint(TINY, tmp_path / "second", seed=2)
    params = load(first, device=jax.devices()[0] if by_name else None, progress=False)
    before = float(_probe(params))
    compiled = _probe._cache_size()
    new = reload(params, second, progress=False)
    after = float(_probe(new))
    assert _probe._cache_size() == compiled
    assert before != after
    assert after == float(_probe(load(second, progress=False)))
    assert float(_probe(params)) == before
    assert jax.tree.structure(new) == jax.tree.structure(params)


def test_a_partial_reload_is_refused_whole(folder, golden, no_allocation):
    tensors = read_tensors(folder)
    del tensors["layers.7.ffn.experts.15.w2.weight"]
    tensors["embed.weight"] = ("BF16", np.zeros((512, 128), jnp.bfloat16))
    write_tensors(folder / SINGLE, tensors)
    before = [np.asarray(x).copy() for x in jax.tree.leaves(golden)]
    with pytest.raises(CheckpointError, match="1 problem:"):
        reload(golden, folder)
    for old, now in zip(before, jax.tree.leaves(golden), strict=True):
        np.testing.assert_array_equal(bits(old), bits(now))


def test_reload_of_another_geometry_is_refused(tmp_path, golden):
    other = make_checkpoint(TINY, tmp_path / "tiny")
    with pytest.raises(CheckpointError) as e:
        reload(golden, other, progress=False)
    assert any(p.startswith("layers.1.engram.table: live float8_e4m3fn[434, 32], checkpoint") for p in e.value.problems)


def test_reload_of_one_rank_keeps_to_its_slice(golden):
    live = load(CHECKPOINT, ranks=2, rank=1, progress=False)
    assert_same(reload(live, CHECKPOINT, ranks=2, rank=1, progress=False), live)
    with pytest.raises(CheckpointError, match="experts.w13: live"):
        reload(live, CHECKPOINT, progress=False)


def test_the_progress_bar_goes_to_stderr(capsys):
    load(CHECKPOINT)
    captured = capsys.readouterr()
    assert "loading weights" in captured.err and captured.out == ""
