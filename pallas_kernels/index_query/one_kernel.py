"""The index query in one launch, Pallas on Triton: a program takes all heads of a row from QB's product to their MXFP4 form.

As XLA fusions the same is a rotation, a maximum, scales, codes and, for a scorer that multiplies values, their decoding,
each through memory; the head weights' rounding and scaling come on top. The row is read where it lies in the product.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..triton_rows import mxfp4_codes, mxfp4_values, refuses_rows, rotated

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_CHANNELS = 2**13  # of all heads: one program holds them in its registers
WARP_CHANNELS = 512  # of all heads: two loads of 16 bytes a lane


def refuses(projected, product, cos, sin, *, heads, dim, form):
    """Why the kernel does not take these arguments, or None."""
    del product, sin
    if projected.dtype != jnp.bfloat16:
        return f"rows are {projected.dtype}, the kernel is for bfloat16"
    if form == "exact":
        return "the queries stay as they are, the kernel rounds them to MXFP4"
    if heads & (heads - 1) or heads * dim > MOST_CHANNELS:
        return f"{heads} heads of {dim} channels, the kernel wants a power of two and at most {MOST_CHANNELS} channels"
    codes = jax.ShapeDtypeStruct((projected.shape[0], heads * dim // 2), jnp.uint8)
    return refuses_rows(dim, cos.shape[1], projected, *([codes] if form == "packed" else []))


def _body(projected, product, cos, sin, *out, heads: int, dim: int, scale: float):
    """Whole arrays. out: payload u8[T, I * J/2] and scales u8[T, I * J/32], or values bf16[T, I * J]; then the weights."""
    row = pl.program_id(0)
    *query, weights = out
    x = projected[row, pl.ds(0, heads * dim)].reshape(heads, dim)
    even, odd = rotated(x, cos, sin, row)
    if len(query) == 2:
        low, high, exponent = mxfp4_codes(even, odd)
        query[0][row, :] = (low | (high << 4)).reshape(-1).astype(jnp.uint8)
        query[1][row, :] = exponent.astype(jnp.uint8)
    else:
        pairs = jnp.stack(mxfp4_values(even, odd), -1)
        query[0][row, :] = pairs.reshape(-1).astype(jnp.bfloat16)
    product = product[row, :].astype(jnp.bfloat16).astype(jnp.float32)
    weights[row, :] = (product * jnp.float32(scale)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("heads", "dim", "form", "interpret"))  # lowered once for all layers
def index_query(projected, product, cos, sin, *, heads: int, dim: int, form: str, interpret: bool = False):
    """See `api.index_query`."""
    from jax.experimental.pallas import triton as plt

    rows, channels = projected.shape[0], heads * dim
    array = jax.ShapeDtypeStruct
    if form == "packed":
        query = array((rows, channels // 2), jnp.uint8), array((rows, channels // 32), jnp.uint8)
    else:
        query = (array((rows, channels), jnp.bfloat16),)
    *query, weights = pl.pallas_call(
        functools.partial(_body, heads=heads, dim=dim, scale=dim**-0.5 * heads**-0.5),
        out_shape=(*query, array((rows, heads), jnp.bfloat16)),
        grid=(rows,),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=max(1, channels // WARP_CHANNELS)),
        name="index_query",
    )(projected, product, cos, sin)
    by_head = [x.reshape(rows, heads, -1) for x in query]
    return tuple(by_head) if form == "packed" else by_head[0], weights
