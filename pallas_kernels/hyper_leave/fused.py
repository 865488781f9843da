"""The exit of a site with the next site's products, Pallas on Triton: the streams are read once and written once.

Apart, the same is three passes over the new streams: they are written, read by the products with fn, and read by the
entry of the next site, which squares and collapses them. Here a program owns a tile of rows and a chunk of channels; it
leaves the collapsed row, and the products and the squares of its chunk as partial sums. `finish` is the rest, a
launch that reads one stream's worth: the sums over the chunks and the norm.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .reference import Ahead, split

ARCHES = ("sm_90", "sm_100", "sm_103")
BY_NAME_ONLY = "it has not run on a GPU yet: interpreted and compiled without one, never timed"
ROWS = 32  # of one program: fn is read once for each tile of rows
CHUNK = 256  # channels of one program: 240 programs in a verify step of H = 5120, two for each multiprocessor
STEP = 32  # channels at a time
WARPS, STAGES = 8, 3  # with two stages it takes 168 registers: one program for a multiprocessor
WIDTH = 1024  # channels at a time in `finish`


def _rows(t: int) -> int:
    return ROWS if t % ROWS == 0 else ROWS // 2


def _part(h: int, most: int) -> int:
    """The largest power of two up to `most` that divides h."""
    return min(most, h & -h)


def refuses(streams, y, post, comb, pre, fn):
    """Why the kernel does not take these arguments, or None."""
    del y, post, comb, pre
    t, m, h = streams.shape
    if streams.dtype != jnp.bfloat16:
        return f"streams are {streams.dtype}, the kernel is for bfloat16"
    if m not in (2, 4):
        return f"{m} streams, the kernel is for 2 or 4"
    if t % (ROWS // 2):
        return f"{t} rows, the kernel wants a multiple of {ROWS // 2}"
    if _part(h, CHUNK) < STEP:
        return f"rows of {h} channels, the kernel wants a multiple of {STEP}"
    return None


def _interleaved(values):
    """M times dtype[R, C] -> dtype[R, C, ...]: the M values of a channel side by side, in order."""
    if len(values) == 1:
        return values[0]
    return jnp.stack([_interleaved(values[0::2]), _interleaved(values[1::2])], -1)


def _total(x):
    """f32[R, C] -> f32[R, 1], C a power of two: neighbours added, then their sums, and so on. Triton's own order depends on
    how many rows a program has."""
    while x.shape[1] > 1:
        x = jnp.sum(x.reshape(x.shape[0], -1, 2), 2)
    return x


def _body(streams, y, post, comb, pre, fn, out, x, partial, *, m: int):
    """streams, out bf16[R, M, C], y, x bf16[R, C], post, pre f32[R, M], comb f32[R, M * M], fn bf16[N, C * M],
    partial f32[1, R, P]: column N is the sum of squares."""
    from jax.experimental.pallas import triton as plt

    (rows, chunk), n, columns = y.shape, fn.shape[0], partial.shape[-1]
    p, q = [post[:, k][:, None] for k in range(m)], [pre[:, k][:, None] for k in range(m)]
    a = [[comb[:, j * m + k][:, None] for k in range(m)] for j in range(m)]
    coefficient, of_fn = (jax.lax.broadcasted_iota(jnp.int32, (columns, STEP * m), axis) for axis in (0, 1))

    def step(i, carry):
        products, squares = carry
        at = pl.ds(i * STEP, STEP)
        s = [streams[:, j, at].astype(jnp.float32) for j in range(m)]
        own = y[:, at].astype(jnp.float32)
        weights = plt.load(fn.at[coefficient, i * (STEP * m) + of_fn], mask=coefficient < n, other=0.0)
        collapsed, made = jnp.zeros((rows, STEP), jnp.float32), []
        for k in range(m):
            mixed = functools.reduce(jnp.add, [a[j][k] * s[j] for j in range(m)])
            v = (p[k] * own + mixed).astype(jnp.bfloat16)
            out[:, k, at] = v
            f = v.astype(jnp.float32)
            collapsed += q[k] * f
            squares += f * f
            made.append(v)
        x[:, at] = collapsed.astype(jnp.bfloat16)
        # one product for all: Triton gives each of several in one loop the same rows in every warp
        products += jax.lax.dot_general(_interleaved(made).reshape(rows, STEP * m), weights, (((1,), (1,)), ((), ())),
                                        preferred_element_type=jnp.float32)  # fmt: skip
        return products, squares

    start = jnp.zeros((rows, columns), jnp.float32), jnp.zeros((rows, STEP), jnp.float32)
    products, squares = jax.lax.fori_loop(0, chunk // STEP, step, start)
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    partial[0, :, :] = jnp.where(column == n, _total(squares), products)


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def hyper_leave(streams, y, post, comb, pre, fn, *, interpret: bool = False):
    """See `api.hyper_leave`. A row's bits do not depend on the rows beside it."""
    from jax.experimental.pallas import triton as plt

    t, m, h = streams.shape
    parts = split(fn)
    n, rows, chunk = parts.shape[0], _rows(t), _part(h, CHUNK)
    columns = 1 << n.bit_length()  # the products, the squares, and what makes a power of two
    of_streams = pl.BlockSpec((rows, m, chunk), lambda i, c: (i, 0, c))
    of_row = pl.BlockSpec((rows, chunk), lambda i, c: (i, c))
    of_mix = lambda width: pl.BlockSpec((rows, width), lambda i, c: (i, 0))
    out, x, partial = pl.pallas_call(
        functools.partial(_body, m=m),
        out_shape=(streams, y, jax.ShapeDtypeStruct((h // chunk, t, columns), jnp.float32)),
        grid=(t // rows, h // chunk),
        in_specs=[of_streams, of_row, of_mix(m), of_mix(m * m), of_mix(m), pl.BlockSpec((n, chunk * m), lambda i, c: (0, c))],
        out_specs=(of_streams, of_row, pl.BlockSpec((1, rows, columns), lambda i, c: (c, i, 0))),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        name="hyper_leave",
    )(streams, y, post, comb.reshape(t, m * m), pre, parts.reshape(n, m, h).swapaxes(1, 2).reshape(n, h * m))
    return out, Ahead(x, partial)


def _finish_body(x, partial, weight, u, r, products, *, m: int, eps: float):
    """x bf16[1, H], partial f32[chunks, 1, P], weight bf16[H]; u bf16[1, H], r f32[1], products f32[1, N]."""
    from jax.experimental.pallas import triton as plt

    (_, h), (chunks, _, columns), n = x.shape, partial.shape, products.shape[1]
    width = _part(h, WIDTH)
    grid = 1 << (chunks - 1).bit_length(), columns
    chunk, column = (jax.lax.broadcasted_iota(jnp.int32, grid, axis) for axis in (0, 1))
    sums = jnp.sum(plt.load(partial.at[chunk, 0, column], mask=(chunk < chunks) & (column <= n), other=0.0), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (columns,), 0)
    plt.store(products.at[0, column], sums, mask=column < n)
    r[0] = jax.lax.rsqrt(jnp.sum(jnp.where(column == n, sums, 0.0)) / (m * h) + eps)
    kept, squares = [], jnp.zeros(width, jnp.float32)
    for i in range(h // width):
        kept.append(x[0, pl.ds(i * width, width)].astype(jnp.float32))
        squares += kept[-1] * kept[-1]
    factor = jax.lax.rsqrt(jnp.sum(squares) / h + eps)
    for i, v in enumerate(kept):
        part = pl.ds(i * width, width)
        u[0, part] = (v * factor * weight[part].astype(jnp.float32)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("streams", "eps", "interpret"))
def finish(ahead, weight, *, streams: int, eps: float, interpret: bool = False):
    """See `api.enter_next`; weight bf16[H] or f32[H], streams: M."""
    from jax.experimental.pallas import triton as plt

    x, partial = ahead.x, ahead.partial
    (t, h), (chunks, _, columns), n = x.shape, partial.shape, 3 * streams * (2 + streams)
    of_row = lambda width: pl.BlockSpec((1, width), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(_finish_body, m=streams, eps=eps),
        out_shape=(x, jax.ShapeDtypeStruct((t,), jnp.float32), jax.ShapeDtypeStruct((t, n), jnp.float32)),
        grid=(t,),
        in_specs=[of_row(h), pl.BlockSpec((chunks, 1, columns), lambda i: (0, i, 0)), pl.BlockSpec((h,), lambda i: (0,))],
        out_specs=(of_row(h), pl.BlockSpec((1,), lambda i: (i,)), of_row(n)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="hyper_finish",
    )(x, partial, weight)
