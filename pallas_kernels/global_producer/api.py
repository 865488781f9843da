"""global_producer: entries, index keys and pending rows of a step's rows, in place (spec/model.md section 6)."""

import jax.numpy as jnp

from ..codecs import GROUP, NV_GROUP, global_record_bytes, index_record_bytes
from ..registry import Implementation, resolve
from . import reference, two_launches

IMPLEMENTATIONS = (
    Implementation("two_launches", two_launches.global_producer, two_launches.ARCHES, two_launches.refuses),
    Implementation("reference", reference.global_producer),
)
_WHERE = "global_producer: expected"


def _validate(
    global_pool, index_pool, pending, value, gate, norm, wk, key_norm, cos, sin, global_slots, index_slots,
    slots, start, row_slots, positions, kept
):  # fmt: skip
    if value.ndim != 2 or value.shape[1] % NV_GROUP or norm.shape != value.shape[1:]:
        raise ValueError(f"{_WHERE} value [T, D], D a multiple of {NV_GROUP}, and norm [D], got {value.shape} and {norm.shape}")
    (rows, dim), keys = value.shape, wk.shape[0]
    if wk.shape != (keys, dim) or key_norm.shape != (keys,) or keys % GROUP:
        raise ValueError(
            f"{_WHERE} wk [J, {dim}], J a multiple of {GROUP}, and key_norm [J], got {wk.shape} and {key_norm.shape}"
        )
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != rows or 2 * cos.shape[1] > min(dim, keys):
        raise ValueError(f"{_WHERE} cos and sin [{rows}, R/2] with R <= {min(dim, keys)}, got {cos.shape} and {sin.shape}")
    _validate_pools(global_pool, index_pool, dim, keys)
    for name, x in (("global_slots", global_slots), ("index_slots", index_slots), ("row_slots", row_slots),
                    ("positions", positions)):  # fmt: skip
        if x.shape != (rows,) or x.dtype != jnp.int32:
            raise ValueError(f"{_WHERE} {name} i32[{rows}], got {x.dtype} {x.shape}")
    if kept.shape != (rows,) or kept.dtype != jnp.bool_:
        raise ValueError(f"{_WHERE} kept bool[{rows}], got {kept.dtype} {kept.shape}")
    if slots.ndim != 1 or slots.shape != start.shape or not slots.size or rows % slots.size:
        raise ValueError(f"{_WHERE} slots and start [B] with B a divisor of {rows}, got {slots.shape} and {start.shape}")
    if (gate is None) != (pending is None):
        raise ValueError(f"{_WHERE} gate and pending both (pairs) or neither (single rows)")
    if gate is not None and (gate.shape != value.shape or gate.dtype != jnp.float32 or value.dtype != jnp.float32):
        raise ValueError(f"{_WHERE} value and gate f32 {value.shape}, got {value.dtype}, {gate.dtype} {gate.shape}")
    if pending is not None and (pending.ndim != 4 or pending.shape[2:] != (2, dim) or pending.dtype != jnp.float32):
        raise ValueError(f"{_WHERE} pending f32[slots, ring, 2, {dim}], got {pending.dtype} {pending.shape}")


def _validate_pools(global_pool, index_pool, dim, keys):
    if global_pool.dtype != index_pool.dtype or global_pool.dtype not in (jnp.uint8, jnp.float32):
        raise ValueError(f"{_WHERE} pools both u8 or both f32, got {global_pool.dtype} and {index_pool.dtype}")
    records = global_pool.dtype == jnp.uint8
    wide = global_record_bytes(dim) if records else dim
    if global_pool.ndim != 3 or global_pool.shape[2] != wide:
        raise ValueError(f"{_WHERE} global_pool [P, E, {wide}], got {global_pool.shape}")
    if records and (index_pool.ndim != 2 or index_pool.shape[1] % index_record_bytes(keys)):
        raise ValueError(f"{_WHERE} index_pool [P, E * {index_record_bytes(keys)}], got {index_pool.shape}")
    if not records and (index_pool.ndim != 3 or index_pool.shape[2] != keys):
        raise ValueError(f"{_WHERE} index_pool [P, E, {keys}], got {index_pool.shape}")


def global_producer(
    global_pool,  # u8[P, E, D/2 + D/16] or f32[P, E, D]
    index_pool,  # u8[P, E * (J/2 + J/32)], payload plane then scale plane, or f32[P, E, J]
    pending,  # f32[slots, ring, 2, D] value and gate by position mod ring, None for ratio 1
    value,  # f32[T, D] for ratio 2, dtype[T, D] for ratio 1: rows of request b are b * T/B ...
    gate,  # f32[T, D], None for ratio 1
    norm,  # bf16[D] or f32[D]
    wk,  # bf16[J, D] or f32[J, D]
    key_norm,  # bf16[J] or f32[J]
    cos,  # f32[T, R/2], of the entry's first position
    sin,  # f32[T, R/2]
    global_slots,  # i32[T], page * E + entry, negative or beyond the pool = write nothing
    index_slots,  # i32[T], the same for the index pool
    slots,  # i32[B], the request's row of `pending`, negative = padding request
    start,  # i32[B], position of the request's first row
    row_slots,  # i32[T], `slots` of every row, negative = padding row
    positions,  # i32[T]
    kept,  # bool[T], rows that go to `pending`: at most `ring` of a request
    *,
    eps: float,
    dtype=jnp.bfloat16,
    impl: str = "auto",
    arch: str | None = None,
):
    """(global_pool, index_pool, pending) with the entries, index keys and pending rows of these rows.

    Ratio 2 pools every row with the one before it, softmax over the two gates per channel; the row before a request's first
    comes from `pending`. The result, rounded to dtype, is normalised and rounded to the latent. Entry: the latent's last R
    channels rotated, rounded, FP4 with an e4m3 scale per 16 channels. Index key: latent @ wk^T, rounded, normalised,
    rotated, MXFP4. Pending rows are read before any is written. No two rows have the same target. All other bytes stay;
    donated pools are updated in place. Raises ValueError for shapes or dtypes that do not fit.
    Source: spec/model.md sections 4 to 6, spec/decode.md A1.
    """
    arguments = (global_pool, index_pool, pending, value, gate, norm, wk, key_norm, cos, sin, global_slots, index_slots,
                 slots, start, row_slots, positions, kept)  # fmt: skip
    _validate(*arguments)
    chosen, _ = resolve("global_producer", IMPLEMENTATIONS, impl, arch, *arguments, eps=eps, dtype=jnp.dtype(dtype))
    return chosen.run(*arguments, eps=eps, dtype=jnp.dtype(dtype))


def explain(*arguments, eps: float, dtype=jnp.bfloat16, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for the arguments of `global_producer`."""
    _validate(*arguments)
    chosen, against = resolve("global_producer", IMPLEMENTATIONS, "auto", arch, *arguments, eps=eps, dtype=jnp.dtype(dtype))
    return {**against, "chosen": chosen.name}
