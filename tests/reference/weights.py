"""Checkpoint tensors by released name: safetensors reader, writer and dequantised access (spec/model.md section 13)."""

import functools
import json
import struct
from pathlib import Path

import numpy as np

from . import codecs

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(codecs.BF16),
    "F8_E4M3": np.dtype(codecs.E4M3),
    "F8_E8M0": np.dtype(codecs.E8M0),
    "I8": np.dtype(np.int8),
}


def read_safetensors(path) -> dict[str, np.ndarray]:
    """One `.safetensors` file -> {name: array}, bytes untouched (e8m0 scales come as ml_dtypes.float8_e8m0fnu)."""
    blob = Path(path).read_bytes()
    (header_size,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + header_size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(blob[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors: dict[str, np.ndarray]) -> None:
    """{name: array} -> one `.safetensors` file; dtypes as in DTYPES."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            f.write(np.ascontiguousarray(array).tobytes())


class Weights:
    """Dequantised f32 views of a checkpoint's tensors, made on first use.

    `tensors` is {released name: array in its released dtype}, from `read_safetensors` or `random_weights.make`.
    """

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors
        self.matrix = functools.cache(self._matrix)

    def _matrix(self, name):
        """`name` (with or without `.weight`) -> f32[...] dequantised: F8 tiles, packed FP4 rows, BF16 or F32."""
        full = name if name in self.tensors else f"{name}.weight"
        stored = self.tensors[full]
        scale = self.tensors.get(full.removesuffix(".weight") + ".scale")
        if stored.dtype == codecs.E4M3:
            return codecs.tiled_fp8_weight(stored, scale)
        if stored.dtype == np.int8:
            return codecs.packed_fp4_weight(stored, scale)
        return stored.astype(np.float32)

    def rows(self, name, ids):
        """Rows `ids` i64[n] of an engram table (F8 rows, a scale per row per 32) -> f32[n, c]."""
        return codecs.fp8_rows(self.tensors[f"{name}.weight"][ids], self.tensors[f"{name}.scale"][ids])
