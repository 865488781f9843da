"""Scores and selection in one launch after the product, Pallas on Triton: k times the largest of what is left.

A program is one warp and owns a row, whose few hundred scores stay in its registers: each of the k rounds is three integer
reductions over the warp (key, id, bits of the weight), without shared memory or barriers. Same ids as `reference.select`,
ties included; scores are compared as integers of the same order, so that even a row of NaN gets k distinct ids.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import reference

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_EXPERTS = 2048


def _width(experts: int) -> int:
    """Of the parts of a row, which are compared pairwise before each reduction: a power of two, as Triton's arrays are, that
    divides the experts."""
    return min(128, experts & -experts)


def refuses(x, gate, bias, *, k, scale, precision):
    """Why this is not the way for these arguments, or None."""
    del x, bias, k, scale, precision
    e = gate.shape[0]
    if e > MOST_EXPERTS or _width(e) < 16:
        return f"{e} experts, the kernel is for multiples of 16 up to {MOST_EXPERTS}"
    return None


def _body(z_ref, bias_ref, ids_ref, weights_ref, *, experts: int, k: int, scale: float):
    """z_ref f32[slices, T, E], bias_ref f32[E]; ids_ref i32[T, k], weights_ref f32[T, k]: a row a program."""
    from jax.experimental.pallas import triton as plt

    width, none, row = _width(experts), jnp.int32(-(2**31)), pl.program_id(0)
    bits_of = lambda a: jax.lax.bitcast_convert_type(a, jnp.int32)
    scores, keys, ids = [], [], []
    for first in range(0, experts, width):
        part = pl.ds(first, width)
        s = reference.score(functools.reduce(jnp.add, [z_ref[i, row, part] for i in range(z_ref.shape[0])]))
        bits = bits_of(s + bias_ref[part])
        # A NaN of all ones would otherwise have the key of a taken expert.
        keys.append(jnp.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), none + 1))
        scores.append(bits_of(s))
        ids.append(jax.lax.iota(jnp.int32, width) + first)
    over_row = lambda reduce, pair, parts: reduce(functools.reduce(pair, parts))
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(k))
    chosen, weights, total = jnp.zeros_like(lane), jnp.zeros(lane.shape, jnp.float32), jnp.float32(1e-20)
    for round_ in range(k):
        top = over_row(jnp.max, jnp.maximum, keys)
        at = over_row(jnp.min, jnp.minimum, [jnp.where(key == top, i, experts) for key, i in zip(keys, ids, strict=True)])
        here = [i == at for i in ids]
        # A maximum of integers is one instruction over a warp, a sum of floats is ten.
        w = over_row(jnp.max, jnp.maximum, [jnp.where(h, s, none) for h, s in zip(here, scores, strict=True)])
        w = jax.lax.bitcast_convert_type(w, jnp.float32)
        keys = [jnp.where(h, none, key) for h, key in zip(here, keys, strict=True)]
        chosen, weights, total = jnp.where(lane == round_, at, chosen), jnp.where(lane == round_, w, weights), total + w
    rows = jnp.full_like(lane, row)
    plt.store(ids_ref.at[rows, lane], chosen, mask=lane < k)
    plt.store(weights_ref.at[rows, lane], weights / total * scale, mask=lane < k)


@functools.partial(jax.jit, static_argnames=("k", "scale", "interpret"))  # lowered once for all layers
def select(z, bias, *, k: int, scale: float, interpret: bool = False):
    """`reference.select` of `reference.score` of the sum of z f32[slices, T, E] over its slices."""
    from jax.experimental.pallas import triton as plt

    slices, t, e = z.shape
    whole = lambda *shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
    return pl.pallas_call(
        functools.partial(_body, experts=e, k=k, scale=scale),
        out_shape=(jax.ShapeDtypeStruct((t, k), jnp.int32), jax.ShapeDtypeStruct((t, k), jnp.float32)),
        grid=(t,),
        in_specs=[whole(slices, t, e), whole(e)],
        out_specs=(whole(t, k), whole(t, k)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="router_select",
    )(z, bias)


def router(x, gate, bias, *, k: int, scale: float, precision: str):
    """See `api.router`."""
    del precision
    return select(reference.logits(x, gate)[None], bias, k=k, scale=scale)
