"""All coefficients of a site in one launch, Pallas on Triton: a thread owns a row, everything stays in its registers.

The data is a few dozen kilobytes; as XLA fusions the same costs a launch for each sum, sigmoid and Sinkhorn iteration.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ARCHES = ("sm_90", "sm_100", "sm_103")
ROWS = 32  # of one program: one warp


def refuses(products, r, scale, base, *, static):
    """Why the kernel does not take these arguments, or None."""
    del r, scale, base, static
    if products.dtype != jnp.float32:
        return f"products are {products.dtype}, the kernel is for float32"
    if products.shape[0] % ROWS:
        return f"{products.shape[0]} rows, the kernel wants a multiple of {ROWS}"
    return None


def sinkhorn(x, iterations: int, eps: float):
    """Rows of entries, each f32[ROWS] (that entry of every matrix of a program) -> the same, doubly normalised."""
    m = len(x)

    def total(values):
        return functools.reduce(jnp.add, values)

    def over_rows(x):
        inverse = [1.0 / (total(row) + eps) for row in x]
        return [[v * inverse[i] for v in row] for i, row in enumerate(x)]

    def over_columns(x):
        inverse = [1.0 / (total([row[j] for row in x]) + eps) for j in range(m)]
        return [[v * inverse[j] for j, v in enumerate(row)] for row in x]

    first = []
    for row in x:
        top = functools.reduce(jnp.maximum, row)
        weight = [jnp.exp(v - top) for v in row]
        inverse = 1.0 / total(weight)
        first.append([w * inverse + eps for w in weight])
    return jax.lax.fori_loop(0, iterations - 1, lambda _, x: over_columns(over_rows(x)), over_columns(first))


def _body(p_ref, r_ref, scale_ref, base_ref, pre_ref, post_ref, comb_ref, *, parts: int, static):
    """p_ref f32[ROWS, parts * N], r_ref f32[ROWS]; every value below is f32[ROWS], one coefficient of each row."""
    m, n = static.streams, static.width
    r = r_ref[:]

    def a(i):
        y = p_ref[:, (parts - 1) * n + i]
        for part in reversed(range(parts - 1)):
            y = y + p_ref[:, part * n + i]
        return y * r * scale_ref[min(i // m, 2)] + base_ref[i]

    sigmoid = lambda x: 1.0 / (1.0 + jnp.exp(-x))
    for j in range(m):
        pre_ref[:, j] = sigmoid(a(j)) + static.eps
        post_ref[:, j] = 2.0 * sigmoid(a(m + j))
    comb = sinkhorn([[a(2 * m + j * m + k) for k in range(m)] for j in range(m)], static.iterations, static.eps)
    for j, row in enumerate(comb):
        for k, v in enumerate(row):
            comb_ref[:, j * m + k] = v


@functools.partial(jax.jit, static_argnames=("static", "interpret"))  # lowered once for all layers
def hyper_coefficients(products, r, scale, base, *, static, interpret: bool = False):
    """See `api.hyper_coefficients`. Within a few ulps of the reference: divisions are products with a reciprocal."""
    from jax.experimental.pallas import triton as plt

    t, width = products.shape
    m, n = static.streams, static.width
    rows = lambda *shape: pl.BlockSpec((ROWS, *shape), lambda i: (i, *[0] * len(shape)))
    whole = lambda size: pl.BlockSpec((size,), lambda i: (0,))
    shape = lambda size: jax.ShapeDtypeStruct((t, size), jnp.float32)
    pre, post, comb = pl.pallas_call(
        functools.partial(_body, parts=width // n, static=static),
        out_shape=(shape(m), shape(m), shape(m * m)),
        grid=(t // ROWS,),
        in_specs=[rows(width), rows(), whole(3), whole(n)],
        out_specs=(rows(m), rows(m), rows(m * m)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="hyper_coefficients",
    )(products, r, scale, base)
    return pre, post, comb.reshape(t, m, m)
