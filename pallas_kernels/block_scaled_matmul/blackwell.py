"""Block-scaled FP8 product on Blackwell: Triton's block-scaled dot, both operands e4m3 with their scales as they are.

x is quantised here. If it has been through the FP8 round trip already, that gives the same values back: the largest of a
group decides its scale both times, or one octave less with every code still an e4m3 number. Nothing is decoded; only the
order of fp32 sums differs from `reference`. One program computes 128 rows of x times a block of weight rows over all channels
in ascending order, so a row's bits do not depend on the other rows. On Hopper the same kernel runs with an emulated dot:
good for checking, not for speed. Rows that are not quantised, and groups, go to `blackwell_bf16`.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from .. import registry
from ..codecs import cdiv
from ..fp8_round_trip.api import quantise
from . import blackwell_bf16

ROWS = 128  # rows of a tile: the block-scaled instruction's M
CHANNELS = 128


@functools.cache
def _kernel():
    """The Triton kernel; made on first use, so that importing this module needs no triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def block_scaled_matmul_triton(x, xs, w, ws, out, M: tl.constexpr, I: tl.constexpr, R: tl.constexpr,
                                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
        row = tl.program_id(1) * BM + tl.arange(0, BM)
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        row_live, column_live = (row < M)[:, None], (column < R)[:, None]
        k = tl.arange(0, BK)
        group = tl.arange(0, BK // 32)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, I, BK):
            a = tl.load(x + row[:, None] * I + (start + k)[None, :], mask=row_live, other=0)
            a_scale = tl.load(xs + row[:, None] * (I // 32) + (start // 32 + group)[None, :], mask=row_live, other=0)
            b = tl.load(w + column[:, None] * I + (start + k)[None, :], mask=column_live, other=0)
            b_scale = tl.load(ws + (column // 32)[:, None] * (I // 32) + (start // 32 + group)[None, :],
                              mask=column_live, other=0)  # fmt: skip
            a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(a, a_scale, "e4m3", b.T, b_scale, "e4m3", acc)
        at = out + row[:, None].to(tl.int64) * R + column[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=row_live & (column < R)[None, :])

    block_scaled_matmul_triton.fn.__globals__.update(tl=tl)  # names a kernel's body uses have to be globals
    return block_scaled_matmul_triton


def refuses(x, w, s, *, groups=1, quantised=False, out_dtype=None):
    """Why the kernel does not take these arguments, or None."""
    del s, groups, quantised, out_dtype
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel is for bfloat16"
    if w.shape[1] % CHANNELS:
        return f"input channels expected a multiple of {CHANNELS}, got {w.shape[1]}"
    if w.size >= 2**31 or x.size >= 2**31:
        return "offsets beyond 2**31"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed"
    return None


def block_scaled_matmul(
    x, w, s, *, groups=1, quantised=True, out_dtype=None, capability=None, columns=128, warps=8, stages=3
):  # fmt: skip
    """See `api.block_scaled_matmul`. capability: e.g. 100, by default the registry's; of the block-scaled kernel,
    columns: weight rows a tile, warps, stages."""
    import jax_triton

    (rows, inner), outputs = x.shape, w.shape[0]
    capability = capability or registry.current_capability()
    if groups > 1 or not quantised:
        return blackwell_bf16.block_scaled_matmul(x, w, s, groups=groups, out_dtype=out_dtype, capability=capability)
    common = {} if capability is None else {"compute_capability": capability}
    q, scale = quantise(x, arch=registry.arch_of(capability))
    return jax_triton.triton_call(
        q, scale, jax.lax.bitcast_convert_type(w, jnp.uint8), s, kernel=_kernel(),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype or x.dtype),
        grid=(cdiv(outputs, columns), cdiv(rows, ROWS)), M=rows, I=inner, R=outputs, BM=ROWS, BN=columns, BK=CHANNELS,
        num_warps=warps, num_stages=stages, **common,
    )  # fmt: skip
