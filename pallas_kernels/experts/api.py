"""Routed experts as one grouped operator on packed MXFP4 weights (spec/model.md sections 4 and 9)."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import blackwell, hopper, layout, reference

PRECISIONS = ("released", "float32_cache", "float32")

def _reference(x, ids, weights, w13, s13, w2, s2, *, experts_total=None, plan_impl="auto", **kwargs):
    """The definition; undoes the shuffled order first (packed bytes, nothing is dequantised ahead)."""
    del experts_total, plan_impl
    tensors = (w13, s13, w2, s2)
    return reference.experts(
        x, ids, weights, *(layout.unshuffle_weights(*tensors) if layout.is_shuffled(w13) else tensors), **kwargs
    )


IMPLEMENTATIONS = (
    Implementation("hopper", hopper.experts, ("sm_90",), hopper.refuses),
    Implementation("blackwell", blackwell.experts, ("sm_100", "sm_103"), blackwell.refuses),
    Implementation("reference", _reference),
)


def _validate(x, ids, weights, w13, s13, w2, s2, precision):
    t, h = x.shape if x.ndim == 2 else (None, None)
    if t is None:
        raise ValueError(f"experts: expected x [T, H], got {x.shape}")
    if ids.ndim != 2 or ids.shape[0] != t or weights.shape != ids.shape:
        raise ValueError(f"experts: expected ids and weights [{t}, K], got {ids.shape} and {weights.shape}")
    shuffled = layout.is_shuffled(w13)
    e, f = (w2.shape[0], w13.shape[1] * 32) if shuffled else (w2.shape[0], w2.shape[-1] * 2)
    if shuffled:
        dtype = jnp.int32
        expected = (e, f // 32, h // 128, 8, 128), (e, f // 32, h // 256 + 2, 128)
        expected += (e, h // 64, f // 128, 8, 128), (e, h // 64, f // 256 + 2, 128)
    else:
        dtype = jnp.uint8
        expected = (e, 2 * f, h // 2), (e, 2 * f, h // 32), (e, h, f // 2), (e, h, f // 32)
    for name, a, shape in zip(("w13", "s13", "w2", "s2"), (w13, s13, w2, s2), expected, strict=True):
        if tuple(a.shape) != shape:
            raise ValueError(f"experts: expected {name} {shape} (E = {e}, F = {f}, H = {h}), got {tuple(a.shape)}")
        if a.dtype != dtype:
            raise ValueError(f"experts: expected {name} of dtype {jnp.dtype(dtype).name}, got {a.dtype}")
    if h % 32 or f % 32:
        raise ValueError(f"experts: expected H and F divisible by 32, got H = {h}, F = {f}")
    if precision not in PRECISIONS:
        raise ValueError(f"experts: expected precision in {PRECISIONS}, got {precision!r}")


def experts(
    x,  # bf16[T, H], the ffn_norm output; f32[T, H] in the float32 precisions
    ids,  # i32[T, K] global expert ids, distinct within a row
    weights,  # f32[T, K]
    w13,  # u8[E_local, 2F, H/2]: rows 0..F-1 = w1 (gate), F..2F-1 = w3 (up); low nibble = even input
    s13,  # u8[E_local, 2F, H/32] e8m0
    w2,  # u8[E_local, H, F/2]
    s2,  # u8[E_local, H, F/32] e8m0
    *,
    swiglu_limit: float = 10.0,
    first_expert=0,  # int or i32[]: the global id of w13[0]
    precision: str = "released",
    experts_total: int | None = None,
    plan_impl: str = "auto",
    impl: str = "auto",
    arch: str | None = None,
):
    """The part of the routed experts' sum that experts first_expert .. first_expert + E_local - 1 contribute.

    released: x is quantised to FP8 per 32 channels; g = bf16(w1 x), v = bf16(w3 x);
    t = bf16(weight * silu(min(g, limit)) * clamp(v, +-limit)) in fp32; t is quantised like x; y_e = bf16(w2 t);
    the result is the fp32 sum of y_e in ascending expert id, so a row's bits do not depend on the rest of the batch.
    float32, float32_cache: no activation quantisation and no bf16 rounding, fp32 products.
    Rows may fall on the experts in any way: none is dropped, an expert may have none or all. Slots whose id is outside
    the local range contribute nothing (any id is allowed there, -1 too).
    The four weight arrays may be in the order of `shuffle_weights` (layout.py), which the Hopper kernel needs.
    experts_total: how many experts `ids` range over, where that is more than E_local; only tunes tile sizes.
    plan_impl: the implementation of expert_plan where one is needed.
    Returns f32[T, H].
    Raises ValueError for shapes or dtypes that do not fit together. Source: spec/model.md sections 4 and 9.
    """
    _validate(x, ids, weights, w13, s13, w2, s2, precision)
    args = (x, ids, weights, w13, s13, w2, s2)
    kwargs = dict(
        swiglu_limit=swiglu_limit, first_expert=first_expert, precision=precision, experts_total=experts_total,
        plan_impl=plan_impl,
    )
    chosen, _ = resolve("experts", IMPLEMENTATIONS, impl, arch, *args, **kwargs)
    return chosen.run(*args, **kwargs)


def explain(
    x, ids, weights, w13, s13, w2, s2, *, swiglu_limit=10.0, first_expert=0, precision="released", arch=None
) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(x, ids, weights, w13, s13, w2, s2, precision)
    chosen, against = resolve(
        "experts", IMPLEMENTATIONS, "auto", arch, x, ids, weights, w13, s13, w2, s2,
        swiglu_limit=swiglu_limit, first_expert=first_expert, precision=precision,
    )  # fmt: skip
    return {**against, "chosen": chosen.name}
