"""The round trip and its first half, each in one launch, Pallas on Triton: a group's maximum, its scale and its values or
codes without leaving registers.

As XLA fusions the same is three launches, with the maxima and the scales in memory between them, and one to gather rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import FP8_FLOOR, FP8_MAX, GROUP
from ..triton_e4m3 import ceil_exponent, float_of

ARCHES = ("sm_90", "sm_100", "sm_103")
MOST_GROUPS = 64  # of one program: 2048 channels


def refuses(x, rows=None):
    """Why the kernels do not take these arguments, or None."""
    del rows
    return None if x.dtype == jnp.bfloat16 else f"x is {x.dtype}, the kernel is for bfloat16"


def _quantised(x):
    """f32[groups, 32] -> (f8[groups, 32], e8m0 bytes i32[groups]). The conversion is one instruction for two values; it
    rounds to nearest, ties to even, and keeps the sign of zeros."""
    largest = jnp.maximum(jnp.max(jnp.abs(x), 1), jnp.float32(FP8_FLOOR)) * jnp.float32(1 / FP8_MAX)
    exponent = ceil_exponent(largest)
    return (x * float_of((254 - exponent) << 23)[:, None]).astype(jnp.float8_e4m3fn), exponent


def _round_trip(x_ref, out_ref):
    """x_ref, out_ref: bf16[groups, 32]."""
    q, exponent = _quantised(x_ref[:, :].astype(jnp.float32))
    out_ref[:, :] = (q.astype(jnp.float32) * float_of(exponent << 23)[:, None]).astype(jnp.bfloat16)


def _store(x, codes, scales):
    """x bf16[groups, 32] to codes u8[groups, 32] and scales u8[groups]."""
    q, exponent = _quantised(x.astype(jnp.float32))
    codes[:, :] = jax.lax.bitcast_convert_type(q, jnp.uint8)
    scales[:] = exponent.astype(jnp.uint8)


def _quantise(x_ref, codes, scales):
    """x_ref bf16[groups, 32]; codes and scales as `_store` has them."""
    _store(x_ref[:, :], codes, scales)


def _quantise_gathered(x_ref, rows, codes, scales, *, per_row: int):
    """x_ref bf16[T * per_row, 32] and rows i32[R], whole; codes and scales of this program's groups of x[rows]."""
    shape = codes.shape
    group = pl.program_id(0) * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape[:1], 0)
    source = rows[group // per_row] * per_row + group % per_row
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    _store(x_ref[jnp.broadcast_to(source[:, None], shape), lane], codes, scales)


def _call(body, x, rows, groups: int, dtypes, interpret: bool, name: str):
    """One launch over `groups` groups of x. dtypes: of a result [groups, 32] and, if there is one, of a result [groups]."""
    from jax.experimental.pallas import triton as plt

    block = min(MOST_GROUPS, groups & -groups)
    x, own = x.reshape(-1, GROUP), pl.BlockSpec((block, GROUP), lambda i: (i, 0))
    whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0,) * a.ndim)
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((groups, GROUP)[: 2 - i], dtype) for i, dtype in enumerate(dtypes)],
        grid=(groups // block,),
        in_specs=[own] if rows is None else [whole(x), whole(rows)],
        out_specs=[own, pl.BlockSpec((block,), lambda i: (i,))][: len(dtypes)],
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name=name,
    )(x, *([] if rows is None else [rows]))


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def fp8_round_trip(x, *, interpret: bool = False):
    """See `api.fp8_round_trip`."""
    return _call(_round_trip, x, None, x.size // GROUP, [x.dtype], interpret, "fp8_round_trip")[0].reshape(x.shape)


@functools.partial(jax.jit, static_argnames="interpret")
def quantise(x, rows=None, *, interpret: bool = False):
    """See `api.quantise`."""
    per_row = x.shape[1] // GROUP
    total, body = x.shape[0], _quantise
    if rows is not None:
        total, body = rows.shape[0], functools.partial(_quantise_gathered, per_row=per_row)
    codes, scales = _call(body, x, rows, total * per_row, [jnp.uint8, jnp.uint8], interpret, "fp8_quantise")
    return codes.reshape(total, -1), scales.reshape(total, per_row)
