"""Single-pass hyper-connections, mHC (spec/model.md section 3). Coefficients in fp32, streams in the activation dtype."""

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import HIGHEST
from dsv41_jax.params import HyperSite


def mixes(
    streams,  # dtype[T, M, H]
    site: HyperSite,
    c: ModelConfig,
):
    """Coefficients of one sublayer from the streams at its input.

    Returns pre f32[T, M] (for the NEXT sublayer), post f32[T, M], comb f32[T, M, M] (comb[j, k]: from stream j to k).
    """
    m = c.hc_mult
    v = streams.astype(jnp.float32).reshape(streams.shape[0], -1)
    r = jax.lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + c.rms_norm_eps)
    y = jnp.dot(v, site.fn[...].T, precision=HIGHEST) * r  # TF32 would drop 13 bits of fn
    scale, base = site.scale[...], site.base[...]
    pre = jax.nn.sigmoid(y[:, :m] * scale[0] + base[:m]) + c.hc_eps
    post = 2 * jax.nn.sigmoid(y[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (y[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(-1, m, m)
    return pre, post, sinkhorn(comb, c.hc_sinkhorn_iters, c.hc_eps)


def sinkhorn(
    logits,  # f32[T, M, M]
    iterations: int,
    eps: float,
):
    """f32[T, M, M]: row softmax, then alternating normalisations; the last one is over columns."""
    x = jax.nn.softmax(logits, -1) + eps
    x = x / (x.sum(-2, keepdims=True) + eps)

    def once(_, x):
        x = x / (x.sum(-1, keepdims=True) + eps)
        return x / (x.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, once, x)


def collapse(
    streams,  # dtype[T, M, H]
    pre,  # f32[T, M]
):
    """dtype[T, H]: the sublayer input, one weighted sum of the streams."""
    return jnp.sum(pre[..., None] * streams.astype(jnp.float32), -2).astype(streams.dtype)


def expand(
    streams,  # dtype[T, M, H]
    y,  # dtype[T, H], the sublayer output
    post,  # f32[T, M]
    comb,  # f32[T, M, M]
):
    """dtype[T, M, H]: post[k] * y + sum_j comb[j, k] * streams[j], in fp32, rounded once."""
    mixed = jnp.einsum("tjk,tjh->tkh", comb, streams.astype(jnp.float32), precision=HIGHEST)
    return (post[..., None] * y.astype(jnp.float32)[:, None] + mixed).astype(streams.dtype)
