"""Single-pass hyper-connections, mHC (spec/model.md section 3). Coefficients in fp32, streams in the activation dtype."""

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import matmul, split_matmul
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import HyperSite
from pallas_kernels import codecs
from pallas_kernels.hyper_coefficients.api import hyper_coefficients
from pallas_kernels.hyper_enter.api import hyper_enter
from pallas_kernels.row_tiles import in_row_tiles


def enter(
    streams,  # dtype[T, M, H]
    pre,  # f32[T, M] from the sublayer before
    norm,  # bf16[H]
    c: ModelConfig,
    options: DecodeOptions,
):
    """(u dtype[T, H], r f32[T]): the sublayer's input, collapsed and normalised, and the streams' factor for `mixes`."""
    return hyper_enter(streams, pre, norm, eps=c.rms_norm_eps, impl=options.impl("hyper_enter"))


def mixes(
    streams,  # dtype[T, M, H]
    r,  # f32[T] from `enter`
    site: HyperSite,
    c: ModelConfig,
    options: DecodeOptions,
):
    """Coefficients of one sublayer from the streams at its input.

    Returns pre f32[T, M] (for the NEXT sublayer), post f32[T, M], comb f32[T, M, M] (comb[j, k]: from stream j to k).
    """
    x = streams.reshape(streams.shape[0], -1)
    project = split_matmul if x.dtype == jnp.bfloat16 else matmul  # TF32 would drop 13 bits of fn
    return hyper_coefficients(
        project(x, site.fn[...]), r, site.scale[...], site.base[...], streams=c.hc_mult,
        iterations=c.hc_sinkhorn_iters, eps=c.hc_eps, impl=options.impl("hyper_coefficients"),
    )  # fmt: skip


def collapse(
    streams,  # dtype[T, M, H]
    pre,  # f32[T, M]
):
    """dtype[T, H]: the sublayer input, one weighted sum of the streams."""
    weighted = lambda s, p: codecs.rounded(jnp.sum(p[..., None] * s.astype(jnp.float32), -2), s.dtype)
    return in_row_tiles(weighted, streams, pre)


def expand(
    streams,  # dtype[T, M, H]
    y,  # dtype[T, H], the sublayer output
    post,  # f32[T, M]
    comb,  # f32[T, M, M]
):
    """dtype[T, M, H]: post[k] * y + sum_j comb[j, k] * streams[j], in fp32, rounded once."""

    def mix(streams, y, post, comb):
        # written out: as a batched product it runs on no tensor core and with its result and operands in memory
        mixed = sum(comb[:, j, :, None] * streams[:, j, None].astype(jnp.float32) for j in range(streams.shape[1]))
        out = codecs.rounded(post[..., None] * y.astype(jnp.float32)[:, None] + mixed, streams.dtype)
        return jax.lax.optimization_barrier(out)  # or XLA keeps a second copy in fp32 for the next site

    return in_row_tiles(mix, streams, y, post, comb)
