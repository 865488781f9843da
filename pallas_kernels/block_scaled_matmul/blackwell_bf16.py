"""Products of bf16 rows with block-scaled FP8 weights on Blackwell, in groups: Triton, tcgen05 on bf16 operands.

For rows that are no FP8 numbers times a scale (wo_a), which the block-scaled instruction cannot take. Weights come as they
lie in memory and are expanded to exact bf16 in registers; no expanded copy is written to memory. As on Hopper
(`hopper.py`) they are held 2**32 below their value on the way, so that one product applies both the exponent bias and the
scale: exact for scale bytes up to LARGEST_SCALE and every weight of at least 2**-101.

The product is computed transposed: one program has 128 weight rows of a group, the left operand, and a tile of the
group's part of x, and takes all channels in ascending order, so that a row's bits do not depend on the other rows. On
Hopper the same kernel runs with wgmma: good for checking, `hopper` is the faster one there.
"""

import functools

import jax
import jax.numpy as jnp

from ..codecs import cdiv
from .hopper import BIAS, HELD_BACK, LARGEST_SCALE

WEIGHTS = 128  # weight rows of a program: the instruction's M
CHANNELS = 64  # of a step; a divisor of what `blackwell.refuses` lets through
FEWEST_ROWS, MOST_ROWS = 16, 256  # of x a program: the instruction's N


@functools.cache
def _kernel():
    """The Triton kernel; made on first use, so that importing this module needs no triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def expanded(codes, factor):
        """e4m3 bytes u8, bf16 factors of the same shape -> bf16, the product exact.

        Sign-extended bytes, shifted, have sign, exponent and mantissa in the places of a bf16, subnormals included, and
        read as the value times 2**-BIAS.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x9180;
            prmt.b32 b, $2, 0, 0xB3A2;
            shl.b32 a, a, 4;
            shl.b32 b, b, 4;
            and.b32 a, a, 0x87F087F0;
            and.b32 b, b, 0x87F087F0;
            mul.rn.bf16x2 $0, a, $3;
            mul.rn.bf16x2 $1, b, $4;
            }""",
            "=&r,=r,r,r,r", [codes, factor], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip

    @triton.jit
    def published(codes):
        """u8 -> the same, when the tensor core may read the rows that came with them. They are copied to shared memory
        asynchronously and waited for, which orders them for threads only; Triton 3.6 has no fence for the tensor core
        where nothing but copies is in shared memory (triton-lang/triton pull request 9610)."""
        return tl.inline_asm_elementwise(
            """{
            fence.proxy.async.shared::cta;
            mov.b32 $0, $4;
            mov.b32 $1, $5;
            mov.b32 $2, $6;
            mov.b32 $3, $7;
            }""",
            "=&r,=&r,=&r,=r,r,r,r,r", [codes], dtype=tl.uint8, is_pure=True, pack=16,
        )  # fmt: skip

    @triton.jit
    def block_scaled_matmul_bf16_triton(
        x, w, ws, out, M: tl.constexpr, G: tl.constexpr, O: tl.constexpr, I: tl.constexpr,
        BIAS: tl.constexpr, HELD_BACK: tl.constexpr, LARGEST_SCALE: tl.constexpr,
        BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """x bf16[M, G*I], w u8[G*O, I], ws u8[ceil(G*O/32), I/32], out [M, G*O]."""
        tiles: tl.constexpr = (O + BW - 1) // BW
        g = tl.program_id(0) // tiles
        of_group = tl.program_id(0) % tiles * BW + tl.arange(0, BW)
        line = g * O + of_group
        line_live = of_group < O
        row = tl.program_id(1) * BN + tl.arange(0, BN)
        group = tl.arange(0, BK // 32)
        bytes_at = w + line[:, None, None] * I + (group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :])
        scales_at = ws + (line // 32)[:, None] * (I // 32) + group[None, :]
        x_at = x + row[:, None] * (G * I) + (g * I + tl.arange(0, BK))[None, :]
        acc = tl.zeros((BW, BN), tl.float32)
        ahead = tl.load(scales_at, mask=line_live[:, None], other=0)
        for start in range(0, I, BK):
            scale = ahead  # loaded a turn ahead: single bytes cannot be copied asynchronously like the rest
            ahead = tl.load(scales_at + (start + BK) // 32, mask=line_live[:, None] & (start + BK < I), other=0)
            codes = tl.load(bytes_at + start, mask=line_live[:, None, None], other=0)
            rows = tl.load(x_at + start, mask=(row < M)[:, None], other=0)
            exponent = tl.minimum(scale, LARGEST_SCALE).to(tl.int16) + (BIAS - HELD_BACK)
            factor = (exponent << 7).to(tl.bfloat16, bitcast=True)
            factor = tl.broadcast_to(factor[:, :, None], (BW, BK // 32, 32))
            acc = tl.dot(expanded(published(codes), factor).reshape(BW, BK), rows.T, acc)
        acc *= 2.0**HELD_BACK
        at = out + row[None, :].to(tl.int64) * (G * O) + line[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=line_live[:, None] & (row < M)[None, :])

    for kernel in (expanded, published, block_scaled_matmul_bf16_triton):  # names a kernel's body uses have to be globals
        kernel.fn.__globals__.update(tl=tl, expanded=expanded, published=published)
    return block_scaled_matmul_bf16_triton


def rows_of_tile(rows: int) -> int:
    """Rows of x that one program takes: a power of two."""
    return min(MOST_ROWS, max(FEWEST_ROWS, 1 << (rows - 1).bit_length()))


def block_scaled_matmul(x, w, s, *, groups, out_dtype, capability, tile_rows=None, warps=8, stages=3):
    """See `api.block_scaled_matmul`. capability: e.g. 100, None where interpreted; tile_rows: rows of x a program."""
    import jax_triton

    rows, (outputs, inner) = x.shape[0], w.shape
    common = {} if capability is None else {"compute_capability": capability}
    tile = tile_rows or rows_of_tile(rows)
    per_group = outputs // groups
    return jax_triton.triton_call(
        x, jax.lax.bitcast_convert_type(w, jnp.uint8), s, kernel=_kernel(),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype or x.dtype),
        grid=(groups * cdiv(per_group, WEIGHTS), cdiv(rows, tile)), M=rows, G=groups, O=per_group, I=inner,
        BIAS=BIAS, HELD_BACK=HELD_BACK, LARGEST_SCALE=LARGEST_SCALE, BW=WEIGHTS, BN=tile, BK=CHANNELS,
        num_warps=warps, num_stages=stages, **common,
    )  # fmt: skip
