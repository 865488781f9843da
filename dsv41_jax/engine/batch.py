"""The batches of a step, on the device: everything the host says travels as one packed array and is taken apart there.

A row of the packed array holds one request's registers, sampling parameters and page table, as 32-bit words. A batch that
is what the last one was is not sent again: the arrays on the device are used once more (spec/decode.md B1).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import PageTables
from dsv41_jax.config import ModelConfig
from dsv41_jax.plan import Chunk
from dsv41_jax.sampling import SamplingBatch, SamplingParams, pack_sampling
from dsv41_jax.step import DecodeBatch, PrefillBatch

DECODE_WORDS = ("slot",)
PREFILL_WORDS = ("slot", "start", "count", "last", "next_token")


def sampling_words(params: SamplingParams | None, prompt_length: int, eos: int, end_ids: int, biases: int) -> np.ndarray:
    """i32[words]: one request's SamplingBatch row; None = a padding row."""
    row = pack_sampling([params], [prompt_length], eos, end_ids, biases)
    return np.concatenate([_words(x) for x in jax.tree.leaves(row)])


def _words(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.int32) if x.dtype == bool else x
    return np.ascontiguousarray(x).reshape(-1).view(np.int32)


@functools.cache
def _sampling_layout(end_ids: int, biases: int) -> tuple[tuple[str, str, int | None], ...]:
    """((field, dtype name, columns or None for a vector), ...)"""
    leaves, _ = jax.tree_util.tree_flatten_with_path(pack_sampling([None], [0], 0, end_ids, biases))
    return tuple((path[0].name, str(v.dtype), v.shape[1] if v.ndim == 2 else None) for path, v in leaves)


def _unpack(packed, *, named: tuple[str, ...], tokens: int, draws: bool, end_ids: int, biases: int):
    """({name: i32[B], "last" bool[B]}, tokens i32[B, S], SamplingBatch, table i32[B, C]) of packed i32[B, words]."""
    at = 0

    def columns(n):
        nonlocal at
        at += n
        return packed[:, at - n : at]

    words = {name: columns(1)[:, 0] for name in named}
    if "last" in words:
        words["last"] = words["last"] != 0
    ids = columns(tokens)
    fields = {}
    for name, dtype, width in _sampling_layout(end_ids, biases):
        x = columns(1 if width is None else width)
        x = x if width is not None else x[:, 0]
        fields[name] = x != 0 if dtype == "bool" else jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
    return words, ids, SamplingBatch(**fields, draws=draws), packed[:, at:]


@functools.lru_cache(maxsize=64)
def _unpacker(sharding, **static):
    return jax.jit(functools.partial(_unpack, **static), out_shardings=sharding)


class Batches:
    """Makes the device batches of one engine. `sharding`: of the batch over a mesh's ranks, None = one device.
    greedy_steps: give batches without a stochastic row to the decode programs without sampling code.

    built, reused: decode batches that were sent, and those that were on the device already.
    """

    def __init__(self, c: ModelConfig, end_ids: int, biases: int, sharding=None, reuse: bool = True,
                 greedy_steps: bool = True):  # fmt: skip
        self._c, self._sharding, self._reuse, self._greedy_steps = c, sharding, reuse, greedy_steps
        self._widths = {"end_ids": end_ids, "biases": biases}
        self._padding = sampling_words(None, 0, c.eos_token_id, end_ids, biases)
        self._last_key, self._last = None, None
        self.built = self.reused = 0

    def words(self, params: SamplingParams, prompt_length: int) -> np.ndarray:
        """i32[words] of one request's sampling parameters, as `decode` and `prefill` take them."""
        return sampling_words(params, prompt_length, self._c.eos_token_id, **self._widths)

    def decode(self, rows, columns: int) -> DecodeBatch:
        """rows: one per row of the batch, None (padding) or an object with `slot`, `words`, `table` i32[most columns],
        `version`, a value that changes whenever one of them does, and `draws`, whether the row is stochastic."""
        draws = not self._greedy_steps or any(r is not None and r.draws for r in rows)
        return self._decode(rows, columns, draws)

    def variants(self, rows: int, columns: int) -> list[DecodeBatch]:
        """A padding batch for every program that a decode step of this shape may need."""
        return [self._decode([None] * rows, columns, draws) for draws in ((True, False) if self._greedy_steps else (True,))]

    def _decode(self, rows, columns: int, draws: bool) -> DecodeBatch:
        key = (draws, columns, tuple(None if r is None else r.version for r in rows))
        if self._reuse and key == self._last_key:
            self.reused += 1
            return self._last
        packed = self._packed(rows, [(() if r is None else (r.slot,)) for r in rows], DECODE_WORDS, None, columns)
        words, _, sampling, table = self._send(packed, DECODE_WORDS, 0, draws)
        self._last_key, self._last = key, DecodeBatch(words["slot"], PageTables.shared(table, self._c), sampling)
        self.built += 1
        return self._last

    def prefill(self, rows, pieces, columns: int, width: int) -> PrefillBatch:
        """pieces: one per row, None (padding) or (tokens list, start, last bool, next token or -1)."""
        named = [(() if p is None else (r.slot, p[1], len(p[0]), int(p[2]), p[3])) for r, p in zip(rows, pieces, strict=True)]
        tokens = np.zeros((len(rows), width), np.int32)
        for i, piece in enumerate(pieces):
            if piece is not None:
                tokens[i, : len(piece[0])] = piece[0]
        packed = self._packed(rows, named, PREFILL_WORDS, tokens, columns)
        words, ids, sampling, table = self._send(packed, PREFILL_WORDS, width, True)
        chunk = Chunk(ids, words["start"], words["count"], words["slot"], PageTables.shared(table, self._c))
        return PrefillBatch(chunk, sampling, words["last"], words["next_token"])

    def _packed(self, rows, named, names, tokens, columns: int) -> np.ndarray:
        width = 0 if tokens is None else tokens.shape[1]
        head = len(names) + width
        packed = np.zeros((len(rows), head + len(self._padding) + columns), np.int32)
        packed[:, 0] = -1  # slot
        packed[:, head : head + len(self._padding)] = self._padding
        if width:
            packed[:, len(names) : head] = tokens
        for i, (row, words) in enumerate(zip(rows, named, strict=True)):
            if words:
                packed[i, : len(names)] = words
                packed[i, head : head + len(self._padding)] = row.words
                packed[i, head + len(self._padding) :] = row.table[:columns]
        return packed

    def _send(self, packed: np.ndarray, names, tokens: int, draws: bool):
        unpack = _unpacker(self._sharding, named=names, tokens=tokens, draws=draws, **self._widths)
        return unpack(jax.device_put(packed, self._sharding))
