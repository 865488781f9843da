"""The clamped SwiGLU in one launch, Pallas on Triton: from the product's columns to the next product's FP8 values.

As an XLA fusion and a round trip the same is two launches, with the activations written and read between them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import GROUP
from ..triton_rows import fp8_rounded

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_GROUPS = 64  # of one program: 2048 results
NO_GAIN = "on an H200 a step of six layers was 0.2 ms longer with it, which is as much as the same step differs from itself"


def refuses(gate_up, *, limit, round_trip):
    """Why the kernel does not take these arguments, or None."""
    del limit, round_trip
    if gate_up.dtype != jnp.bfloat16:
        return f"gate_up is {gate_up.dtype}, the kernel is for bfloat16"
    if gate_up.shape[1] % (2 * GROUP):
        return f"{gate_up.shape[1] // 2} channels, the kernel is for multiples of {GROUP}"
    return None


def _body(x, out, *, limit: float, round_trip: bool):
    """x bf16[rows, 2, groups, 32], out bf16[rows, groups, 32]."""
    gate, up = x[:, 0, :, :].astype(jnp.float32), x[:, 1, :, :].astype(jnp.float32)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    y = (gate * jax.nn.sigmoid(gate) * up).astype(jnp.bfloat16)
    if round_trip:
        y = fp8_rounded(y.astype(jnp.float32).reshape(-1, GROUP)).reshape(y.shape)
    out[:, :, :] = y


@functools.partial(jax.jit, static_argnames=("limit", "round_trip", "interpret"))  # lowered once for all layers
def swiglu(gate_up, *, limit: float, round_trip: bool, interpret: bool = False):
    """See `api.swiglu`."""
    from jax.experimental.pallas import triton as plt

    rows, groups = gate_up.shape[0], gate_up.shape[1] // (2 * GROUP)
    across = min(MOST_GROUPS, groups & -groups)
    down = min(MOST_GROUPS // across, rows & -rows)
    out = pl.pallas_call(
        functools.partial(_body, limit=limit, round_trip=round_trip),
        out_shape=jax.ShapeDtypeStruct((rows, groups, GROUP), gate_up.dtype),
        grid=(rows // down, groups // across),
        in_specs=[pl.BlockSpec((down, 2, across, GROUP), lambda i, j: (i, 0, j, 0))],
        out_specs=pl.BlockSpec((down, across, GROUP), lambda i, j: (i, j, 0)),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="swiglu",
    )(gate_up.reshape(rows, 2, groups, GROUP))
    return out.reshape(rows, groups * GROUP)
