"""sparse_attention: window ring + selected compressed entries in one softmax with a sink, inverse RoPE at the end."""

import functools

import jax.numpy as jnp

from pallas_kernels import codecs, registry
from pallas_kernels.sparse_attention import hopper, one_pass, reference
from pallas_kernels.sparse_attention.reference import attend, query_shape

OP = "sparse_attention"

__all__ = ["IMPLEMENTATIONS", "attend", "explain", "sparse_attention"]


def _expect(condition, what, expected, got):
    if not condition:
        raise ValueError(f"{OP}: {what} expected {expected}, got {got}")


def _validate(q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, window, bounds, first):
    if q.ndim != 4:
        _expect(sink.ndim == 1, "sink", "[N]", sink.shape)
        heads = sink.shape[0]
        fits = q.ndim == 3 and heads > 0 and 0 <= first < q.shape[2] and (q.shape[2] - first) % heads == 0
        _expect(fits, "q", f"[B, S, N, D] or [B, S, {first} + {heads} * D]", q.shape)
    _expect(q.ndim == 3 or first == 0, "first", "0 for q [B, S, N, D]", first)
    batch, span, heads, dim = query_shape(q, sink, first)
    _expect(q.dtype in (jnp.bfloat16, jnp.float32), "q.dtype", "bfloat16 or float32", q.dtype)
    _expect(dim % codecs.GROUP == 0, "D", f"a multiple of {codecs.GROUP}", dim)
    record = codecs.window_record_bytes(dim) if window_pool.dtype == jnp.uint8 else dim
    _expect(window_pool.ndim == 3 and window_pool.shape[2] == record, "window_pool", f"[n_slots, R, {record}]",
            window_pool.shape)  # fmt: skip
    _expect(1 <= window <= window_pool.shape[1], "window", f"1..R = {window_pool.shape[1]}", window)
    _expect(slots.shape == (batch,), "slots", (batch,), slots.shape)
    _expect(positions.shape == (batch, span), "positions", (batch, span), positions.shape)
    _expect(sink.shape == (heads,), "sink", (heads,), sink.shape)
    _expect(cos.ndim == 3 and cos.shape[:2] == (batch, span) and 2 * cos.shape[2] <= dim, "cos",
            f"[{batch}, {span}, r] with 2r <= {dim}", cos.shape)  # fmt: skip
    _expect(sin.shape == cos.shape, "sin", cos.shape, sin.shape)
    _expect((global_pool is None) == (global_slots is None), "global_pool and global_slots", "both or neither",
            f"{'None' if global_pool is None else 'an array'} and {'None' if global_slots is None else 'an array'}")
    if global_pool is not None:
        record = codecs.global_record_bytes(dim) if global_pool.dtype == jnp.uint8 else dim
        _expect(global_pool.ndim == 3 and global_pool.shape[2] == record, "global_pool", f"[P, E, {record}]",
                global_pool.shape)  # fmt: skip
        _expect(global_slots.ndim == 3 and global_slots.shape[:2] == (batch, span), "global_slots",
                f"[{batch}, {span}, K]", global_slots.shape)  # fmt: skip
    for name, bound in zip(("window_start", "window_end"), bounds, strict=True):
        _expect(bound is None or bound.shape == (batch, span), name, (batch, span), getattr(bound, "shape", None))


IMPLEMENTATIONS = (  # fastest first
    registry.Implementation("hopper_persistent", hopper.sparse_attention, ("sm_90",), hopper.refuses),
    registry.Implementation("hopper_ahead", functools.partial(hopper.sparse_attention, ahead=True), ("sm_90",),
                            hopper.refuses, by_name_only="on an H200 it gains nothing: 93.5 us of kernel, hopper_persistent 94.1"),
    registry.Implementation("one_pass", one_pass.sparse_attention, one_pass.ARCHES, one_pass.refuses),
    registry.Implementation("reference", reference.sparse_attention),
)


def sparse_attention(
    q,  # bf16|f32[B, S, N, D], or [B, S, first + N*D] of which the last N*D columns are read where they lie
    window_pool,  # u8[n_slots, R, D + D/32] records, or f32[n_slots, R, D] values
    slots,  # i32[B], cache slot of each request; outside 0..n_slots-1 = invalid request
    positions,  # i32[B, S], position of each row, -1 = padding row
    global_pool,  # u8[P, E, D/2 + D/16] records, f32[P, E, D] values, or None (SWA layers)
    global_slots,  # i32[B, S, K] = page * E + entry of the selected entries, -1 = none; or None
    sink,  # f32[N], raw sink logit of each head
    cos,  # f32[B, S, r], r rotary pairs
    sin,  # f32[B, S, r]
    *,
    window: int = 128,
    scale: float,
    window_start=None,  # i32[B, S] or None
    window_end=None,  # i32[B, S] or None
    rotate_query: bool = False,
    first: int = 0,
    impl: str = "auto",
    arch: str | None = None,
):
    """Attend to the window and to the selected compressed entries; spec/model.md section 5.

    Keys of a row at position p: ring rows of positions max(0, p - window + 1)..p (ring row = position mod R, and the
    ring must still hold them), plus every entry named in `global_slots`. `window_start` and `window_end` replace that
    range by start..end-1, of which the last `window` positions are read: the drafter passes window=133,
    start=max(0, P-128), end=P+5 for all rows of a block. Nothing is de-duplicated. K = V = the record's D channels.

    rotate_query: the last 2r channels of `q` are rotated here first (adjacent pairs, fp32, rounded to q's dtype);
    otherwise `q` arrives rotated. first: columns of a three-dimensional `q` before the queries, whatever they hold.

    The dtype of `q` is the precision: bf16 rounds probabilities to bf16 before V, f32 is fp32 throughout. The result is
    rounded to q's dtype, then its last 2r channels are rotated back (adjacent pairs) and rounded again.

    Returns q's dtype [B, S, N, D]. Rows with position -1, rows of invalid requests and rows without any key are exactly
    0, whatever their q, ring or pages hold.
    Raises ValueError for shapes that do not fit together, naming what was expected and got.
    """
    _validate(q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, window,
              (window_start, window_end), first)  # fmt: skip
    args = (q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin)
    options = dict(window=window, scale=scale, window_start=window_start, window_end=window_end, rotate_query=rotate_query,
                   first=first)  # fmt: skip
    chosen, _ = registry.resolve(OP, IMPLEMENTATIONS, impl, arch, *args, **options)
    return chosen.run(*args, **options)


def explain(*args, impl: str = "auto", arch: str | None = None, **options) -> dict[str, str]:
    """Which implementation these arguments (arrays or ShapeDtypeStructs) get, and why not the faster ones.

    Returns {"chosen": name, name passed over: reason, ...}.
    """
    chosen, against = registry.resolve(OP, IMPLEMENTATIONS, impl, arch, *args, **options)
    return {"chosen": chosen.name, **against}
