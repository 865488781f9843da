"""Random checkpoints: complete, repeatable, of sensible size, and never half-written."""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import make_checkpoint as module
from dsv41_jax.checkpoint import TOKEN_MAP, load
from dsv41_jax.checkpoint_listing import INDEX, SINGLE
from dsv41_jax.config import ModelConfig
from dsv41_jax.make_checkpoint import checkpoint_tensors, make_checkpoint
from dsv41_jax.params import flat_paths
from dsv41_jax.presets import FLASH, TINY
from dsv41_jax.safetensors_io import MappedFile, read_header, tensor_bytes
from dsv41_jax.schedule import ConfigError
from dsv41_jax.tokenizer import Tokenizer
from pallas_kernels import codecs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(TINY, tmp_path_factory.mktemp("made") / "tiny", seed=5)


def test_the_folder_is_complete(tiny):
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(os.listdir(tiny)) == names
    assert ModelConfig.from_file(tiny) == TINY
    assert json.loads((tiny / "generation_config.json").read_text())["eos_token_id"] == TINY.eos_token_id
    assert Tokenizer.from_folder(tiny).encode("hello")[0] == TINY.bos_token_id


def test_the_file_holds_the_released_tensors_and_bias_vl(tiny):
    entries = read_header(tiny / SINGLE)
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {
        t.name: (t.dtype, t.shape) for t in checkpoint_tensors(TINY)
    }
    assert entries["layers.0.ffn.gate.bias_vl"].shape == (16,) and entries["mtp.2.ffn.gate.bias_vl"].shape == (8,)


def test_the_release_would_have_the_published_number_of_tensors():
    tensors = checkpoint_tensors(FLASH)
    assert len(tensors) == 93_415 + 2_401 + 3
    total = sum(tensor_bytes(t.dtype, t.shape) for t in tensors)
    assert 0.99 * 510_286_023_000 < total < 510_286_023_000  # the rest is vision


def test_a_seed_gives_the_same_bytes_and_another_gives_others(tiny, tmp_path):
    again = make_checkpoint(TINY, tmp_path / "again", seed=5)
    other = make_checkpoint(TINY, tmp_path / "other", seed=6)
    assert (again / SINGLE).read_bytes() == (tiny / SINGLE).read_bytes()
    with MappedFile(tiny / SINGLE) as a, MappedFile(other / SINGLE) as b:
        for name in ("embed.weight", "layers.3.ffn.experts.2.w1.weight", "mtp.0.main_proj.weight", "layers.4.hc_ffn_fn"):
            assert not np.array_equal(a.view(name), b.view(name)), name


def test_blocks_and_shards_change_no_value(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_VALUES", 1000)
    sharded = make_checkpoint(TINY, tmp_path / "sharded", seed=5, shard_bytes=1_000_000)
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    files = sorted(f for f in os.listdir(sharded) if f.endswith(".safetensors"))
    assert len(files) == 5 and files[0] == "model-00001-of-00005.safetensors" and set(weight_map.values()) == set(files)
    a, b = load(tiny, progress=False), load(sharded, progress=False)
    for (name, x), y in zip(flat_paths(a).items(), flat_paths(b).values(), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8), err_msg=name)


def test_magnitudes_keep_activations_near_one(tiny):
    params = load(tiny, progress=False)
    block = params.layers[2]
    for linear in (block.attn.front, block.attn.qb, block.attn.wo_b, block.ffn.shared_w13, params.draft.main_proj):
        w = codecs.dequantize_weight_fp8(linear.weight[...], linear.scale[...], jnp.float32)
        assert 0.6 < float(jnp.std(w)) * w.shape[1] ** 0.5 < 1.7
    w13 = codecs.dequantize_weight_mxfp4(block.ffn.experts.w13[...], block.ffn.experts.s13[...], jnp.float32)
    gain = np.asarray(jnp.std(w13, axis=(1, 2))) * TINY.hidden_size**0.5
    assert all((gain[e] > 5) == (e % 5 == 0) for e in range(16)), gain
    table = params.layers[1].engram
    rows = codecs.dequantize_fp8(table.table[...], table.table_scale[...])
    assert 0.6 < float(jnp.std(rows)) < 1.7
    assert len(np.unique(np.asarray(block.attn.front.scale[...]))) > 1  # a scale that is ignored must be seen


def test_bias_vl_is_far_off(tiny):
    with MappedFile(tiny / SINGLE) as f:
        assert f.view("layers.5.ffn.gate.bias_vl").mean() > 3 > abs(f.view("layers.5.ffn.gate.bias")).max()


def test_a_vocabulary_without_a_matching_tokenizer_gets_a_sidecar(tmp_path):
    config = dataclasses.replace(TINY, engram_compressed_vocab_size=300)
    path = make_checkpoint(config, tmp_path / "sidecar")
    ids = np.load(path / TOKEN_MAP)
    assert ids.dtype == np.int32 and len(np.unique(ids)) == 300
    np.testing.assert_array_equal(load(path, progress=False).token_map[...], ids)


def test_a_vocabulary_too_small_for_bytes_has_no_tokenizer(tmp_path):
    config = dataclasses.replace(TINY, vocab_size=64, dspark_noise_token_id=63, image_token_id=60,
                                 engram_compressed_vocab_size=40)  # fmt: skip
    path = make_checkpoint(config, tmp_path / "small")
    assert not (path / "tokenizer.json").exists()
    assert load(path, progress=False).embed.shape == (64, 128)


def test_nothing_is_written_over(tiny):
    before = (tiny / SINGLE).stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="exists already"):
        make_checkpoint(TINY, tiny)
    assert (tiny / SINGLE).stat().st_mtime_ns == before


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    values = module._values

    def fail(t, seed):
        if t.name == "mtp.1.ffn.experts.3.w2.weight":
            raise OSError("disk full")
        return values(t, seed)

    monkeypatch.setattr(module, "_values", fail)
    with pytest.raises(OSError, match="disk full"):
        make_checkpoint(TINY, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_disk_too_small_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda p: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match="needs 4[0-9]+ bytes, 1000 are free"):
        make_checkpoint(TINY, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_tables_that_the_hash_cannot_address_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="engram_num_embeddings"):
        make_checkpoint(dataclasses.replace(TINY, engram_num_embeddings=(1172, 1393)), tmp_path / "x")
    assert os.listdir(tmp_path) == []
