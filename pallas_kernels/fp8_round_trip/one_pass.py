"""The round trip and its first half, each in one launch, Pallas on Triton: a group's maximum, its scale and its values or
codes without leaving registers.

As XLA fusions the same is three launches, with the maxima and the scales in memory between them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import GROUP
from ..triton_rows import fp8_quantised, fp8_rounded

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_GROUPS = 64  # of one program: 2048 channels


def refuses(x, count=None):
    """Why the kernels do not take these arguments, or None."""
    del count
    return None if x.dtype == jnp.bfloat16 else f"x is {x.dtype}, the kernel is for bfloat16"


def _round_trip(x_ref, out_ref):
    """x_ref, out_ref: bf16[groups, 32]."""
    out_ref[:, :] = fp8_rounded(x_ref[:, :].astype(jnp.float32))


def _quantise(x_ref, codes, scales):
    """x_ref bf16[groups, 32]; codes u8[groups, 32], scales u8[groups]."""
    q, exponent = fp8_quantised(x_ref[:, :].astype(jnp.float32))
    codes[:, :] = jax.lax.bitcast_convert_type(q, jnp.uint8)
    scales[:] = exponent.astype(jnp.uint8)


def _quantise_first(x_ref, count, codes, scales, *, per_row: int):
    """`_quantise` where this program has groups of the first count[0] rows."""
    pl.when(pl.program_id(0) * x_ref.shape[0] < count[0] * per_row)(lambda: _quantise(x_ref, codes, scales))


def _call(body, x, dtypes, interpret: bool, name: str, count=None):
    """One launch over x's groups. dtypes: of a result [groups, 32] and, if there is one, of a result [groups]."""
    from jax.experimental.pallas import triton as plt

    groups = x.size // GROUP
    block = min(MOST_GROUPS, groups & -groups)
    own = pl.BlockSpec((block, GROUP), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((groups, GROUP)[: 2 - i], dtype) for i, dtype in enumerate(dtypes)],
        grid=(groups // block,),
        in_specs=[own] if count is None else [own, pl.BlockSpec((1,), lambda i: (0,))],
        out_specs=[own, pl.BlockSpec((block,), lambda i: (i,))][: len(dtypes)],
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name=name,
    )(x.reshape(groups, GROUP), *([] if count is None else [count.reshape(1)]))


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def fp8_round_trip(x, *, interpret: bool = False):
    """See `api.fp8_round_trip`."""
    return _call(_round_trip, x, [x.dtype], interpret, "fp8_round_trip")[0].reshape(x.shape)


@functools.partial(jax.jit, static_argnames="interpret")
def quantise(x, count=None, *, interpret: bool = False):
    """See `api.quantise`."""
    per_row = x.shape[1] // GROUP
    body = _quantise if count is None else functools.partial(_quantise_first, per_row=per_row)
    codes, scales = _call(body, x, [jnp.uint8, jnp.uint8], interpret, "fp8_quantise", count)
    return codes.reshape(x.shape), scales.reshape(-1, per_row)
