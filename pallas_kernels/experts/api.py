"""Routed experts as one grouped operator on packed MXFP4 weights (spec/model.md sections 4 and 9)."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import blackwell, hopper, layout, reference

PRECISIONS = ("released", "float32_cache", "float32")


def _reference(
    x, ids, weights, w13, s13, w2, s2, *, parts, spare_sms=0, experts_total=None, plan_impl="auto", **kwargs
):  # fmt: skip
    """The definition; undoes the shuffled order first (packed bytes, nothing is dequantised ahead)."""
    del spare_sms, experts_total, plan_impl
    tensors = (w13, s13, w2, s2)
    y = reference.experts(
        x, ids, weights, *(layout.unshuffle_weights(*tensors) if layout.is_shuffled(w13) else tensors), **kwargs
    )
    return tuple(jnp.split(y, parts, 1))


IMPLEMENTATIONS = (
    Implementation("hopper", hopper.experts_parts, ("sm_90",), hopper.refuses),
    Implementation("blackwell", blackwell.experts_parts, ("sm_100", "sm_103"), blackwell.refuses),
    Implementation("reference", _reference),
)


def _validate(x, ids, weights, w13, s13, w2, s2, precision, parts=1, spare_sms=0):
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
    if parts < 1 or h % parts:
        raise ValueError(f"experts: expected parts >= 1 that divide H = {h}, got {parts}")
    if spare_sms < 0:
        raise ValueError(f"experts: expected spare_sms >= 0, got {spare_sms}")


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
    return experts_parts(
        x, ids, weights, w13, s13, w2, s2, parts=1, swiglu_limit=swiglu_limit, first_expert=first_expert,
        precision=precision, experts_total=experts_total, plan_impl=plan_impl, impl=impl, arch=arch,
    )[0]  # fmt: skip


def experts_parts(
    x, ids, weights, w13, s13, w2, s2,  # as `experts` takes them
    *,
    parts: int,
    spare_sms: int = 0,
    swiglu_limit: float = 10.0,
    first_expert=0,
    precision: str = "released",
    experts_total: int | None = None,
    plan_impl: str = "auto",
    impl: str = "auto",
    arch: str | None = None,
):  # fmt: skip
    """`experts` by its output columns: part i holds columns i*H/parts .. (i+1)*H/parts - 1, bit for bit.

    Everything before the w2 product is done once; each part's product and combine are launches of their own, so that a
    part may travel while the next is computed. w2 is not copied: a part reads its rows where they lie.
    spare_sms: multiprocessors that a kernel which fills the device leaves free from the second part on, for the
    collective that moves the part before.
    Returns parts arrays f32[T, H/parts].
    Raises ValueError where parts does not divide H, for spare_sms < 0, and what `experts` raises.
    """
    _validate(x, ids, weights, w13, s13, w2, s2, precision, parts, spare_sms)
    args = (x, ids, weights, w13, s13, w2, s2)
    kwargs = dict(
        swiglu_limit=swiglu_limit, first_expert=first_expert, precision=precision, experts_total=experts_total,
        plan_impl=plan_impl, parts=parts, spare_sms=spare_sms,
    )
    chosen, _ = resolve("experts", IMPLEMENTATIONS, impl, arch, *args, **kwargs)
    return chosen.run(*args, **kwargs)


def explain(
    x, ids, weights, w13, s13, w2, s2, *, swiglu_limit=10.0, first_expert=0, precision="released", parts=1, arch=None
) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments of `experts_parts`."""
    _validate(x, ids, weights, w13, s13, w2, s2, precision, parts)
    chosen, against = resolve(
        "experts", IMPLEMENTATIONS, "auto", arch, x, ids, weights, w13, s13, w2, s2,
        swiglu_limit=swiglu_limit, first_expert=first_expert, precision=precision, parts=parts,
    )  # fmt: skip
    return {**against, "chosen": chosen.name}
