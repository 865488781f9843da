"""Writes random checkpoints of any geometry in the released format (spec/model.md section 13), tensor by tensor.

Values keep activations near unit size through the network; every fifth expert is loud enough for the SwiGLU clamp to act,
and `bias_vl`, which text must never read, is far off on purpose. A tensor depends on the seed and its name alone.
"""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import zlib

import ml_dtypes
import numpy as np

from dsv41_jax.byte_tokenizer import byte_tokenizer, fits, special_tokens
from dsv41_jax.checkpoint import TOKEN_MAP
from dsv41_jax.checkpoint_listing import INDEX, SINGLE
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import engram_constants
from dsv41_jax.safetensors_io import Writer, tensor_bytes
from dsv41_jax.tensors import E8, F8, F32, I8, Tensor, released_tensors
from dsv41_jax.tokenizer import derive_token_map

_BLOCK_VALUES = 1 << 24  # random values made at a time
_E2M1_STD = 8.5625**0.5  # of the 16 codes, equally likely
_LOUD_EVERY, _LOUD_BITS = 5, 3  # loud experts: w1 and w3 times 8, w2 divided by 8
_JITTER_STD = (21 / 12) ** 0.5  # of a scale times 1/2, 1 or 2, equally likely
_F8_BITS = 6  # FP8 payloads have standard deviation 64: few clip at 448, few are subnormal


def checkpoint_tensors(c: ModelConfig) -> list[Tensor]:
    """Every tensor of a text checkpoint, `gate.bias_vl` included, in writing order."""
    out = [t for source in released_tensors(c).values() for t in source.tensors()]
    out += [Tensor(f"{t.name}_vl", F32, t.shape) for t in out if t.name.endswith(".gate.bias")]
    return sorted(out, key=lambda t: _natural(t.name))


def _natural(name: str):
    """Sort key: layers.2 before layers.10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")]


def make_checkpoint(
    config: ModelConfig,
    out,
    *,
    seed: int = 0,
    shard_bytes: int = 5 << 30,
) -> pathlib.Path:
    """Write a checkpoint folder and return its path.

    It appears under its name only when it is whole: everything goes to a temporary folder beside it first.
    shard_bytes: above this many bytes the weights are split over files with an index.
    Raises FileExistsError if `out` exists, OSError if the disk is too small, ConfigError for an impossible geometry.
    """
    out = pathlib.Path(out)
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} exists already; a checkpoint is never written over")
    engram_constants(config)
    tensors = checkpoint_tensors(config)
    there = next(p for p in out.absolute().parents if p.exists())
    needed, free = sum(tensor_bytes(t.dtype, t.shape) for t in tensors), shutil.disk_usage(there).free
    if needed > free:
        raise OSError(f"{there}: the checkpoint needs {needed} bytes, {free} are free")
    made = [p for p in out.absolute().parents if not p.exists()]  # the innermost first
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_side_files(config, temporary)
        _write_weights(temporary, tensors, seed, shard_bytes)
        temporary.chmod(0o755)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # somebody else's files are in it by now
                parent.rmdir()
        raise
    return out


def _write_side_files(c: ModelConfig, folder: pathlib.Path) -> None:
    def dump(name, value):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")

    dump("config.json", c.to_dict())
    dump("generation_config.json", {
        "bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "do_sample": True, "temperature": 1.0, "top_p": 1.0,
    })  # fmt: skip
    derived = None
    if fits(c):
        tokenizer = byte_tokenizer(c)
        tokenizer.save(str(folder / "tokenizer.json"))
        names = special_tokens(c)
        dump("tokenizer_config.json", {
            "add_bos_token": True, "bos_token": names[c.bos_token_id], "eos_token": names[c.eos_token_id],
            "pad_token": names[c.pad_token_id],
        })  # fmt: skip
        derived = derive_token_map(tokenizer, c.vocab_size)
    size = c.engram_compressed_vocab_size
    if derived is None or len(np.unique(derived)) != size:
        # the hash constants follow from the config's size: the sidecar overrules a map that does not have it
        np.save(folder / TOKEN_MAP, (np.arange(c.vocab_size, dtype=np.int64) * size // c.vocab_size).astype(np.int32))


def _write_weights(folder, tensors: list[Tensor], seed: int, shard_bytes: int) -> None:
    shards, filled = [[]], 0
    for t in tensors:
        size = tensor_bytes(t.dtype, t.shape)
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(t)
        filled += size
    single = len(shards) == 1
    weight_map = {}
    for n, shard in enumerate(shards, 1):
        name = SINGLE if single else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        with Writer(folder / name, {t.name: (t.dtype, t.shape) for t in shard}) as writer:
            for t in shard:
                writer.write(t.name, _values(t, seed))
                weight_map[t.name] = name
    if not single:
        total = sum(tensor_bytes(t.dtype, t.shape) for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


# values ---------------------------------------------------------------------------------------------------------------


def _values(t: Tensor, seed: int):
    """Yields the tensor in blocks of rows."""
    rng = np.random.default_rng([seed, zlib.crc32(t.name.encode())])
    row = int(np.prod(t.shape[1:], dtype=np.int64))
    step = max(1, _BLOCK_VALUES // max(row, 1))
    for low in range(0, t.shape[0], step):
        yield _block(t, rng, (min(step, t.shape[0] - low), *t.shape[1:]))


def _block(t: Tensor, rng, shape):
    if t.dtype == I8:  # two random FP4 codes a byte
        return rng.integers(-128, 128, shape, dtype=np.int8)
    if t.dtype == E8:
        return (rng.integers(-1, 2, shape) + (127 + _exponent(t))).astype(np.uint8)
    values = rng.standard_normal(shape, np.float32)
    if t.dtype == F8:
        return np.clip(values * 2.0**_F8_BITS, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    mean, std = _moments(t)
    return (mean + std * values).astype(np.float32 if t.dtype == F32 else ml_dtypes.bfloat16)


def _exponent(t: Tensor) -> int:
    """Power of two of a scale: makes the scaled weight's deviation about gain / sqrt(inputs)."""
    kind = t.name.split(".")
    if kind[-2] == "embed":  # engram rows have unit size
        return -_F8_BITS
    std = (t.shape[1] * 32) ** -0.5 / _JITTER_STD
    if "experts" not in kind:
        return round(np.log2(std)) - _F8_BITS
    expert, weight = int(kind[-3]), kind[-2]
    loud = _LOUD_BITS if expert % _LOUD_EVERY == 0 else 0
    return round(np.log2(std / _E2M1_STD)) + (-loud if weight == "w2" else loud)


def _moments(t: Tensor) -> tuple[float, float]:
    """(mean, deviation) of an unscaled tensor. Matrices: 1/sqrt(inputs)."""
    kind = t.name.split(".")
    last = kind[-2] if kind[-1] == "weight" else kind[-1]
    if last.endswith("norm"):
        return 1.0, 0.15
    return {
        "embed": (0.0, 1.0),
        "attn_sink": (0.0, 0.7),
        "bias": (0.0, 0.3),
        "bias_vl": (5.0, 1.0),
        "q_weight": (1.0, 0.3),
        "k_weight": (1.0, 0.3),
        "hc_attn_base": (0.0, 0.7),
        "hc_ffn_base": (0.0, 0.7),
        "hc_attn_scale": (0.9, 0.25),
        "hc_ffn_scale": (0.9, 0.25),
    }.get(last, (0.0, t.shape[-1] ** -0.5))
