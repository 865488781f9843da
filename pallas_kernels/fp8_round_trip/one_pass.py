"""The round trip in one launch, Pallas on Triton: a group's maximum, its scale and its values without leaving registers.

As XLA fusions the same is three launches, with the maxima and the scales in memory between them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import FP8_FLOOR, FP8_MAX, GROUP
from ..triton_e4m3 import bits_of, ceil_exponent, code_of, float_of, value_of

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_GROUPS = 64  # of one program: 2048 channels


def refuses(x):
    """Why the kernel does not take these arguments, or None."""
    return None if x.dtype == jnp.bfloat16 else f"x is {x.dtype}, the kernel is for bfloat16"


def _body(x_ref, out_ref):
    """x_ref, out_ref: bf16[groups, 32]."""
    x = x_ref[:, :].astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x), 1), jnp.float32(FP8_FLOOR)) * jnp.float32(1 / FP8_MAX)
    exponent = ceil_exponent(largest)[:, None]
    value = value_of(code_of(jnp.abs(x) * float_of((254 - exponent) << 23))) * float_of(exponent << 23)
    sign = bits_of(x) & jnp.int32(-(2**31))  # kept for zeros too, where Triton's negation loses it
    out_ref[:, :] = float_of(bits_of(value) | sign).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def fp8_round_trip(x, *, interpret: bool = False):
    """See `api.fp8_round_trip`."""
    from jax.experimental.pallas import triton as plt

    groups = x.size // GROUP
    block = min(MOST_GROUPS, groups & -groups)
    spec = pl.BlockSpec((block, GROUP), lambda i: (i, 0))
    return pl.pallas_call(
        _body,
        out_shape=jax.ShapeDtypeStruct((groups, GROUP), x.dtype),
        grid=(groups // block,),
        in_specs=[spec],
        out_specs=spec,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="fp8_round_trip",
    )(x.reshape(groups, GROUP)).reshape(x.shape)
