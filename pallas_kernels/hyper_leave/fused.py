"""The exit of a site with all that the next one reads of the streams, Pallas on Triton: two launches from site to site.

Apart, the same is three passes over the new streams: they are written, read by the products with fn, and read by the
entry of the next site, which squares and collapses them. Here a program owns a tile of rows and a chunk of channels; it
leaves the collapsed row and, as partial sums of its chunk, the products, the squares and those of the collapsed row. `finish`
is the rest, a launch that reads one stream's worth: the sums over the chunks, the norm, where wanted through FP8 too, and the
coefficients. With the squares at hand a row's norm is cut into pieces: programs of one warp with few registers, many of them
on a multiprocessor.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import GROUP, cdiv
from ..hyper_coefficients.one_kernel import write_coefficients
from ..triton_f32 import multiply_add, to_bf16
from ..triton_rows import fp8_rounded
from .reference import PARTS, Ahead, is_split, split

ARCHES = ("sm_90", "sm_100", "sm_103")
ROWS = 64  # of one program: fn is read once for each tile of rows
CHUNK = 256  # channels of one program: 120 programs in a verify step of H = 5120, one for each multiprocessor
STEP = 32  # channels at a time
WARPS, STAGES = 8, 4
WIDTH = 1024  # channels of one program of `finish`


def _part(h: int, most: int) -> int:
    """The largest power of two up to `most` that divides h."""
    return min(most, h & -h)


def refuses(streams, y, post, comb, pre, fn):
    """Why the kernel does not take these arguments, or None."""
    del y, post, comb, pre, fn
    _, m, h = streams.shape
    if streams.dtype != jnp.bfloat16:
        return f"streams are {streams.dtype}, the kernel is for bfloat16"
    if m not in (2, 4):
        return f"{m} streams, the kernel is for 2 or 4"
    if _part(h, CHUNK) < STEP:
        return f"rows of {h} channels, the kernel wants a multiple of {STEP}"
    return None


def _side_by_side(values):
    """M times dtype[R, C] -> dtype[R, M, C], M a power of two."""
    if len(values) == 1:
        return values[0][:, None]
    half = [_side_by_side(values[i::2]) for i in range(2)]
    joined = jnp.stack(half, -1)  # [R, M / 2, C, 2]: the last axis is the lowest bit of the stream
    return joined.transpose(0, 1, 3, 2).reshape(joined.shape[0], len(values), -1)


def _total(x):
    """f32[R, C] -> f32[R, 1], C a power of two: neighbours added, then their sums, and so on. Triton's own order depends on
    how many rows a program has."""
    while x.shape[1] > 1:
        x = jnp.sum(x.reshape(x.shape[0], -1, 2), 2)
    return x


def _rows_of(total: int, rows: int):
    """(read, write) of a tile of `rows` rows, of which the last of `total` may have less: what is missing reads 0.

    read(ref, *at) and write(ref, value, *at): at are integers and pl.ds, of the axes after the first."""
    from jax.experimental.pallas import triton as plt

    first = pl.program_id(0) * rows

    def masked(ref, at):
        ranges = [pl.ds(i, 1) if isinstance(i, int) else i for i in at]
        shape = rows, *[r.size for r in ranges]
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first
        return ref.at[(slice(None), *ranges)], row < total, shape

    def read(ref, *at):
        if total % rows == 0:
            return ref[(slice(None), *at)]
        there, mask, _ = masked(ref, at)
        return plt.load(there, mask=mask, other=0.0).reshape(rows, *[r.size for r in at if not isinstance(r, int)])

    def write(ref, value, *at):
        if total % rows == 0:
            ref[(slice(None), *at)] = value
        else:
            there, mask, shape = masked(ref, at)
            plt.store(there, value.reshape(shape), mask=mask)

    return read, write


def _body(streams, y, post, comb, pre, fn, out, x, partial, *, total: int, h: int, interpret: bool):
    """streams, out bf16[R, M, C], y, x bf16[R, C], post, pre f32[R, M], comb f32[R, M * M], fn bf16[PARTS * N, M * H],
    partial f32[R, P] as in `Ahead`. total: rows of the batch."""
    from jax.experimental.pallas import triton as plt

    fma, bf16 = (functools.partial(f, interpret=interpret) for f in (multiply_add, to_bf16))
    (rows, m, chunk), n, columns = streams.shape, fn.shape[0] // PARTS, partial.shape[-1]
    read, write = _rows_of(total, rows)
    of_row = lambda ref, k: read(ref, k)[:, None]
    p, q = [of_row(post, k) for k in range(m)], [of_row(pre, k) for k in range(m)]
    a = [[of_row(comb, j * m + k) for k in range(m)] for j in range(m)]
    # the three parts of a coefficient and what makes four are neighbours, so that their sums stay in one warp
    coefficient, of_fn = (jax.lax.broadcasted_iota(jnp.int32, (4 * columns, m * STEP), axis) for axis in (0, 1))
    part, coefficient = coefficient & 3, coefficient >> 2
    row, there = part * n + coefficient, (part < PARTS) & (coefficient < n)
    first = pl.program_id(1) * chunk + jax.lax.div(of_fn, STEP) * h + jax.lax.rem(of_fn, STEP)

    def step(i, carry):
        products, squares, own_squares = carry
        at = pl.ds(i * STEP, STEP)
        s = [read(streams, j, at).astype(jnp.float32) for j in range(m)]
        own = read(y, at).astype(jnp.float32)
        weights = plt.load(fn.at[row, first + i * STEP], mask=there, other=0.0)
        collapsed, made = jnp.zeros((rows, STEP), jnp.float32), []
        for k in range(m):
            mixed = a[0][k] * s[0]
            for j in range(1, m):
                mixed = fma(a[j][k], s[j], mixed)
            v = bf16(fma(p[k], own, mixed))
            write(out, v, k, at)
            f = v.astype(jnp.float32)
            collapsed = fma(q[k], f, collapsed)
            squares = fma(f, f, squares)
            made.append(v)
        u = bf16(collapsed)
        write(x, u, at)
        f = u.astype(jnp.float32)
        own_squares = fma(f, f, own_squares)
        # one product for all: Triton gives each of several in one loop the same rows in every warp
        products += jax.lax.dot_general(weights, _side_by_side(made).reshape(rows, m * STEP), (((1,), (1,)), ((), ())),
                                        preferred_element_type=jnp.float32)  # fmt: skip
        return products, squares, own_squares

    zeros = jnp.zeros((rows, STEP), jnp.float32)
    start = jnp.zeros((4 * columns, rows), jnp.float32), zeros, zeros
    products, squares, own_squares = jax.lax.fori_loop(0, chunk // STEP, step, start)
    products = jnp.sum(jnp.sum(products.reshape(columns, 2, 2, rows), 1), 1)  # top + smallest, + middle
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    made = jnp.where(column == n, _total(squares), products.T)
    write(partial, jnp.where(column == n + 1, _total(own_squares), made), pl.ds(0, columns))


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def hyper_leave(streams, y, post, comb, pre, fn, *, interpret: bool = False):
    """See `api.hyper_leave`. A row's bits do not depend on the rows beside it."""
    from jax.experimental.pallas import triton as plt

    t, m, h = streams.shape
    parts = fn if is_split(fn) else split(fn)
    n, chunk = parts.shape[0], _part(h, CHUNK)
    columns = 1 << (n // PARTS + 1).bit_length()  # the products, two sums of squares, and what makes a power of two
    of_streams = pl.BlockSpec((ROWS, m, chunk), lambda i, c: (i, 0, c))
    of_row = pl.BlockSpec((ROWS, chunk), lambda i, c: (i, c))
    of_mix = lambda width: pl.BlockSpec((ROWS, width), lambda i, c: (i, 0))
    out, x, partial = pl.pallas_call(
        functools.partial(_body, total=t, h=h, interpret=interpret),
        out_shape=(streams, y, jax.ShapeDtypeStruct((h // chunk, t, columns), jnp.float32)),
        grid=(cdiv(t, ROWS), h // chunk),
        in_specs=[of_streams, of_row, of_mix(m), of_mix(m * m), of_mix(m), pl.BlockSpec((n, m * h), lambda i, c: (0, 0))],
        out_specs=(of_streams, of_row, pl.BlockSpec((None, ROWS, columns), lambda i, c: (c, i, 0))),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        name="hyper_leave",
    )(streams, y, post, comb.reshape(t, m * m), pre, parts)
    return out, Ahead(x, partial)


def _normalise(x, partial, weight, u, rounded, *, column: int, h: int, eps: float):
    """u bf16[1, W]: x bf16[1, W], a piece of a row, normalised; rounded bf16[1, W] or None: u through FP8. column: of the
    row's squares in partial f32[chunks, 1, P]."""
    from jax.experimental.pallas import triton as plt

    chunks = partial.shape[0]
    chunk = jax.lax.broadcasted_iota(jnp.int32, (1 << (chunks - 1).bit_length(),), 0)
    squares = plt.load(partial.at[chunk, 0, jnp.full_like(chunk, column)], mask=chunk < chunks, other=0.0)
    v, w = x[0, :].astype(jnp.float32), weight[...]
    factor = jax.lax.rsqrt(jnp.sum(squares) / h + eps)
    y = (v * factor * w.astype(jnp.float32)).astype(jnp.bfloat16)
    u[0, :] = y
    if rounded is not None:
        rounded[0, :] = fp8_rounded(y.astype(jnp.float32).reshape(-1, GROUP)).reshape(y.shape)


def _finish_body(x, partial, weight, scale, base, *out, static, eps: float, h: int, interpret: bool):
    """x bf16[1, W], partial f32[chunks, 1, P], weight bf16[W], scale f32[3], base f32[N]; out: u bf16[1, W], pre, post
    f32[1, M], comb f32[1, M * M] and, if asked for, rounded bf16[1, W]. A row has a program for its coefficients and one
    for each piece of W channels; none waits for another."""
    u, pre, post, comb, *rounded = out
    n = static.width

    @pl.when(pl.program_id(1) == 0)
    def _():
        affine = [scale[i] for i in range(3)], [base[i] for i in range(n)]  # loaded beside the sums, not after them
        sums = functools.reduce(jnp.add, [partial[c, 0, :] for c in range(partial.shape[0])])
        column = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
        alone = lambda k: jnp.broadcast_to(jnp.sum(jnp.where(column == k, sums, 0.0)), (1,))
        r = jax.lax.rsqrt(alone(n) / (static.streams * h) + eps)
        write_coefficients([alone(k) * r for k in range(n)], *affine, pre, post, comb, static=static, interpret=interpret)

    @pl.when(pl.program_id(1) > 0)
    def _():
        _normalise(x, partial, weight, u, rounded[0] if rounded else None, column=n + 1, h=h, eps=eps)


@functools.partial(jax.jit, static_argnames=("static", "eps", "round_trip", "interpret"))
def finish(ahead, weight, scale, base, *, static, eps: float, round_trip: bool = False, interpret: bool = False):
    """See `api.enter_next`; weight bf16[H] or f32[H], static: hyper_coefficients.api.Static."""
    from jax.experimental.pallas import triton as plt

    x, partial = ahead.x, ahead.partial
    (t, h), (chunks, _, columns), m = x.shape, partial.shape, static.streams
    width = _part(h, WIDTH)
    piece = lambda c: jnp.maximum(c - 1, 0)  # of the row: the first program makes the coefficients
    of_row = pl.BlockSpec((1, width), lambda i, c: (i, piece(c)))
    of_mix = lambda width: pl.BlockSpec((1, width), lambda i, _: (i, 0))
    whole = lambda size: pl.BlockSpec((size,), lambda i, _: (0,))
    shape = lambda width: jax.ShapeDtypeStruct((t, width), jnp.float32)
    u, pre, post, comb, *rounded = pl.pallas_call(
        functools.partial(_finish_body, static=static, eps=eps, h=h, interpret=interpret),
        out_shape=(x, shape(m), shape(m), shape(m * m), *[x] * round_trip),
        grid=(t, 1 + h // width),
        in_specs=[of_row, pl.BlockSpec((chunks, 1, columns), lambda i, _: (0, i, 0)),
                  pl.BlockSpec((width,), lambda i, c: (piece(c),)), whole(3), whole(static.width)],
        out_specs=(of_row, of_mix(m), of_mix(m), of_mix(m * m), *[of_row] * round_trip),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="hyper_finish",
    )(x, partial, weight, scale, base)
    return u, *rounded, pre, post, comb.reshape(t, m, m)
