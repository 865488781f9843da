"""Loads a checkpoint over a mesh: every rank's experts and engram rows straight onto its device, the rest onto all."""

import jax
from jax.sharding import NamedSharding

from dsv41_jax import checkpoint
from dsv41_jax.config import ModelConfig
from dsv41_jax.params import Transformer, flat_paths
from sharding.mesh import mesh_ranks
from sharding.rules import global_parameters, is_split


def load_sharded(
    folder,
    mesh: jax.sharding.Mesh,
    config: ModelConfig | None = None,
    *,
    engram: str = "device",
    expert_order: str = "auto",
    progress: bool = True,
) -> Transformer:
    """The parameters over all ranks of a mesh, as ShardedSteps takes them.

    Split parameters are read once each, block by block, onto the device that owns them; replicated ones are read onto
    rank 0 and copied from device to device. The host never holds more than a block. engram, expert_order: as
    in `checkpoint.load`; on the host there is one table for all ranks, and each fetches its own rows.
    Raises ValueError if the mesh does not divide the experts, and what `checkpoint.load` raises; all of it before any
    device allocation.
    """
    mesh_ranks(mesh)  # refuses a mesh of other axes
    devices = list(mesh.devices.flat)
    c, parts = checkpoint.load_ranks(folder, config, devices=devices, split=is_split, engram=engram,
                                     expert_order=expert_order, progress=progress)  # fmt: skip
    placeholders = global_parameters(c, mesh, engram)
    leaves = []
    for path, leaf in flat_paths(placeholders).items():
        if is_split(path):
            shards = [part.pop(path) for part in parts]
            shape = (leaf.shape[0], *shards[0].shape[1:])  # experts may be in another order than the placeholder's
            leaves.append(jax.make_array_from_single_device_arrays(shape, leaf.sharding, shards))
        else:
            leaves.append(jax.device_put(parts[0].pop(path), NamedSharding(mesh, leaf.sharding.spec)))
    return jax.tree.unflatten(jax.tree.structure(placeholders), leaves)
