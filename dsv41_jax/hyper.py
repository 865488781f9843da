"""Single-pass hyper-connections, mHC (spec/model.md section 3). Coefficients in fp32, streams in the activation dtype."""

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import HIGHEST
from dsv41_jax.params import HyperSite
from pallas_kernels import codecs
from pallas_kernels.sinkhorn.api import sinkhorn


def mixes(
    streams,  # dtype[T, M, H]
    site: HyperSite,
    c: ModelConfig,
    impl: str = "auto",
):
    """Coefficients of one sublayer from the streams at its input.

    impl: the implementation of `sinkhorn`.
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
    return pre, post, sinkhorn(comb, iterations=c.hc_sinkhorn_iters, eps=c.hc_eps, impl=impl)


def collapse(
    streams,  # dtype[T, M, H]
    pre,  # f32[T, M]
):
    """dtype[T, H]: the sublayer input, one weighted sum of the streams."""
    return codecs.rounded(jnp.sum(pre[..., None] * streams.astype(jnp.float32), -2), streams.dtype)


def expand(
    streams,  # dtype[T, M, H]
    y,  # dtype[T, H], the sublayer output
    post,  # f32[T, M]
    comb,  # f32[T, M, M]
):
    """dtype[T, M, H]: post[k] * y + sum_j comb[j, k] * streams[j], in fp32, rounded once."""
    mixed = jnp.einsum("tjk,tjh->tkh", comb, streams.astype(jnp.float32), precision=HIGHEST)
    return codecs.rounded(post[..., None] * y.astype(jnp.float32)[:, None] + mixed, streams.dtype)
