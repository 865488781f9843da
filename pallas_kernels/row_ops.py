"""Row-wise steps that definitions and the model share: norm, product, rotation with the reference's rounding points
(spec/model.md sections 2, 4, 5), and targets of stores. On a CPU a row's bits do not depend on the rows beside it."""

import jax
import jax.numpy as jnp

from . import codecs
from .row_tiles import in_row_tiles

HIGHEST = jax.lax.Precision.HIGHEST


def rms_norm(
    x,  # [T, D] any float
    weight,  # bf16[D] or f32[D]
    eps: float,
):
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded once to x's dtype."""

    def norm(x):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
        return codecs.rounded(y * weight.astype(jnp.float32), x.dtype)

    return in_row_tiles(norm, x)


def matmul(
    x,  # dtype[T, I]
    weight,  # [O, I]
    out_dtype=None,
):
    """[T, O]: x @ weight^T accumulated in fp32, rounded to out_dtype (x's dtype by default). fp32 operands never run as
    TF32."""
    weight = weight.astype(x.dtype)
    y = in_row_tiles(lambda x: jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=HIGHEST,
                                                   preferred_element_type=jnp.float32), x)  # fmt: skip
    return codecs.rounded(y, out_dtype or x.dtype)


def rotate(
    x,  # dtype[T, ..., D]
    cos,  # f32[T, ..., R/2], broadcast over the middle axes of x
    sin,  # f32[T, ..., R/2]
):
    """dtype[T, ..., D]: the last R channels rotated as (re, im) pairs in fp32, rounded once."""
    return in_row_tiles(_rotate, x, cos, sin)


def _rotate(x, cos, sin):
    r = 2 * cos.shape[-1]
    head, tail = x[..., :-r], x[..., -r:].astype(jnp.float32)
    re, im = tail[..., 0::2], tail[..., 1::2]
    out = jnp.stack([re * cos - im * sin, re * sin + im * cos], -1).reshape(tail.shape)
    return jnp.concatenate([head, codecs.rounded(out, x.dtype)], -1)


def drop_negative(
    slots,  # i32[...]
    size: int,
):
    """Negative targets become one past the end, which a scatter in drop mode skips (a negative index would wrap)."""
    return jnp.where(slots < 0, size, slots)
