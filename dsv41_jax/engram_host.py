"""Engram tables that stay in the checkpoint's files, mapped, and are read row by row: `checkpoint.load(engram="host")`.

At released size the two tables are 203 GB, 51 GB of each of four GPUs. Here the devices hold none of it: the host's page
cache holds what it has room for, the disk the rest, and a step fetches what it reads, bit for bit the rows of the files.

Parameters then hold the number of the tables (`Transformer.engram_host`), and a compiled step looks them up by it. So a
reload compiles nothing, and a step in flight while weights are replaced still reads the tables that belong to its own.

What it costs: a step calls back to the host once, for all engram layers; on a mesh each rank does, for its own rows, and
nothing travels between ranks. At 384 rows it sends 74 KB of row numbers, gathers 2 x 384 x 24 records of 264 bytes and
sends these 4.9 MB back (not measured on a GPU). Row numbers follow from the tokens, in a decode step from the drafts: so the
host waits for the device's stream after drafting, and launches nothing of the layers before the rows are there. Rows that
are not in the page cache cost a disk read each. Beside the GPU's platform JAX needs that of the CPU: JAX_PLATFORMS unset, or
cuda,cpu.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import lookup, split_records
from dsv41_jax.params import Transformer
from dsv41_jax.safetensors_io import MappedFile
from dsv41_jax.tensors import released_tensors

_numbers = itertools.count(1)
_open: dict[int, "HostTables"] = {}  # a program cannot hold the tables themselves: it outlives them


@dataclasses.dataclass(frozen=True, eq=False)
class HostTables:
    """payloads: u8[rows, D] (FP8) per engram layer; scales: u8[rows, D/32] per engram layer. Views of mapped files."""

    payloads: tuple[np.ndarray, ...]
    scales: tuple[np.ndarray, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(p.shape for p in self.payloads)

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """u8[L, T, n, D + D/32]: the records of rows i32[L, T, n], payload and then scales; zeros outside a table."""
        d = self.payloads[0].shape[1]
        out = np.empty((*rows.shape, d + d // 32), np.uint8)
        for record, payload, scale, at in zip(out, self.payloads, self.scales, rows, strict=True):
            known = (at >= 0) & (at < len(payload))
            at = np.where(known, at, 0)
            record[..., :d], record[..., d:] = payload[at], scale[at]
            record[~known] = 0
        return out


def open_tables(
    c: ModelConfig,
    files: Mapping,  # {released tensor name: path}, checked (`checkpoint`)
) -> np.ndarray:
    """i32[]: the number of a checkpoint's tables, mapped from now until `close`. Nothing is read. Raises like
    `MappedFile`."""
    sources, parts = released_tensors(c), {"table": [], "table_scale": []}
    for layer in c.engram_layer_ids:
        for leaf, views in parts.items():
            (tensor,) = sources[f"layers.{layer}.engram.{leaf}"].parts
            with MappedFile(files[tensor.name]) as f:  # the mapping lives as long as the view
                views.append(f.view(tensor.name).view(np.uint8))
    number = next(_numbers)
    _open[number] = HostTables(*map(tuple, parts.values()))
    return np.int32(number)


def close(params: Transformer) -> None:
    """Unmap the tables of parameters that no step uses any more: after a reload, once the steps before it have been read.
    Until then a mapping costs address space, and the disk space of files that were deleted. Parameters without tables on
    the host, or with closed ones, stay as they are."""
    if params.engram_host is not None:
        _open.pop(int(params.engram_host[...]), None)


# inside a step --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The callback. Compared by value, so that equal programs stay equal. shapes: of the tables that the network hashes
    into."""

    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, number, rows):
        tables = _open.get(int(number))
        if tables is None:
            raise LookupError(f"engram tables: expected open ones, number {int(number)} was closed or never opened")
        if tables.shapes != self.shapes:
            raise ValueError(f"engram tables: expected {self.shapes}, number {int(number)} has {tables.shapes}")
        return tables.fetch(np.asarray(rows))


def fetch(
    number,  # i32[]
    rows,  # [i32[T, n] per engram layer]; outside the table: zeros
    c: ModelConfig,
):
    """u8[L, T, n, D + D/32]: the records of all engram layers, in one callback. If the tables are closed or of another
    geometry, the step fails with an error that says so."""
    rows, d = jnp.stack(rows), c.engram_head_dim
    shape = jax.ShapeDtypeStruct((*rows.shape, d + d // 32), jnp.uint8)
    return jax.pure_callback(_Fetch(tuple((n, d) for n in c.engram_num_embeddings)), shape, number, rows)


def values(
    records,  # u8[T, n, D + D/32]
    dtype,
):
    """dtype[T, n*D]: what `engram.lookup` gives for the rows that the records were read from."""
    t, n, width = records.shape
    row = jnp.arange(t * n, dtype=jnp.int32).reshape(t, n)
    return lookup(*split_records(records.reshape(t * n, width)), row, dtype)
