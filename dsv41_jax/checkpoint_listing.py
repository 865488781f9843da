"""What tensors a checkpoint folder holds, by the headers of its files alone (spec/model.md section 13)."""

import dataclasses
import pathlib

from dsv41_jax.json_files import read_json
from dsv41_jax.safetensors_io import Entry, SafetensorsError, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass
class Listing:
    """The tensors of a folder by name: which file holds them and where; and what is wrong with the files."""

    tensors: dict[str, tuple[pathlib.Path, Entry]]
    problems: list[str]


def list_tensors(folder) -> Listing:
    """Read every header of a folder. Unreadable, truncated or inconsistent files become problems, not exceptions."""
    folder = pathlib.Path(folder)
    out = Listing({}, [])
    if not folder.is_dir():
        out.problems.append("not a folder" if folder.exists() else "no such folder")
        return out
    if (folder / INDEX).is_file():
        weight_map = _read_index(folder / INDEX, out.problems)
        shards = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, shards = None, [SINGLE]
    else:
        out.problems.append(f"neither {SINGLE} nor {INDEX} in the folder")
        return out
    for shard in shards:
        _add_shard(folder / shard, out)
    if weight_map is not None:
        _check_index(weight_map, out)
    return out


def _read_index(path, problems) -> dict[str, str]:
    try:
        weight_map = read_json(path)["weight_map"]
        if not all(isinstance(v, str) and pathlib.PurePath(v).name == v for v in weight_map.values()):
            raise ValueError("weight_map must name files of the folder")
        return weight_map
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        problems.append(f"{path.name}: not an index ({type(e).__name__}: {e})")
        return {}


def _add_shard(path, out: Listing) -> None:
    try:
        entries = read_header(path)
    except SafetensorsError as e:
        out.problems.append(f"{path.name}: {e.problem}")
        return
    except OSError as e:
        out.problems.append(f"{path.name}: {e.strerror}")
        return
    for name, entry in entries.items():
        if name in out.tensors:
            out.problems.append(f"{name}: in {out.tensors[name][0].name} and again in {path.name}")
        out.tensors[name] = (path, entry)


def _check_index(weight_map: dict[str, str], out: Listing) -> None:
    for name, shard in weight_map.items():
        if name in out.tensors and out.tensors[name][0].name != shard:
            out.problems.append(f"{name}: the index says {shard}, it is in {out.tensors[name][0].name}")
    out.problems += [f"{name}: in {path.name} but not in the index" for name, (path, _) in out.tensors.items()
                     if name not in weight_map]  # fmt: skip
