"""Loads a released-format checkpoint folder into a `Transformer` (spec/model.md section 13).

A folder holds `config.json`, `model.safetensors` or shards named by `model.safetensors.index.json`, and a tokenizer or
`engram_token_map.npy`. Headers are checked whole before anything is allocated; then parameters are read through the
memory map in blocks, in their stored formats, and only the rows that the rank owns. The host holds one block at a time.
"""

import contextlib
import pathlib
import zipfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import expert_order as order
from dsv41_jax import hyper_parts
from dsv41_jax.checkpoint_listing import Listing, list_tensors
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import engram_constants
from dsv41_jax.engram_host import open_tables
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.safetensors_io import MappedFile
from dsv41_jax.tensors import IGNORED_PREFIXES, IGNORED_SUFFIXES, Source, released_tensors
from pallas_kernels.block_scaled_matmul import LARGEST_SCALE
from pallas_kernels.codecs import cdiv

TOKEN_MAP = "engram_token_map.npy"
BLOCK_BYTES = 256 << 20  # host staging per parameter block


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; `problems` lists everything found, the message says it all."""

    def __init__(self, folder, problems):
        self.folder, self.problems = pathlib.Path(folder), tuple(problems)
        count = len(self.problems)
        head = f"checkpoint {folder}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n  ".join([head + ":", *self.problems]))


def load(
    folder,
    config: ModelConfig | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
    device=None,
    engram: str = "device",
    expert_order: str = "auto",
    split_sites: bool | None = None,
    progress: bool = True,
) -> Transformer:
    """The parameters of one rank, as arrays on `device`.

    config: geometry; None reads the folder's config.json. ranks, rank: expert-parallel ranks and which one this is; it
    gets experts [rank*E/ranks, (rank+1)*E/ranks) and engram rows [rank*ceil(n/ranks), ...), zero-padded at the end.
    device: a jax.Device or Sharding; None is the default device. progress: a bar on stderr.
    engram: "host" leaves the engram tables in the files, mapped; each step fetches its rows (`engram_host`: what it costs).
    expert_order: "checkpoint", "shuffled" as the Hopper kernel reads them, or "auto": what the device's kernel reads.
    split_sites: whether fn of the hyper-connections comes in bf16 parts (`hyper_parts`); None: on a GPU.
    Raises CheckpointError with every missing, unexpected, wrongly shaped or wrongly typed tensor and every unreadable
    file, before any device allocation; ConfigError for an impossible config; ValueError for bad ranks or another `engram`.
    """
    c, placeholders, files, token_map = _validated(folder, config, ranks, rank, engram)
    shuffled = order.wanted(expert_order, c, device)
    devices = dict.fromkeys(flat_paths(placeholders), device)
    arrays = _read_leaves(c, flat_paths(placeholders), files, token_map, ranks, rank, devices, progress)
    if shuffled:
        order.warn_of(order.shuffle([arrays]))
    if hyper_parts.wanted(device) if split_sites is None else split_sites:
        hyper_parts.to_parts(arrays)
    return jax.tree.unflatten(jax.tree.structure(placeholders), list(arrays.values()))


def reload(
    params: Transformer,
    folder,
    config: ModelConfig | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
    progress: bool = True,
) -> Transformer:
    """New parameters with the tree, shapes, dtypes and devices of `params`, so that steps compiled for `params` run on
    without compiling again. `params` itself stays as it is: the caller drops it when the result is there. Engram tables on
    the host stay there, mapped from the new folder.

    Raises like `load`, and CheckpointError if a parameter would change its shape or dtype. On any error nothing was
    replaced: a partial reload does not exist.
    """
    c, placeholders, files, token_map = _validated(folder, config, ranks, rank, params.engram_place)
    live, stored = flat_paths(params), flat_paths(placeholders)
    new = hyper_parts.as_held(order.as_held(stored, live), live)
    problems = [f"{path}: not a parameter of the live model" for path in new if path not in live]
    problems += [f"{path}: the live model has it, the checkpoint does not" for path in live if path not in new]
    problems += [
        f"{path}: live {live[path].dtype}{list(live[path].shape)}, checkpoint {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in new.items()
        if path in live and (live[path].shape, live[path].dtype) != (leaf.shape, leaf.dtype)
    ]
    if problems:
        raise CheckpointError(folder, problems)
    # an array put on a device by name is "committed", which is part of a compiled step's signature
    devices = {path: leaf.sharding if leaf.committed else None for path, leaf in live.items()}
    arrays = _read_leaves(c, stored, files, token_map, ranks, rank, devices, progress)
    stayed = order.shuffle([arrays], order.shuffled_stems(live))
    if stayed:
        raise CheckpointError(folder, [f"{stem}: scales do not fit the live experts' order" for stem in stayed])
    hyper_parts.to_parts(arrays, hyper_parts.held(live))
    return jax.tree.unflatten(jax.tree.structure(placeholders), list(arrays.values()))


def load_ranks(
    folder,
    config: ModelConfig | None = None,
    *,
    devices: Sequence,
    split: Callable[[str], bool],
    engram: str = "device",
    expert_order: str = "auto",
    progress: bool = True,
) -> tuple[ModelConfig, list[dict[str, jax.Array]]]:
    """(config, one {parameter path: array} per rank): rank r of len(devices) ranks on devices[r].

    split(path): whether the ranks hold different parts of a parameter. Rank 0 has every parameter; the others have only
    their parts, since copies travel faster between devices than from the folder. engram, expert_order, raises: like `load`.
    """
    ranks = len(devices)
    c, placeholders, files, token_map = _validated(folder, config, ranks, 0, engram)
    shuffled = order.wanted(expert_order, c, devices[0])
    out = []
    for rank, device in enumerate(devices):
        wanted = {path: leaf for path, leaf in flat_paths(placeholders).items() if rank == 0 or split(path)}
        out.append(_read_leaves(c, wanted, files, token_map, ranks, rank, dict.fromkeys(wanted, device), progress))
    if shuffled:
        order.warn_of(order.shuffle(out))
    if hyper_parts.wanted(devices[0]):
        hyper_parts.to_parts(out[0])  # all ranks hold the same: rank 0 has it
    return c, out


# what is in the folder ------------------------------------------------------------------------------------------------


def ignored(name: str) -> bool:
    """Whether text decode has no use for a tensor of the release: vision and `gate.bias_vl`."""
    return name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def _tensor_problems(listing: Listing, sources: dict[str, Source]) -> list[str]:
    wanted = {t.name: t for source in sources.values() for t in source.tensors()}
    out = []
    for name, tensor in wanted.items():
        if name not in listing.tensors:
            out.append(f"{name}: missing, expected {tensor.dtype} {list(tensor.shape)}")
            continue
        path, entry = listing.tensors[name]
        if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            out.append(f"{name}: expected {tensor.dtype} {list(tensor.shape)}, got {entry.dtype} {list(entry.shape)} "
                       f"in {path.name}")  # fmt: skip
    out += [f"{name}: unexpected in {path.name}" for name, (path, _) in listing.tensors.items()
            if name not in wanted and not ignored(name)]  # fmt: skip
    return out


def _read_token_map(folder: pathlib.Path, c: ModelConfig) -> tuple[np.ndarray | None, list[str]]:
    """(i32[V] or None, problems): the sidecar if there is one, else derived from the tokenizer."""
    if not c.engram_layer_ids:
        return np.zeros(c.vocab_size, np.int32), []
    name = TOKEN_MAP
    try:
        if (folder / TOKEN_MAP).is_file():
            ids = np.load(folder / TOKEN_MAP, allow_pickle=False)
            if not isinstance(ids, np.ndarray):
                raise ValueError("expected one .npy array, got an archive")
        elif (folder / "tokenizer.json").is_file():
            from dsv41_jax.tokenizer import Tokenizer, derive_token_map

            name = "tokenizer.json"
            ids = derive_token_map(Tokenizer.from_folder(folder).raw, c.vocab_size)
        else:
            return None, [f"neither {TOKEN_MAP} nor tokenizer.json: engram needs one of them"]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        return None, [f"{name}: {e}"]
    return ids, [f"{name}: {p}" for p in token_map_problems(ids, c)]


def token_map_problems(ids: np.ndarray, c: ModelConfig) -> list[str]:
    """What is wrong with a token map: expected i32[V] onto 0..engram_compressed_vocab_size-1."""
    size = c.engram_compressed_vocab_size
    if ids.dtype != np.int32 or ids.shape != (c.vocab_size,):
        return [f"token map expected int32 [{c.vocab_size}], got {ids.dtype} {list(ids.shape)}"]
    if ids.min() < 0 or ids.max() >= size:
        return [f"token map expected ids 0..{size - 1}, got {ids.min()}..{ids.max()}"]
    count = len(np.unique(ids))
    return [] if count == size else [f"token map expected {size} distinct ids (engram_compressed_vocab_size), got {count}"]


def checkpoint_problems(folder, config: ModelConfig) -> list[str]:
    """Everything that stands between a folder and `load`, from its headers alone; empty if nothing does."""
    return _check(pathlib.Path(folder), config)[0]


def _check(folder: pathlib.Path, c: ModelConfig) -> tuple[list[str], Listing, np.ndarray | None]:
    listing = list_tensors(folder)
    problems = list(listing.problems)
    # files that cannot be read are the whole story of the tensors in them
    if listing.tensors or not problems:
        problems += _tensor_problems(listing, released_tensors(c))
    if not folder.is_dir() or _other_vocabulary(listing, c):
        return problems, listing, None
    token_map, map_problems = _read_token_map(folder, c)
    return problems + map_problems, listing, token_map


def _other_vocabulary(listing: Listing, c: ModelConfig) -> bool:
    """Whether the stored embedding says that vocab_size, which sizes the token map, is wrong."""
    held = listing.tensors.get("embed.weight")
    return held is not None and held[1].shape[:1] != (c.vocab_size,)


def _validated(folder, config, ranks, rank, engram):
    """(config, placeholders, {tensor: file}, token map) of a folder that can be loaded whole."""
    folder = pathlib.Path(folder)
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 <= rank < ranks, got rank {rank} of {ranks}")
    if config is None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(folder, [*list_tensors(folder).problems, "no config.json in the folder"])
        config = ModelConfig.from_file(folder)
    engram_constants(config)  # refuses table sizes that the hash could not address
    placeholders = Transformer(config, ranks, engram)
    problems, listing, token_map = _check(folder, config)
    files = {n: path for n, (path, _) in listing.tensors.items()}
    problems = problems or _scale_problems(config, files)
    if problems:
        raise CheckpointError(folder, problems)
    return config, placeholders, files, token_map


def _scale_problems(c: ModelConfig, files: dict[str, pathlib.Path]) -> list[str]:
    """Dense FP8 weights with a block scale that no kernel applies exactly: no trained network comes near."""
    out = []
    with contextlib.ExitStack() as stack:
        maps = {path: stack.enter_context(MappedFile(path)) for path in sorted(set(files.values()))}
        for source in released_tensors(c).values():
            for tensor in () if source.per_expert or source.rows_sharded else source.parts:
                if tensor.dtype == "F8_E8M0":
                    largest = int(maps[files[tensor.name]].view(tensor.name).max())
                    if largest > LARGEST_SCALE:
                        out.append(f"{tensor.name}: expected scale bytes up to {LARGEST_SCALE}, got {largest}")
    return out


# reading --------------------------------------------------------------------------------------------------------------


def _read_leaves(c, leaves, files, token_map, ranks, rank, devices, progress) -> dict[str, jax.Array]:
    sources = released_tensors(c)
    arrays = {}
    with contextlib.ExitStack() as stack:
        maps = {path: stack.enter_context(MappedFile(path)) for path in sorted(set(files.values()))}
        reader = _Reader({name: maps[path] for name, path in files.items()}, ranks, rank)
        advance = stack.enter_context(_progress_bar(sum(_nbytes(v) for v in leaves.values()), progress))
        for path, leaf in leaves.items():
            if path == "token_map":
                arrays[path] = jax.device_put(token_map, devices[path])
            elif path == "engram_host":
                arrays[path] = jax.device_put(open_tables(c, files), devices[path])
            else:
                arrays[path] = _read_parameter(reader, sources[path], leaf, devices[path], advance)
    return arrays


def _nbytes(leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _read_parameter(reader: "_Reader", source: Source, leaf, device, advance):
    """The parameter on the device. A small one goes in one piece; a large one is filled block by block in place, so
    that the host never holds more than a block."""
    rows = leaf.shape[0]
    step = max(1, BLOCK_BYTES // max(1, _nbytes(leaf) // rows))
    if rows <= step:
        array = jax.device_put(reader.rows(source, leaf, 0, rows), device)
        advance(_nbytes(leaf))
        return array
    array = jnp.zeros(leaf.shape, leaf.dtype, device=device)
    for low in range(0, rows, step):
        block = reader.rows(source, leaf, low, min(rows, low + step))
        array = _fill(array, jax.device_put(block, device), low)
        # without this the host would run ahead of the copies and hold many blocks
        array.block_until_ready()
        advance(block.nbytes)
    return array


@jax.jit(donate_argnums=0)
def _fill(array, block, row):
    """`array` with `block` at `row`, in place. One-byte types go as raw bytes: a backend without arithmetic on them may
    convert the whole array there and back for every block."""
    if array.dtype.itemsize > 1:
        return jax.lax.dynamic_update_slice_in_dim(array, block, row, 0)
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (array, block)]
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice_in_dim(*bits, row, 0), array.dtype)


class _Reader:
    """Rows of parameters as fresh host arrays in the parameter's dtype, gathered from the mapped files."""

    def __init__(self, files: dict[str, MappedFile], ranks: int, rank: int):
        self._files, self._ranks, self._rank = files, ranks, rank

    def rows(self, source: Source, leaf, low: int, high: int) -> np.ndarray:
        """Rows [low, high) of this rank's parameter (experts, where stacked)."""
        out = np.empty((high - low, *leaf.shape[1:]), leaf.dtype)
        if source.per_expert:
            first = self._rank * (len(source.parts) // self._ranks)
            for i, expert in enumerate(range(first + low, first + high)):
                self._join(source.parts[expert], out[i], 0)
        elif source.rows_sharded:
            total = source.parts[0].shape[0]
            self._join(source.parts, out, self._rank * cdiv(total, self._ranks) + low)
        else:
            self._join(source.parts, out, low)
        return out

    def _join(self, parts, out: np.ndarray, low: int) -> None:
        """Fill `out` with rows low.. of the parts put end to end; zeros beyond the last part."""
        filled, offset = 0, 0
        for tensor in parts:
            n = tensor.shape[0]
            start = max(low + filled - offset, 0)
            take = min(n - start, len(out) - filled)
            if take > 0:
                file = self._files[tensor.name]
                # same width by the header check; I8 holds packed nibbles that are u8 on the device
                out[filled : filled + take] = file.view(tensor.name)[start : start + take].view(out.dtype)
                file.release(tensor.name, start, start + take)
                filled += take
            offset += n
        out[filled:] = np.zeros((), out.dtype)


@contextlib.contextmanager
def _progress_bar(total: int, show: bool):
    """Yields advance(bytes); a bar on stderr if asked for."""
    if not show:
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda n: bar.advance(task, n)
