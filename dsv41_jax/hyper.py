"""Single-pass hyper-connections, mHC (spec/model.md section 3). Coefficients in fp32, streams in the activation dtype."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import HyperSite
from pallas_kernels import codecs
from pallas_kernels.hyper_enter.api import hyper_enter
from pallas_kernels.hyper_leave.api import Ahead, enter_next, hyper_leave
from pallas_kernels.hyper_leave.reference import expand
from pallas_kernels.row_tiles import in_row_tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """Between two sublayers. Whoever changes the streams makes a new one, with nothing ahead.

    streams,  # dtype[T, M, H]
    pre,      # f32[T, M] from the sublayer before
    ahead,    # what the sublayer before made for the entry of the next one, or None
    """

    streams: jax.Array
    pre: jax.Array
    ahead: Ahead | None = None


def enter(
    at: Residual,
    norm,  # bf16[H]
    site: HyperSite,
    c: ModelConfig,
    options: DecodeOptions,
    round_trip: bool = False,
):
    """The entry of a sublayer: u dtype[T, H], its input, collapsed with the PREVIOUS `pre` and normalised; u through FP8,
    dtype[T, H], if asked for and where it costs no pass of its own, else None; and the coefficients of the streams there:
    pre f32[T, M] (for the NEXT sublayer), post f32[T, M], comb f32[T, M, M] (comb[j, k]: from stream j to k)."""
    return enter_next(
        at.streams, at.ahead, at.pre, site.fn[...], norm, site.scale[...], site.base[...], eps=c.rms_norm_eps,
        iterations=c.hc_sinkhorn_iters, mix_eps=c.hc_eps, round_trip=round_trip, enter_impl=options.impl("hyper_enter"),
        coefficients_impl=options.impl("hyper_coefficients"),
    )  # fmt: skip


def enter_last(
    at: Residual,
    norm,  # bf16[H]
    c: ModelConfig,
    options: DecodeOptions,
):
    """dtype[T, H]: the streams collapsed and normalised for the head."""
    return hyper_enter(at.streams, at.pre, norm, eps=c.rms_norm_eps, impl=options.impl("hyper_enter"))[0]


def leave(
    at: Residual,
    y,  # dtype[T, H], the sublayer output
    pre,  # f32[T, M]
    post,  # f32[T, M]
    comb,  # f32[T, M, M]
    following: HyperSite | None,
    options: DecodeOptions,
):
    """The residual after a sublayer: `expand`. following: the site that reads these streams next, None if none does."""
    if following is None:
        return Residual(expand(at.streams, y, post, comb), pre)
    streams, ahead = hyper_leave(at.streams, y, post, comb, pre, following.fn[...], impl=options.impl("hyper_leave"))
    return Residual(streams, pre, ahead)


def collapse(
    streams,  # dtype[T, M, H]
    pre,  # f32[T, M]
):
    """dtype[T, H]: the sublayer input, one weighted sum of the streams."""
    weighted = lambda s, p: codecs.rounded(jnp.sum(p[..., None] * s.astype(jnp.float32), -2), s.dtype)
    return in_row_tiles(weighted, streams, pre)
