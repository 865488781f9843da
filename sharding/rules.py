"""Which axis of which array is split over the mesh: one table, and everything else derived from it.

An array has logical axes by what it is (`parameter_axes` by path, STATE and BATCH by role); RULES says which mesh axis a
logical axis is split over. What no rule names is replicated.
"""

import re

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dsv41_jax.cache import CacheGeometry, State, init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.precision import Precision
from sharding.mesh import RANKS, check_ranks, mesh_ranks

# logical axis -> mesh axis; None = replicated
RULES: dict[str, str | None] = {
    "expert": RANKS,  # routed experts: expert-parallel
    "engram_row": RANKS,  # rows of the engram tables
    "slot_or_page": RANKS,  # leading axis of every array of the decode state
    "request": RANKS,  # leading axis of every batch array and every output (requests, or rows of requests)
    "feature": None,  # everything else of a weight
}

# parameter path -> logical axes, first axis first; axes not named are "feature"
PARAMETER_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(layers|draft\.stages)\.\d+\.ffn\.experts\.(w13|s13|w2|s2)", ("expert",)),
    (r"layers\.\d+\.engram\.(table|table_scale)", ("engram_row",)),
)
STATE_AXES = ("slot_or_page",)
BATCH_AXES = ("request",)


def parameter_axes(path: str) -> tuple[str, ...]:
    """Logical axes of the leading dimensions of a parameter, () = replicated. Raises ValueError if two patterns match."""
    found = [(pattern, axes) for pattern, axes in PARAMETER_AXES if re.fullmatch(pattern, path)]
    if len(found) > 1:
        raise ValueError(f"rules: {path}: expected one pattern, {[p for p, _ in found]} match")
    return found[0][1] if found else ()


def spec(axes: tuple[str, ...], rules: dict[str, str | None] | None = None) -> PartitionSpec:
    """The PartitionSpec of logical axes. Raises ValueError for an axis without a rule, or if two axes of the same array
    would be split over the same mesh axis."""
    rules = RULES if rules is None else rules
    unknown = [a for a in axes if a not in rules]
    if unknown:
        raise ValueError(f"rules: expected logical axes among {sorted(rules)}, got {unknown}")
    mesh_axes = [rules[a] for a in axes]
    used = [m for m in mesh_axes if m is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"rules: {axes} map to {mesh_axes}: a mesh axis can split only one axis of an array")
    return PartitionSpec(*mesh_axes)


def parameter_spec(path: str) -> PartitionSpec:
    """The PartitionSpec of a parameter."""
    return spec(parameter_axes(path))


def is_split(path: str) -> bool:
    """Whether the ranks hold different parts of a parameter (its leading axis), not copies."""
    return any(axis is not None for axis in parameter_spec(path))


def state_spec() -> PartitionSpec:
    return spec(STATE_AXES)


def batch_spec() -> PartitionSpec:
    return spec(BATCH_AXES)


def parameter_shardings(c: ModelConfig, mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    """{parameter path: sharding} of a Transformer, in pytree order. Raises ValueError if the mesh does not fit."""
    check_ranks(c, mesh_ranks(mesh))
    return {path: NamedSharding(mesh, parameter_spec(path)) for path in flat_paths(Transformer(c, mesh.size))}


def global_parameters(c: ModelConfig, mesh: jax.sharding.Mesh, engram: str = "device") -> Transformer:
    """Placeholders (jax.ShapeDtypeStruct with shardings) of the whole Transformer over the mesh.

    Split parameters are the ranks' parts end to end: [E, ...] experts, [R * ceil(n / R), ...] engram rows, the last of
    them zero padding; with engram="host" there are none. Raises ValueError if the mesh does not fit the geometry.
    """
    ranks = mesh_ranks(mesh)
    check_ranks(c, ranks)
    local = Transformer(c, ranks, engram)
    leaves = []
    for path, leaf in flat_paths(local).items():
        shape = (leaf.shape[0] * ranks, *leaf.shape[1:]) if is_split(path) else leaf.shape
        leaves.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, parameter_spec(path))))
    return jax.tree.unflatten(jax.tree.structure(local), leaves)


def init_sharded_state(c: ModelConfig, g: CacheGeometry, p: Precision, mesh: jax.sharding.Mesh) -> State:
    """A zeroed State of all ranks: every array is the ranks' arrays (sizes of `g`, per rank) end to end, each on its own
    device. Slots and page ids stay local to a rank; every rank has its own unused page 0."""
    return jax.jit(lambda: _global_state(c, g, p, mesh), out_shardings=NamedSharding(mesh, state_spec()))()


def abstract_state(c: ModelConfig, g: CacheGeometry, p: Precision, mesh: jax.sharding.Mesh) -> State:
    """`init_sharded_state` as jax.ShapeDtypeStruct with shardings: for compiles without devices."""
    sharding = NamedSharding(mesh, state_spec())
    shapes = jax.eval_shape(lambda: _global_state(c, g, p, mesh))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)


def _global_state(c, g: CacheGeometry, p, mesh) -> State:
    # every array of the state begins with slots or pages, so the ranks' arrays end to end are one larger state
    ranks = mesh_ranks(mesh)
    return init_state(c, CacheGeometry(g.slots * ranks, g.pages * ranks, g.page_tokens, g.span), p)
