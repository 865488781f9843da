"""Collects the per-layer arrays of a scored text under the names of the golden data (tests/golden/README.md)."""

import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import State
from dsv41_jax.config import ModelConfig
from pallas_kernels import codecs


class Dump:
    """Arrays of `dsv41 score --dump`, [B, L, ...] unless said otherwise:

    streams_out_i, streams_in_i (layer 0 and engram layers), attn_out_i, ffn_out_i, pre_mix_out_i, topk_i, candidates
    (bool[B, L, entries]), engram_hash_ids, main_hidden; gate_indices_i and gate_weights_i [B*L, k]; and, as the caches hold
    them at the end, compressed_kv_i and index_k_i [B, entries, dim] and window_kv_ring_i [B, W, D] (row = position mod W).
    """

    def __init__(self, config: ModelConfig, batch: int, length: int):
        self.config, self.batch, self.length = config, batch, length
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, start: int, count: int, rows: int, features) -> None:
        """Keep the first `count` of `rows` rows per request of one chunk's taps."""
        taps = dict(features.taps)
        blocks, end = taps.pop("candidate_blocks", None), taps.pop("candidate_end", None)
        if blocks is not None:
            taps["candidates"] = self._candidate_mask(np.asarray(blocks), np.asarray(end))
        if features.target is not None:
            taps["main_hidden"] = features.target
        for name, value in taps.items():
            if name.startswith("streams_in_") and not self._keeps_input(int(name.rsplit("_", 1)[1])):
                continue
            value = np.asarray(value)
            value = value.astype(np.float32) if value.dtype == jnp.bfloat16 else value
            self._parts.setdefault(name, []).append(value.reshape(self.batch, rows, *value.shape[1:])[:, :count])

    def finish(self, state: State, table) -> dict[str, np.ndarray]:
        """All arrays, with the caches of `state` read back through page table i32[B, columns]."""
        out = {name: np.concatenate(parts, 1) for name, parts in self._parts.items()}
        for name in list(out):
            if name.startswith("gate_"):
                out[name] = out[name].reshape(self.batch * self.length, -1)
        for layer in self.config.layers:
            out[f"window_kv_ring_{layer.index}"] = self._window(state.window[layer.index])
            if layer.owns_kv:
                out |= self._entries(state, layer, np.asarray(table))
        return out

    def _keeps_input(self, layer: int) -> bool:
        return layer == 0 or layer in self.config.engram_layer_ids

    def _candidate_mask(self, blocks, end):
        size = self.config.candidate_block_size
        mask = np.zeros((blocks.shape[0], codecs.cdiv(self.length, size) * size), bool)
        for row in range(blocks.shape[0]):
            # whole blocks, as the reference marks them: the newest one may reach past the visible entries
            column = np.arange(codecs.cdiv(int(end[row]), size) * size)
            mask[row, blocks[row, column // size] * size + column % size] = True
        return mask[:, : self.length]

    def _window(self, ring):
        w, d = self.config.sliding_window, self.config.head_dim
        positions = np.arange(max(0, self.length - w), self.length)
        rows = ring[:, positions % ring.shape[1]]
        values = codecs.decode_window(rows, d) if ring.dtype == jnp.uint8 else rows
        out = np.zeros((self.batch, w, d), np.float32)
        out[:, positions % w] = np.asarray(values)
        return out

    def _entries(self, state: State, layer, table) -> dict[str, np.ndarray]:
        c, n = self.config, self.length // layer.ratio
        pool, keys = state.global_kv[layer.index], state.index[layer.index]
        per_page, width = pool.shape[1], table.shape[1]
        pages = np.asarray(pool)[table].reshape(self.batch, width * per_page, -1)
        if pool.dtype != jnp.uint8:
            k = np.asarray(keys)[table].reshape(self.batch, width * per_page, -1)
            return {f"compressed_kv_{layer.index}": pages[:, :n], f"index_k_{layer.index}": k[:, :n]}
        half, group = c.index_head_dim // 2, c.index_head_dim // codecs.GROUP
        planes = np.asarray(keys)[table]
        payload = planes[..., : per_page * half].reshape(self.batch, width * per_page, half)
        scale = planes[..., per_page * half :].reshape(self.batch, width * per_page, group)
        return {
            f"compressed_kv_{layer.index}": np.asarray(codecs.decode_global(jnp.asarray(pages), c.head_dim))[:, :n],
            f"index_k_{layer.index}": np.asarray(codecs.decode_index(jnp.asarray(payload), jnp.asarray(scale)))[:, :n],
        }
