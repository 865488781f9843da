"""All coefficients of a site in one launch, Pallas on Triton: a program of one warp owns a row, a thread its whole matrix.

The data is a few dozen kilobytes and the arithmetic a chain of 40 normalisations, each of which waits for the one before:
what counts is the time of one link. All 16 numbers of a row in registers make it some 45 cycles; sums between lanes would
make it twice that. A warp for each row spreads the chains over all multiprocessors and reads every line once, though its
32 threads all compute the same.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..triton_f32 import reciprocal

ARCHES = ("sm_90", "sm_100", "sm_103")


def refuses(products, r, scale, base, *, static):
    """Why the kernel does not take these arguments, or None."""
    del r, scale, base, static
    return None if products.dtype == jnp.float32 else f"products are {products.dtype}, the kernel is for float32"


def _total(values):
    """Their sum in pairs: fewer additions wait for one another."""
    values = list(values)
    while len(values) > 1:
        odd = values[len(values) & ~1 :]
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def sinkhorn(x, iterations: int, eps: float, inverse):
    """Rows of entries, each f32[1] or the same entry of many matrices -> the same, doubly normalised. inverse: 1 / x."""

    def over_rows(x):
        factors = [inverse(_total(row) + eps) for row in x]
        return [[v * f for v in row] for row, f in zip(x, factors, strict=True)]

    def over_columns(x):
        factors = [inverse(_total(column) + eps) for column in zip(*x, strict=True)]
        return [[v * f for v, f in zip(row, factors, strict=True)] for row in x]

    first = []
    for row in x:
        top = functools.reduce(jnp.maximum, row)
        weight = [jnp.exp(v - top) for v in row]
        factor = inverse(_total(weight))
        first.append([w * factor + eps for w in weight])
    return jax.lax.fori_loop(0, iterations - 1, lambda _, x: over_columns(over_rows(x)), over_columns(first))


def write_coefficients(y, scale, base, pre, post, comb, *, static, interpret: bool):
    """Write one row's coefficients. y: N values f32[1], the products times r; refs scale f32[3], base f32[N]; pre, post
    f32[1, M], comb f32[1, M * M]."""
    m, inverse = static.streams, functools.partial(reciprocal, interpret=interpret)
    a = [v * scale[min(i // m, 2)] + base[i] for i, v in enumerate(y)]
    sigmoid = lambda x: inverse(1.0 + jnp.exp(-jnp.maximum(x, -80.0)))  # or the exponential has no reciprocal
    for j in range(m):
        pre[0, pl.ds(j, 1)] = sigmoid(a[j]) + static.eps
        post[0, pl.ds(j, 1)] = 2.0 * sigmoid(a[m + j])
    rows = [a[m * (2 + j) : m * (3 + j)] for j in range(m)]
    for j, row in enumerate(sinkhorn(rows, static.iterations, static.eps, inverse)):
        for k, v in enumerate(row):
            comb[0, pl.ds(j * m + k, 1)] = v


def _body(products, r, scale, base, pre, post, comb, *, parts: int, static, interpret: bool):
    """products f32[1, parts * N], r f32[1]; the rest as in `write_coefficients`."""
    n = static.width
    # every load before the first use: none waits for another
    loaded = [[products[0, pl.ds(part * n + i, 1)] for part in reversed(range(parts))] for i in range(n)]
    y = [functools.reduce(jnp.add, values) * r[0] for values in loaded]
    write_coefficients(y, scale, base, pre, post, comb, static=static, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("static", "interpret"))  # lowered once for all layers
def hyper_coefficients(products, r, scale, base, *, static, interpret: bool = False):
    """See `api.hyper_coefficients`. Within a few ulps of the reference: divisions are products with a reciprocal."""
    from jax.experimental.pallas import triton as plt

    t, width = products.shape
    m, n = static.streams, static.width
    row = lambda size: pl.BlockSpec((1, size), lambda i: (i, 0))
    whole = lambda size: pl.BlockSpec((size,), lambda i: (0,))
    shape = lambda size: jax.ShapeDtypeStruct((t, size), jnp.float32)
    pre, post, comb = pl.pallas_call(
        functools.partial(_body, parts=width // n, static=static, interpret=interpret),
        out_shape=(shape(m), shape(m), shape(m * m)),
        grid=(t,),
        in_specs=[row(width), pl.BlockSpec((1,), lambda i: (i,)), whole(3), whole(n)],
        out_specs=(row(m), row(m), row(m * m)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="hyper_coefficients",
    )(products, r, scale, base)
    return pre, post, comb.reshape(t, m, m)
