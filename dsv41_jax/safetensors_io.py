"""Reading and writing safetensors files, FP8 and E8M0 included (safetensors 0.8 raises on both; spec/platform.md).

A file is: u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the payload. Readers get
views of the mapped file; E8M0 scales are bytes (uint8), because a numeric cast of them would destroy them.
"""

import dataclasses
import json
import math
import mmap
import os
import pathlib
import struct

import ml_dtypes
import numpy as np

# safetensors dtype name -> the numpy type it is viewed as
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")


class SafetensorsError(ValueError):
    """A file that is not whole and consistent: which file, and what is wrong with it."""

    def __init__(self, path, problem: str):
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = pathlib.Path(path), problem


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file: safetensors dtype name, shape, byte range [start, stop) from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. KeyError for an unknown dtype name."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def read_header(path) -> dict[str, Entry]:
    """The tensors of a file, in payload order. Reads the header only.

    Raises SafetensorsError for a truncated or oversized file, a header that does not parse, unknown dtypes, sizes that
    do not match their shapes, and byte ranges that overlap or leave holes. OSError if the file cannot be opened.
    """
    path = pathlib.Path(path)
    size = path.stat().st_size
    with path.open("rb") as f:
        prefix = f.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise SafetensorsError(path, f"truncated: {size} bytes, a header length needs {_LENGTH.size}")
        (length,) = _LENGTH.unpack(prefix)
        if length > _MAX_HEADER:
            raise SafetensorsError(path, f"corrupt: header length {length} is above the format's limit of {_MAX_HEADER}")
        if _LENGTH.size + length > size:
            raise SafetensorsError(path, f"truncated: the header needs {_LENGTH.size + length} bytes, the file has {size}")
        text = f.read(length)
    raw = _parse(path, text)
    raw.pop("__metadata__", None)
    base = _LENGTH.size + length
    entries = {name: _entry(path, name, spec, base) for name, spec in raw.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_coverage(path, ordered, base, size)
    return ordered


def _parse(path, text: bytes) -> dict:
    def no_duplicates(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [k for k, _ in pairs]
            raise SafetensorsError(path, f"corrupt header: {sorted({n for n in names if names.count(n) > 1})} twice")
        return out

    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except SafetensorsError:
        raise
    except (ValueError, RecursionError) as e:  # bad UTF-8 and absurd numbers too
        raise SafetensorsError(path, f"corrupt header: not JSON ({e})") from None
    if not isinstance(raw, dict):
        raise SafetensorsError(path, "corrupt header: not a JSON object")
    return raw


def _naturals(value) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


def _entry(path, name: str, spec, base: int) -> Entry:
    if not isinstance(spec, dict):
        raise SafetensorsError(path, f"corrupt header: {name} is not an object")
    dtype, shape, offsets = spec.get("dtype"), spec.get("shape"), spec.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SafetensorsError(path, f"{name}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SafetensorsError(path, f"corrupt header: {name} has shape {shape!r}, data_offsets {offsets!r}")
    entry = Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])
    expected = tensor_bytes(dtype, entry.shape)
    if entry.nbytes != expected:
        raise SafetensorsError(path, f"{name}: {dtype} {list(shape)} needs {expected} bytes, its offsets span {entry.nbytes}")
    return entry


def _check_coverage(path, ordered: dict[str, Entry], base: int, size: int) -> None:
    """Byte ranges in order must cover the payload exactly: the format allows no holes."""
    end, before = base, "the header"
    for name, entry in ordered.items():
        if entry.start < end:
            raise SafetensorsError(path, f"overlapping offsets: {name} starts at byte {entry.start}, {before} ends at {end}")
        if entry.start > end:
            raise SafetensorsError(path, f"hole in the payload: bytes {end}..{entry.start} before {name} belong to no tensor")
        end, before = entry.stop, name
    if end > size:
        raise SafetensorsError(path, f"truncated: the header describes {end} bytes, the file has {size}")
    if end < size:
        raise SafetensorsError(path, f"{size - end} bytes follow the last tensor")


class MappedFile:
    """A file mapped read-only; its tensors as numpy views. Raises like `read_header`."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.entries = read_header(self.path)
        self._fd = os.open(self.path, os.O_RDONLY)
        try:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def view(self, name: str) -> np.ndarray:
        """The tensor, read-only, in the type of `DTYPES`. Not necessarily aligned: the format does not promise it."""
        e = self.entries[name]
        dtype = DTYPES[e.dtype]
        return np.frombuffer(self._map, dtype, math.prod(e.shape), e.start).reshape(e.shape)

    def release(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Let go of the pages of rows [first, last) of a tensor, in this process and in the page cache: a later view
        reads the disk again. Neighbours that share a page lose it too, which costs them a read and nothing else."""
        e = self.entries[name]
        row = e.nbytes // max(1, e.shape[0]) if e.shape else e.nbytes
        begin = (e.start + first * row) // mmap.PAGESIZE * mmap.PAGESIZE
        end = e.stop if last is None else e.start + last * row
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor. The mapping itself lives until the last view of it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Writer:
    """Writes one file, tensor by tensor, without holding the payload.

    tensors: {name: (safetensors dtype name, shape)} in the order in which they will be written. Use as a context
    manager; leaving it normally with tensors missing raises SafetensorsError.
    """

    def __init__(self, path, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None = None):
        self.path = pathlib.Path(path)
        header, offset = {"__metadata__": metadata or {"format": "pt"}}, 0
        for name, (dtype, shape) in tensors.items():
            stop = offset + tensor_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        self._pending = {name: (dtype, tensor_bytes(dtype, shape)) for name, (dtype, shape) in tensors.items()}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # keeps the payload 8-byte aligned
        self._file = self.path.open("xb")
        self._file.write(_LENGTH.pack(len(text)) + text)

    def write(self, name: str, blocks) -> None:
        """Append a tensor given as one array or an iterable of arrays along axis 0. Raises SafetensorsError if it is not
        the next one, or its type or size is not the declared one."""
        expected = next(iter(self._pending), None)
        if name != expected:
            raise SafetensorsError(self.path, f"tensor {name} written, {expected} expected next")
        dtype, nbytes = self._pending.pop(name)
        written = 0
        for block in [blocks] if isinstance(blocks, np.ndarray) else blocks:
            if block.dtype != DTYPES[dtype]:
                raise SafetensorsError(self.path, f"{name}: {dtype} expected, got {block.dtype}")
            data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            self._file.write(data.data)
            written += data.nbytes
        if written != nbytes:
            raise SafetensorsError(self.path, f"{name}: {nbytes} bytes expected, got {written}")

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self._file.close()
        if kind is None and self._pending:
            raise SafetensorsError(self.path, f"{len(self._pending)} tensors never written: {', '.join(self._pending)}")
