"""sparse_plan: the per-step value that tells the REINDEX layers which keys to score."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import bitmap_plan, reference
from .reference import SparsePlan

KINDS = ("prefix", "flags", "ids")
IMPLEMENTATIONS = (
    Implementation("bitmap_plan", bitmap_plan.sparse_plan, bitmap_plan.ARCHES, bitmap_plan.refuses),
    Implementation("reference", reference.sparse_plan),
)


def _validate(candidates, visible, key_count, k, kind, count, valid, block_size):
    if kind not in KINDS:
        raise ValueError(f"sparse_plan: expected kind in {KINDS}, got {kind!r}")
    if candidates.ndim != 2 or visible.shape != candidates.shape[:1] or visible.dtype != jnp.int32:
        raise ValueError(
            f"sparse_plan: expected candidates [T, n] and visible i32[T], got {candidates.shape} and "
            f"{visible.dtype} {visible.shape}"
        )
    rows, columns = candidates.shape
    if key_count < 1 or block_size < 1 or k < 1:
        raise ValueError(
            f"sparse_plan: expected key_count, block_size and k >= 1, got {key_count}, {block_size}, {k}"
        )
    blocks = -(-key_count // block_size)
    if kind == "flags" and (candidates.dtype not in (jnp.uint8, jnp.bool_) or columns != blocks):
        raise ValueError(
            f"sparse_plan: expected flags u8 or bool [{rows}, {blocks}], got {candidates.dtype} {candidates.shape}"
        )
    if kind != "flags" and candidates.dtype not in (jnp.int32, jnp.int16):
        raise ValueError(f"sparse_plan: expected ids i32 or i16, got {candidates.dtype}")
    if (count is not None) != (kind == "prefix"):
        raise ValueError(f"sparse_plan: expected count with kind 'prefix' and only then, got kind {kind!r}")
    if kind == "prefix" and (columns != k or count.shape != (rows,)):
        raise ValueError(f"sparse_plan: expected ids [{rows}, {k}], count [{rows}], got {columns} and {count.shape}")
    if valid is not None and valid.shape != (rows,):
        raise ValueError(f"sparse_plan: expected valid bool[{rows}], got {valid.shape}")


def sparse_plan(
    candidates,  # i32|i16[T, n] block ids (n = k for "prefix"), or u8|bool[T, ceil(key_count / block_size)] flags
    visible,  # i32[T], causal visible length in logical positions
    *,
    key_count: int,
    k: int = 2048,
    kind: str = "prefix",
    count=None,  # i32[T], length of the sorted prefix; only with kind "prefix"
    valid=None,  # bool[T], the row's request is not padding; None = all are
    block_size: int = 8,
    impl: str = "auto",
    arch: str | None = None,
) -> SparsePlan:
    """Build the plan from candidate_blocks' sorted prefix ("prefix": nothing is sorted or compacted again), from its
    flags ("flags"), or from ids in any order ("ids": duplicates collapse, whatever is out of range drops out).

    A block is kept when 0 <= id < ceil(row_ke / block_size), row_ke = clamp(visible, 0, key_count); when more than k
    are kept the lowest k stay. end = (n - 1) * block_size + clamp(row_ke - last * block_size, 0, block_size), 0 when
    n = 0. An invalid row gets end 0 and no blocks; its row_ke is what its position says.
    Returns a SparsePlan. Raises ValueError for shapes that do not fit together. Source: spec/decode.md section 3.
    """
    _validate(candidates, visible, key_count, k, kind, count, valid, block_size)
    kwargs = {"key_count": key_count, "k": k, "kind": kind, "count": count, "valid": valid, "block_size": block_size}
    chosen, _ = resolve("sparse_plan", IMPLEMENTATIONS, impl, arch, candidates, visible, **kwargs)
    return chosen.run(candidates, visible, **kwargs)


def explain(
    candidates, visible, *, key_count, k=2048, kind="prefix", count=None, valid=None, block_size=8, impl="auto",
    arch=None,
) -> dict[str, str]:  # fmt: skip
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(candidates, visible, key_count, k, kind, count, valid, block_size)
    kwargs = {"key_count": key_count, "k": k, "kind": kind, "count": count, "valid": valid, "block_size": block_size}
    chosen, against = resolve("sparse_plan", IMPLEMENTATIONS, impl, arch, candidates, visible, **kwargs)
    return {**against, "chosen": chosen.name}
