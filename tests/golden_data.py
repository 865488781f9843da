"""Reads `tests/golden`: the recorded outputs of a tiny random model (see `tests/golden/README.md`). numpy only.

Use: `load("float32")` gives one variant's arrays by name, `inputs()` the prompt, `CHECKPOINT` the folder with
`config.json`, `model.safetensors` and `engram_token_map.npy`.
"""

import functools
import json
from pathlib import Path

import numpy as np

CHECKPOINT = Path(__file__).parent / "golden"
WEIGHTS = CHECKPOINT / "model.safetensors"
PREFILL = 13  # decode_logits come from a prefill of this many tokens, then one token per step
# The project's precision names -> the file stems.
VARIANTS = {"float32": "fp32", "float32_cache": "fp32_cache", "released": "official"}
_BF16 = "__bf16bits"
_DELTA = "__minus_logits_bits"


def bf16_bits_to_f32(bits):
    """int16/uint16[...] bf16 bit patterns -> f32[...], exact."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def config() -> dict:
    """The checkpoint's `config.json` (nested `text_config`)."""
    return json.loads((CHECKPOINT / "config.json").read_text())


@functools.cache
def inputs() -> dict[str, np.ndarray]:
    """`input_ids` i64[3, 48] and the engram constants of `inputs.npz`."""
    with np.load(CHECKPOINT / "inputs.npz") as f:
        return _frozen(dict(f))


@functools.cache
def load(precision: str) -> dict[str, np.ndarray]:
    """Backbone arrays of one precision ("float32", "float32_cache", "released"), bf16 bit patterns turned into f32.

    Per-layer activations are cut to `rows` i32[R] x `positions` i32[P]: `streams_out_3` is f32[R, P, 4, 128] with
    `streams_out_3[r, i]` = batch row `rows[r]`, position `positions[i]`. All other arrays are whole. Read-only.
    """
    return _load(VARIANTS[precision])


@functools.cache
def load_drafts(precision: str) -> dict[str, np.ndarray]:
    """DSpark arrays of one precision. `draft_logits` f32[3, A, 5, 512] has the anchors `logit_anchors` i32[A] of the 17
    (`draft_logits[:, i]` belongs to `anchor_pos[:, logit_anchors[i]]`); everything else covers all 17. Read-only."""
    return _load(f"{VARIANTS[precision]}_dspark")


def at(full, arrays):
    """Cut a whole [3, 48, ...] array the way `load` cut its per-layer activations -> [R, P, ...]."""
    return full[np.ix_(arrays["rows"], arrays["positions"])]


def _load(stem: str) -> dict[str, np.ndarray]:
    out = {}
    with np.load(CHECKPOINT / f"{stem}.npz") as f:
        for name in f.files:
            if name.endswith(_BF16):
                out[name.removesuffix(_BF16)] = bf16_bits_to_f32(f[name])
            elif name.endswith(_DELTA):
                out[name.removesuffix(_DELTA)] = (f["logits"].view(np.int32) + f[name]).view(np.float32)
            else:
                out[name] = f[name]
    return _frozen(out)


def _frozen(arrays):
    for value in arrays.values():
        value.flags.writeable = False
    return arrays
