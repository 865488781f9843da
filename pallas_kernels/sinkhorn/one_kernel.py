"""Sinkhorn in one launch, Pallas on Triton: a thread owns a matrix, all iterations stay in its registers.

As XLA fusions the loop costs four launches an iteration; the data is a few kilobytes, so launches are all it costs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ARCHES = ("sm_90", "sm_100", "sm_103")
ROWS = 32  # matrices of one program: one warp


def refuses(logits, *, iterations, eps):
    """Why the kernel does not take these arguments, or None."""
    del iterations, eps
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype}, the kernel is for float32"
    if logits.shape[0] % ROWS:
        return f"{logits.shape[0]} matrices, the kernel wants a multiple of {ROWS}"
    return None


def normalise(x, iterations: int, eps: float):
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


def _body(x_ref, o_ref, *, m: int, iterations: int, eps: float):
    """x_ref, o_ref: f32[ROWS, M * M]."""
    x = [[x_ref[:, i * m + j] for j in range(m)] for i in range(m)]
    for i, row in enumerate(normalise(x, iterations, eps)):
        for j, v in enumerate(row):
            o_ref[:, i * m + j] = v


@functools.partial(jax.jit, static_argnames=("iterations", "eps", "interpret"))  # lowered once for all layers
def sinkhorn(logits, *, iterations: int, eps: float, interpret: bool = False):
    """See `api.sinkhorn`. Divisions are products with a reciprocal: each differs from the reference by an ulp or two."""
    from jax.experimental.pallas import triton as plt

    t, m, _ = logits.shape
    block = pl.BlockSpec((ROWS, m * m), lambda i: (i, 0))
    out = pl.pallas_call(
        functools.partial(_body, m=m, iterations=iterations, eps=eps),
        out_shape=jax.ShapeDtypeStruct((t, m * m), jnp.float32),
        grid=(t // ROWS,),
        in_specs=[block],
        out_specs=block,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="sinkhorn",
    )(logits.reshape(t, m * m))
    return out.reshape(t, m, m)
