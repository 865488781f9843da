"""The exit of a site in plain jnp, and what the entry of the next one computes from it (spec/model.md section 3)."""

import dataclasses

import jax
import jax.numpy as jnp

from .. import codecs
from ..row_ops import matmul
from ..row_tiles import in_row_tiles

PARTS = 3  # bf16 numbers of a weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
    """What the next site needs of the streams, made while they were at hand.

    x,        # bf16[T, H]: the streams collapsed with the exit's `pre`
    partial,  # f32[chunks, T, >= N + 2]: partial sums of streams @ fn^T, in column N of the streams' squares, in column
              # N + 1 of those of x; what lies beyond is undefined
    """

    x: jax.Array
    partial: jax.Array


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


def split(fn):
    """f32[N, I] -> bf16[3 * N, I]: three parts of every weight whose sum it is, the smallest last. fp32 products have no
    tensor core, and 24 significant bits are exactly three bf16 numbers (TF32 would drop 13 of them)."""
    top = codecs.rounded(fn, jnp.bfloat16)
    rest = fn - top.astype(jnp.float32)
    middle = codecs.rounded(rest, jnp.bfloat16)
    return jnp.concatenate([top, middle, codecs.rounded(rest - middle.astype(jnp.float32), jnp.bfloat16)])


def is_split(fn) -> bool:
    """Whether fn is held as the three parts that `split` makes."""
    return fn.dtype == jnp.bfloat16


def joined(parts):
    """bf16[3 * N, I] of `split` -> f32[N, I]: the weights that it was given, to the last bit down to 2**-102 (of what is
    smaller the last part may be subnormal, which not every processor adds)."""
    top, middle, bottom = jnp.split(parts.astype(jnp.float32), PARTS)
    return top + (middle + bottom)


def products(
    streams,  # dtype[T, M, H]
    fn,  # f32[N, M * H], N small, or bf16[3 * N, M * H] of `split`
):
    """f32[T, n * N]: n parts whose sum is streams @ fn^T to fp32 accuracy, the smallest last; three for bf16 streams."""
    x = streams.reshape(streams.shape[0], -1)
    if x.dtype == jnp.bfloat16:
        weight = fn if is_split(fn) else split(fn)
    else:
        weight = joined(fn) if is_split(fn) else fn
    return matmul(x, weight, jnp.float32)


def hyper_leave(streams, y, post, comb, pre, fn):
    """See `api.hyper_leave`: the streams alone, nothing ahead."""
    del pre, fn
    return expand(streams, y, post, comb), None
