"""window_store: norm, rotation, FP8 record and ring write of the window KV, in place (spec/model.md section 5)."""

import jax.numpy as jnp

from ..codecs import GROUP, window_record_bytes
from ..registry import Implementation, resolve
from . import one_pass, reference

IMPLEMENTATIONS = (
    Implementation("one_pass", one_pass.window_store, one_pass.ARCHES, one_pass.refuses),
    Implementation("reference", reference.window_store),
)


def validate(pool, front, norm, cos, sin, slots, positions, first, op: str = "window_store"):
    """Raises ValueError, in the name of `op`, for arguments that do not fit together."""
    where = f"{op}: expected"
    if front.ndim != 2 or not 0 <= first < front.shape[1]:
        raise ValueError(f"{where} front [T, first + D], got {front.shape} and first = {first}")
    rows, dim = front.shape[0], front.shape[1] - first
    if dim % GROUP or norm.shape != (dim,):
        raise ValueError(f"{where} D a multiple of {GROUP} and norm [{dim}], got {norm.shape}")
    record = window_record_bytes(dim) if pool.dtype == jnp.uint8 else dim
    if pool.ndim != 3 or pool.shape[2] != record or pool.dtype not in (jnp.uint8, jnp.float32):
        raise ValueError(f"{where} pool [slots, ring, {record}] u8 or f32, got {pool.dtype} {pool.shape}")
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != rows or 2 * cos.shape[1] > dim:
        raise ValueError(f"{where} cos and sin [{rows}, R/2] with R <= {dim}, got {cos.shape} and {sin.shape}")
    for name, x in (("slots", slots), ("positions", positions)):
        if x.shape != (rows,) or x.dtype != jnp.int32:
            raise ValueError(f"{where} {name} i32[{rows}], got {x.dtype} {x.shape}")


def window_store(
    pool,  # u8[slots, ring, D + D/32] or f32[slots, ring, D]
    front,  # dtype[T, first + D], window KV before its norm in the last D columns
    norm,  # bf16[D] or f32[D]
    cos,  # f32[T, R/2]
    sin,  # f32[T, R/2]
    slots,  # i32[T], negative or beyond the pool = write nothing
    positions,  # i32[T]
    *,
    first: int = 0,
    eps: float,
    impl: str = "auto",
    arch: str | None = None,
):
    """The pool with the record of every row at ring row `position mod ring` of its slot.

    kv = RMSNorm(front[:, first:]), rounded to dtype; its last R channels rotated as pairs, rounded to dtype; FP8 with one
    e8m0 byte per 32 channels (f32 pools keep the values). No two rows have the same slot and ring row. All other bytes
    stay; where the pool is donated it is updated in place.
    Returns the pool. Raises ValueError for shapes or dtypes that do not fit. Source: spec/model.md sections 4 and 5,
    spec/decode.md section 1.
    """
    validate(pool, front, norm, cos, sin, slots, positions, first)
    arguments = (pool, front, norm, cos, sin, slots, positions)
    chosen, _ = resolve("window_store", IMPLEMENTATIONS, impl, arch, *arguments, first=first, eps=eps)
    return chosen.run(*arguments, first=first, eps=eps)


def explain(
    pool, front, norm, cos, sin, slots, positions, *, first: int = 0, eps: float, arch: str | None = None
) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    validate(pool, front, norm, cos, sin, slots, positions, first)
    arguments = (pool, front, norm, cos, sin, slots, positions)
    chosen, against = resolve("window_store", IMPLEMENTATIONS, "auto", arch, *arguments, first=first, eps=eps)
    return {**against, "chosen": chosen.name}
