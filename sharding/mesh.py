"""Meshes of one axis, `ranks`: a host's devices, or a topology without devices for compiles (spec/platform.md)."""

import contextlib
import pathlib
import re
from collections.abc import Sequence

import jax
import numpy as np

from dsv41_jax.config import ModelConfig

_PLANNED = 0.8  # share of device_memory_size that XLA plans with where there are no devices
RANKS = "ranks"  # the mesh axis: requests, caches, experts and engram rows are split over it


def make_mesh(ranks: int, devices: Sequence | None = None) -> jax.sharding.Mesh:
    """A mesh of the first `ranks` devices (default: `jax.devices()`), one rank each.

    CPU devices beyond the first need XLA_FLAGS=--xla_force_host_platform_device_count=N before JAX starts.
    Raises ValueError for ranks < 1 or fewer devices than ranks.
    """
    if ranks < 1:
        raise ValueError(f"mesh: expected ranks >= 1, got {ranks}")
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < ranks:
        kind = devices[0].platform if devices else "no"
        raise ValueError(f"mesh: expected at least {ranks} devices for {ranks} ranks, got {len(devices)} ({kind})")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((ranks,), (RANKS,), axis_types=auto, devices=devices[:ranks])


def topology_mesh(target_file, ranks: int, memory_fraction: float = 0.97) -> jax.sharding.Mesh:
    """A mesh of `ranks` GPUs that do not exist, to compile for: what `target_file` (a GpuTargetConfigProto in text form)
    describes. Needs the CUDA plugin, no driver.

    memory_fraction: how much of its memory a process will take (XLA_PYTHON_CLIENT_MEM_FRACTION). Without devices XLA plans
    with 80 % of device_memory_size; a step whose weights and caches exceed that it compiles as if there were no memory
    left: no collective overlaps with anything, and what can be computed again is, all-gathers included.
    Raises ValueError for ranks < 1, another description or a missing plugin, OSError for an unreadable file."""
    from jax.experimental import topologies

    if ranks < 1:
        raise ValueError(f"mesh: expected ranks >= 1, got {ranks}")
    planned = lambda m: m[1] + str(int(int(m[2]) * memory_fraction / _PLANNED))
    text, found = re.subn(r"(device_memory_size: )(\d+)", planned, pathlib.Path(target_file).read_text())
    if found != 1:
        raise ValueError(f"mesh: {target_file}: expected one device_memory_size, got {found}")
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{ranks}")
    except NotImplementedError as e:  # what jax says of a platform that no plugin brought
        raise ValueError(f"mesh: expected the CUDA plugin, to compile for GPUs that are not there ({e}); .ci/setup puts it "
                         "into .venv/deviceless: add that folder to PYTHONPATH") from e  # fmt: skip
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(np.array(topology.devices).reshape(ranks), (RANKS,), axis_types=auto)


def mesh_ranks(mesh: jax.sharding.Mesh) -> int:
    """R of a mesh of this package. Raises ValueError for a mesh with other axes."""
    if mesh.axis_names != (RANKS,):
        raise ValueError(f"mesh: expected one axis {RANKS!r}, got {mesh.axis_names}")
    return mesh.size


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raises ValueError unless `ranks` divides the experts of the network and of the drafter."""
    counts = {"n_routed_experts": config.n_routed_experts}
    if config.has_draft:
        counts["dspark_n_routed_experts"] = config.dspark_n_routed_experts
    for name, experts in counts.items():
        if ranks < 1 or experts % ranks:
            raise ValueError(f"ranks: expected a divisor of {name} = {experts}, got {ranks}")


@contextlib.contextmanager
def compiling_for(mesh: jax.sharding.Mesh):
    """Lower and compile for a topology mesh inside this context."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
