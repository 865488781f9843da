"""Product with a block-scaled FP8 weight (spec/model.md section 4)."""

import jax.numpy as jnp

from ..codecs import GROUP, cdiv
from ..registry import Implementation, resolve
from . import blackwell, hopper, reference

IMPLEMENTATIONS = (
    Implementation("hopper", hopper.block_scaled_matmul, ("sm_90",), hopper.refuses),
    Implementation("blackwell", blackwell.block_scaled_matmul, ("sm_100", "sm_103"), blackwell.refuses),
    Implementation("reference", reference.block_scaled_matmul),
)


def _validate(x, w, s, groups, out_dtype):
    if w.ndim != 2 or w.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"block_scaled_matmul: expected w float8_e4m3fn [R, I], got {w.dtype} {w.shape}")
    outputs, inner = w.shape
    if groups < 1 or outputs % groups:
        raise ValueError(f"block_scaled_matmul: groups expected a divisor of R = {outputs}, got {groups}")
    if x.ndim != 2 or x.shape[1] != groups * inner:
        wanted = f"x [M, {groups * inner}] ({groups} groups of I = {inner})"
        raise ValueError(f"block_scaled_matmul: expected {wanted}, got {x.shape}")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"block_scaled_matmul: expected x bfloat16 or float32, got {x.dtype}")
    expected = cdiv(outputs, GROUP), cdiv(inner, GROUP)
    if tuple(s.shape) != expected or s.dtype != jnp.uint8:
        raise ValueError(f"block_scaled_matmul: expected s uint8 {expected}, got {s.dtype} {tuple(s.shape)}")
    if out_dtype is not None and jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"block_scaled_matmul: out_dtype expected bfloat16 or float32, got {jnp.dtype(out_dtype)}")


def block_scaled_matmul(
    x,  # bf16[M, G*I]; f32[M, G*I] in the float32 precisions
    w,  # f8_e4m3[R, I], finite; rows g*R/G .. of group g
    s,  # u8[ceil(R/32), ceil(I/32)] e8m0, one per 32 x 32 tile, at most hopper.LARGEST_SCALE
    *,
    groups: int = 1,
    quantised: bool = False,
    out_dtype=None,
    impl: str = "auto",
    arch: str | None = None,
):
    """dtype[M, R]: y[:, g*O + o] = sum over i of x[:, g*I + i] * w[g*O + o, i] * 2**(s[(g*O + o) // 32, i // 32] - 127).

    O = R / G. quantised: x has been through the FP8 round trip (per 32 channels e4m3 times a power of two), or `rounds_rows`
    says that it need not; so an implementation may multiply in FP8, the result is the same up to the order of sums. Every
    product of a value of x and a scaled weight is exact and sums are fp32; on a GPU their order depends on the weight's
    shape alone, so that a row's bits do not depend on the rest of the batch. The result is rounded once to out_dtype (x's
    dtype by default).
    Raises ValueError for shapes or dtypes that do not fit together. Source: spec/model.md sections 4 and 5.
    """
    _validate(x, w, s, groups, out_dtype)
    kwargs = dict(groups=groups, quantised=quantised, out_dtype=out_dtype)
    chosen, _ = resolve("block_scaled_matmul", IMPLEMENTATIONS, impl, arch, x, w, s, **kwargs)
    return chosen.run(x, w, s, **kwargs)


def rounds_rows(x, w, s, *, groups: int = 1, impl: str = "auto", arch: str | None = None) -> bool:
    """Whether the implementation of `quantised` rows rounds them itself: x as it is then gives the result of x after the FP8
    round trip. Arguments and errors as above."""
    _validate(x, w, s, groups, None)
    chosen, _ = resolve("block_scaled_matmul", IMPLEMENTATIONS, impl, arch, x, w, s, groups=groups, quantised=True)
    return chosen.run is blackwell.block_scaled_matmul and groups == 1


def explain(x, w, s, *, groups=1, quantised=False, out_dtype=None, arch=None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(x, w, s, groups, out_dtype)
    chosen, against = resolve(
        "block_scaled_matmul", IMPLEMENTATIONS, "auto", arch, x, w, s,
        groups=groups, quantised=quantised, out_dtype=out_dtype,
    )  # fmt: skip
    return {**against, "chosen": chosen.name}
