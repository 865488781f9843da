"""A teacher-forced pass as whole arrays under the golden data's names, for tests to compare against.

Use:

    arrays = record(model_for(GEOMETRIES["two_full2"], seed=0, precision="float32"), ids, first_anchor=13)
"""

import numpy as np

from . import random_weights
from .dspark import Drafter
from .model import Model
from .ops import Config
from .weights import Weights


def model_for(hf_config: dict, seed: int, precision: str) -> Model:
    """A model over `random_weights.make(hf_config, seed)`."""
    config = Config.from_hf(hf_config)
    return Model(Weights(random_weights.make(hf_config, seed)), config, random_weights.token_map(config), precision)


def record(model: Model, ids, first_anchor: int | None = None, anchors_apart: int = 1) -> dict[str, np.ndarray]:
    """Run ids i[L] one token at a time -> arrays of one sequence.

    `logits` f32[L, V], `main_hidden` f32[L, targets*H]; `streams_in_i`, `streams_out_i` [L, M, H], `attn_out_i`,
    `ffn_out_i` [L, H], `pre_mix_out_i` [L, M], `gate_indices_i`, `gate_weights_i` [L, k], `topk_i` i32[L, K],
    `engram_hash_ids` [L, engram layers, rows], and `candidates` bool[L, N], `index_scores_i` f32[L, N'] padded with False / -inf.
    With `first_anchor`, a proposal before every `anchors_apart`-th position from there on: `anchor_pos` i64[A],
    `draft_ids` i64[A, 1+G] (anchor first), `draft_logits` f32[A, G, V], `draft_confidence` f32[A, G], and every draft
    trace as `draft_NAME` [A, G, ...].
    Caches after the last token: `window_kv_ring_i` and (with drafts) `mtp{i}_window_kv_ring` [W, D], slot = position
    mod W, zeros where nothing was written; `compressed_kv_i` [entries, D], `index_k_i` [entries, J].
    """
    state, outputs, proposals = model.new_state(), [], []
    drafter = Drafter(model) if first_anchor is not None else None
    windows = drafter.new_windows() if drafter else None
    for position, token in enumerate(map(int, ids)):
        if drafter and position >= first_anchor and (position - first_anchor) % anchors_apart == 0:
            proposals.append((position, token, drafter.propose(windows, token, position)))
        outputs.append(model.step(state, token))
        if drafter:
            drafter.commit(windows, outputs[-1].features, position)
    arrays = {name: _stack([o.trace[name] for o in outputs]) for name in outputs[0].trace}
    arrays["logits"] = np.stack([o.logits for o in outputs])
    arrays["main_hidden"] = np.stack([o.features for o in outputs])
    for i, cache in enumerate(state.layers):
        arrays[f"window_kv_ring_{i}"] = _ring(cache.window, model.c)
        if cache.compressed:
            arrays[f"compressed_kv_{i}"], arrays[f"index_k_{i}"] = (
                np.stack(cache.compressed),
                np.stack(cache.index_keys),
            )
    for i, window in enumerate(windows or ()):
        arrays[f"mtp{i}_window_kv_ring"] = _ring(window, model.c)
    if proposals:
        arrays["anchor_pos"] = np.array([p for p, _, _ in proposals])
        arrays["draft_ids"] = np.array([[token, *x.ids] for _, token, x in proposals])
        arrays["draft_logits"] = np.stack([x.logits for _, _, x in proposals])
        arrays["draft_confidence"] = np.stack([x.confidence for _, _, x in proposals])
        for name in proposals[0][2].trace:
            arrays[f"draft_{name}"] = np.stack([x.trace[name] for _, _, x in proposals])
    return arrays


def _ring(window, config: Config):
    ring = np.zeros((config.sliding_window, config.head_dim), np.float32)
    for position, row in window.items():
        ring[position % config.sliding_window] = row
    return ring


def _stack(values):
    """Stack; rows of unequal length (per-position entry lists) are padded with False or -inf at the end."""
    longest = max(values, key=len).shape
    if all(v.shape == longest for v in values):
        return np.stack(values)
    out = np.full((len(values), *longest), False if values[0].dtype == bool else -np.inf, values[0].dtype)
    for row, v in zip(out, values):
        row[: len(v)] = v
    return out
