"""expert_plan: the sorted rows of every local expert and their tiles (spec/decode.md A4)."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import counting_sort, reference
from .reference import Plan

IMPLEMENTATIONS = (
    Implementation("counting_sort", counting_sort.expert_plan, counting_sort.ARCHES, counting_sort.refuses),
    Implementation("reference", reference.expert_plan),
)


def _validate(ids, weights, first_expert, local, tile_rows):
    if ids.ndim != 2 or not ids.size or weights.shape != ids.shape:
        raise ValueError(f"expert_plan: expected ids and weights [T, K], got {ids.shape} and {weights.shape}")
    if jnp.shape(first_expert) != ():
        raise ValueError(f"expert_plan: expected a scalar first_expert, got {jnp.shape(first_expert)}")
    if local < 1 or tile_rows < 1:
        raise ValueError(f"expert_plan: expected local and tile_rows >= 1, got {local} and {tile_rows}")


def expert_plan(
    ids,  # i32[T, K] global expert ids, distinct within a row; any id is allowed outside the local range
    weights,  # f32[T, K]
    first_expert,  # int or i32[]: the global id of local expert 0
    *,
    local: int,
    tile_rows: int,
    impl: str = "auto",
    arch: str | None = None,
) -> Plan:
    """Sort the slots of experts first_expert .. first_expert + local - 1 by expert, then by slot, and cut each expert's
    rows into tiles of `tile_rows`.

    Any distribution: none is dropped, an expert may have no row or all. Every element of the result is defined (`Plan`).
    Raises ValueError for shapes that do not fit. Source: spec/decode.md A4.
    """
    _validate(ids, weights, first_expert, local, tile_rows)
    static = dict(local=local, tile_rows=tile_rows)
    chosen, _ = resolve("expert_plan", IMPLEMENTATIONS, impl, arch, ids, weights, first_expert, **static)
    return chosen.run(ids, weights, first_expert, **static)


def explain(ids, weights, first_expert, *, local: int, tile_rows: int, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(ids, weights, first_expert, local, tile_rows)
    chosen, against = resolve(
        "expert_plan", IMPLEMENTATIONS, "auto", arch, ids, weights, first_expert, local=local, tile_rows=tile_rows
    )
    return {**against, "chosen": chosen.name}
