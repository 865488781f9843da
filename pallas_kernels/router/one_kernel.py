"""Scores and selection in one launch after the product, Pallas on Triton: k times the largest of what is left.

A program is one warp and owns a row, whose few hundred scores stay in its registers: each of the k rounds is a maximum over
the warp, without shared memory or barriers. Same ids as
`reference.select`, ties included; scores are compared as integers of the same order, so that even a row of NaN gets k
distinct ids.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import reference

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_EXPERTS = 2048


def _width(experts: int) -> int:
    """The largest power of two up to 512 that divides the experts: Triton's arrays are powers of two."""
    return min(512, experts & -experts)


def refuses(x, gate, bias, *, k, scale, precision):
    """Why this is not the way for these arguments, or None."""
    del x, bias, k, scale, precision
    e = gate.shape[0]
    if e > MOST_EXPERTS or _width(e) < 16:
        return f"{e} experts, the kernel is for multiples of 16 up to {MOST_EXPERTS}"
    return None


def _body(z_ref, bias_ref, ids_ref, weights_ref, *, experts: int, k: int, scale: float):
    """z_ref f32[slices, 1, E], bias_ref f32[E]; ids_ref i32[1, k], weights_ref f32[1, k]."""
    width = _width(experts)
    none = jnp.int32(-(2**31))
    scores, keys, ids, taken = [], [], [], []
    for first in range(0, experts, width):
        part = pl.ds(first, width)
        s = reference.score(functools.reduce(jnp.add, [z_ref[i, :, part] for i in range(z_ref.shape[0])]))
        bits = jax.lax.bitcast_convert_type(s + bias_ref[part][None, :], jnp.int32)
        scores.append(s)
        keys.append(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        ids.append(jax.lax.broadcasted_iota(jnp.int32, (1, width), 1) + first)
        taken.append(jnp.zeros((1, width), jnp.int32))
    over_row = lambda reduce, pair, parts: functools.reduce(pair, [reduce(p, axis=1) for p in parts])
    chosen = []
    for _ in range(k):
        left = [jnp.where(t > 0, none, key) for key, t in zip(keys, taken, strict=True)]
        top = over_row(jnp.max, jnp.maximum, left)[:, None]
        at = [jnp.where((key == top) & (t == 0), i, experts) for key, t, i in zip(left, taken, ids, strict=True)]
        at = over_row(jnp.min, jnp.minimum, at)
        here = [i == at[:, None] for i in ids]
        taken = [jnp.where(h, 1, t) for h, t in zip(here, taken, strict=True)]
        w = [jnp.where(h, s, 0.0) for h, s in zip(here, scores, strict=True)]
        chosen.append((at, over_row(jnp.sum, jnp.add, w)))
    total = functools.reduce(jnp.add, [w for _, w in chosen]) + jnp.float32(1e-20)
    for i, (at, w) in enumerate(chosen):
        ids_ref[:, i] = at
        weights_ref[:, i] = w / total * scale


@functools.partial(jax.jit, static_argnames=("k", "scale", "interpret"))  # lowered once for all layers
def select(z, bias, *, k: int, scale: float, interpret: bool = False):
    """`reference.select` of `reference.score` of the sum of z f32[slices, T, E] over its slices."""
    from jax.experimental.pallas import triton as plt

    slices, t, e = z.shape
    row = lambda width: pl.BlockSpec((1, width), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(_body, experts=e, k=k, scale=scale),
        out_shape=(jax.ShapeDtypeStruct((t, k), jnp.int32), jax.ShapeDtypeStruct((t, k), jnp.float32)),
        grid=(t,),
        in_specs=[pl.BlockSpec((slices, 1, e), lambda i: (0, i, 0)), pl.BlockSpec((e,), lambda i: (0,))],
        out_specs=(row(k), row(k)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="router_select",
    )(z, bias)


def router(x, gate, bias, *, k: int, scale: float, precision: str):
    """See `api.router`."""
    del precision
    return select(reference.logits(x, gate)[None], bias, k=k, scale=scale)
