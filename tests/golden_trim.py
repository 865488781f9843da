"""Cut the golden data of the tiny model down to what the tests compare.

    python tests/golden_trim.py SOURCE [OUT]        # OUT defaults to tests/golden

SOURCE holds the uncut folder: `config.json`, `model.safetensors`, `engram_token_map.npy`, `inputs.npz` and six
`golden_*.npz` files. The first four are copied byte for byte. `tests/golden/README.md` says what is kept of the rest
and why; the cut is lossless for every array that is kept, and running it twice gives the same arrays.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

# Positions of the per-layer activations: both ends, the window wrap (7, 8), the prefill boundary (12, 13), an odd one
# (pending ratio-2 row is read), and the last processed position of the last draft (46).
POSITIONS = np.array([0, 1, 7, 8, 12, 13, 31, 46, 47], np.int32)
ANCHORS = np.array([0, 4, 8, 12, 16], np.int32)  # of the 17 anchors, those whose whole logit rows are kept
ROWS = {"fp32": (0, 1), "fp32_cache": (0,), "official": (0,)}  # batch rows of the per-layer activations
BF16 = "__bf16bits"
COPIED = ("config.json", "model.safetensors", "engram_token_map.npy", "inputs.npz")
PER_POSITION = ("streams_in_", "streams_out_", "pre_mix_out_", "attn_out_", "ffn_out_", "main_hidden")
WHOLE = ("gate_", "topk_", "candidates", "compressed_kv_", "index_k_", "window_kv_ring_", "engram_hash_ids", "logits")


def trim_backbone(arrays: dict[str, np.ndarray], rows: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Arrays of one `golden_*.npz` -> those kept (activations cut to `rows` x POSITIONS, the rest whole)."""
    kept = {"positions": POSITIONS, "rows": np.array(rows, np.int32)}
    for name, value in arrays.items():
        if name.startswith(WHOLE):
            kept[name] = value
        elif name.startswith(PER_POSITION):
            kept[name] = value[np.ix_(rows, POSITIONS)]
    # Step-by-step and full-pass logits differ by a few units in the last place in fp32: their bit patterns' difference
    # compresses to a fifth, and adding it back is exact.
    kept["decode_logits__minus_logits_bits"] = arrays["decode_logits"].view(np.int32) - arrays["logits"].view(np.int32)
    return kept


def trim_drafts(arrays: dict[str, np.ndarray], whole: bool) -> dict[str, np.ndarray]:
    """Arrays of one `golden_*_dspark.npz` -> those kept; `whole` keeps the stages' intermediates as well."""
    kept = {k: arrays[k] for k in ("anchor_pos", "draft_ids", "draft_confidence")}
    kept["logit_anchors"] = ANCHORS
    kept["draft_logits"] = arrays["draft_logits"][:, ANCHORS]
    ids = arrays["draft_ids"][:, :, 1:, None]
    kept["drafted_logits"] = np.take_along_axis(arrays["draft_logits"], ids, axis=-1)[..., 0]
    for name, value in arrays.items():
        if name.endswith("_window_kv_ring_final") or (whole and name.startswith("last_")):
            kept[name] = value
    return kept


def main(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copyfile(source / name, out / name)
    for variant, rows in ROWS.items():
        with np.load(source / f"golden_{variant}.npz") as backbone:
            np.savez_compressed(out / f"{variant}.npz", **trim_backbone(dict(backbone), rows))
        with np.load(source / f"golden_{variant}_dspark.npz") as drafts:
            np.savez_compressed(out / f"{variant}_dspark.npz", **trim_drafts(dict(drafts), whole=variant == "fp32"))
    total = sum(f.stat().st_size for f in out.iterdir() if f.suffix in (".npz", ".npy", ".json", ".safetensors"))
    print(f"{out}: {total / 1e6:.2f} MB of data")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) == 3 else Path(__file__).parent / "golden"))
