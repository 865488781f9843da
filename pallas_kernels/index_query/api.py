"""index_query: rotation and MXFP4 form of the index queries, scaling of the head weights (spec/model.md section 7)."""

import jax.numpy as jnp

from ..codecs import GROUP
from ..registry import Implementation, resolve
from . import one_kernel, reference

IMPLEMENTATIONS = (
    Implementation("one_kernel", one_kernel.index_query, one_kernel.ARCHES, one_kernel.refuses),
    Implementation("reference", reference.index_query),
)
FORMS = ("packed", "values", "exact")


def _validate(projected, product, cos, sin, heads, dim, form):
    where = "index_query: expected"
    if form not in FORMS:
        raise ValueError(f"{where} form one of {list(FORMS)}, got {form!r}")
    if dim % GROUP or heads < 1:
        raise ValueError(f"{where} J a multiple of {GROUP} and at least one head, got {dim} and {heads}")
    if projected.ndim != 2 or projected.shape[1] < heads * dim:
        raise ValueError(f"{where} projected [T, {heads * dim} or more], got {projected.shape}")
    if projected.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{where} projected bfloat16 or float32, got {projected.dtype}")
    rows = projected.shape[0]
    if product.shape != (rows, heads) or product.dtype != jnp.float32:
        raise ValueError(f"{where} product f32[{rows}, {heads}], got {product.dtype} {product.shape}")
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != rows or 2 * cos.shape[1] > dim:
        raise ValueError(f"{where} cos and sin [{rows}, R/2] with R <= {dim}, got {cos.shape} and {sin.shape}")


def index_query(
    projected,  # dtype[T, W], product of QB: the index columns are the first I*J, whatever else lies behind them
    product,  # f32[T, I], product of the head weights before any rounding
    cos,  # f32[T, R/2]
    sin,  # f32[T, R/2]
    *,
    heads: int,
    dim: int,
    form: str = "packed",
    impl: str = "auto",
    arch: str | None = None,
):
    """(q, weights) as `index_score` takes them, I = heads of J = dim channels.

    q: the last R channels of every head rotated as adjacent pairs in fp32 and rounded to dtype; then MXFP4, groups of 32
    channels. form "packed": (payload u8[T, I, J/2], scales u8[T, I, J/32] e8m0); "values": what these decode to,
    dtype[T, I, J], exact; "exact": dtype[T, I, J] rotated only, where the cache holds values.
    weights: dtype[T, I], signed: the product rounded to dtype, times J**-0.5 * I**-0.5 (2**-6 at release, so exact).

    The other columns of `projected` are not read, and a row's bits do not depend on other rows.
    Raises ValueError for shapes or dtypes that do not fit. Source: spec/model.md sections 4, 5 and 7.
    """
    _validate(projected, product, cos, sin, heads, dim, form)
    static = dict(heads=heads, dim=dim, form=form)
    chosen, _ = resolve("index_query", IMPLEMENTATIONS, impl, arch, projected, product, cos, sin, **static)
    return chosen.run(projected, product, cos, sin, **static)


def explain(
    projected, product, cos, sin, *, heads: int, dim: int, form: str = "packed", arch: str | None = None
) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(projected, product, cos, sin, heads, dim, form)
    chosen, against = resolve("index_query", IMPLEMENTATIONS, "auto", arch, projected, product, cos, sin, heads=heads,
                              dim=dim, form=form)  # fmt: skip
    return {**against, "chosen": chosen.name}
