"""Routed experts on Blackwell: Triton's block-scaled dot, FP8 rows times MXFP4 weights in the checkpoint's order.

The tensor core takes both formats with their per-32 scales as they are, so nothing is decoded or re-expressed: only the
order of fp32 sums differs from `reference`. Rows are quantised in one launch before each GEMM (fp8_round_trip), x's
once a token: the first GEMM loads a sorted row from its token's place. One program computes a tile of sorted rows times
a block of weight rows; the first GEMM's program has the gate and the up rows of its block and ends in the clamped
SwiGLU. On Hopper the same kernel runs with an emulated dot: good for checking, not for speed.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from .. import registry
from ..expert_plan import expert_plan
from ..fp8_round_trip.api import quantise
from . import layout, route

ROWS = 128  # rows of a tile: the block-scaled instruction's M


@functools.cache
def _kernels():
    """The two Triton kernels; made on first use, so that importing this module needs no triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(x, xs, w, ws, row, live, column, inner: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
        """[BM, BN] fp32: rows `row` of x (e4m3 bytes, scales xs) times rows `column` of w (packed e2m1, scales ws)."""
        k = tl.arange(0, BK)
        half = tl.arange(0, BK // 2)
        group = tl.arange(0, BK // 32)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, inner, BK):
            a = tl.load(x + row[:, None] * inner + (start + k)[None, :], mask=live[:, None], other=0)
            at = row[:, None] * (inner // 32) + (start // 32 + group)[None, :]
            a_scale = tl.load(xs + at, mask=live[:, None], other=0)
            b = tl.load(w + column[:, None] * (inner // 2) + (start // 2 + half)[None, :])
            b_scale = tl.load(ws + column[:, None] * (inner // 32) + (start // 32 + group)[None, :])
            acc = tl.dot_scaled(a.to(tl.float8e4nv, bitcast=True), a_scale, "e4m3", b.T, b_scale, "e2m1", acc)
        return acc

    @triton.jit
    def experts_swiglu_triton(x, xs, w, ws, tiles, token, weights, out, H: tl.constexpr, F: tl.constexpr,
                              M: tl.constexpr, LIMIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                              BK: tl.constexpr):  # fmt: skip
        tile, block = tl.program_id(1), tl.program_id(0)
        size = tl.load(tiles + 2 * M + tile)
        if size > 0:
            expert = tl.load(tiles + tile).to(tl.int64)
            row = tl.load(tiles + M + tile) + tl.arange(0, BM)
            live = tl.arange(0, BM) < size
            source = tl.load(token + row)
            w += expert * (2 * F * (H // 2))
            ws += expert * (2 * F * (H // 32))
            column = block * BN + tl.arange(0, BN)
            g = product(x, xs, w, ws, source, live, column, H, BM, BN, BK).to(tl.bfloat16).to(tl.float32)
            v = product(x, xs, w, ws, source, live, column + F, H, BM, BN, BK).to(tl.bfloat16).to(tl.float32)
            g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            v = tl.clamp(v, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            t = tl.load(weights + row)[:, None] * (g / (1.0 + tl.exp(-g)) * v)
            tl.store(out + row[:, None] * F + column[None, :], t.to(tl.bfloat16), mask=live[:, None])

    @triton.jit
    def experts_down_triton(x, xs, w, ws, tiles, out, FIRST: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr,
                            F: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                            BK: tl.constexpr):  # fmt: skip
        """Columns FIRST .. FIRST + WIDTH - 1 of the result, as an array of their own."""
        tile, block = tl.program_id(1), tl.program_id(0)
        size = tl.load(tiles + 2 * M + tile)
        if size > 0:
            expert = tl.load(tiles + tile).to(tl.int64)
            row = tl.load(tiles + M + tile) + tl.arange(0, BM)
            live = tl.arange(0, BM) < size
            w += expert * (H * (F // 2))
            ws += expert * (H * (F // 32))
            column = block * BN + tl.arange(0, BN)
            y = product(x, xs, w, ws, row, live, column + FIRST, F, BM, BN, BK)
            tl.store(out + row[:, None] * WIDTH + column[None, :], y.to(tl.bfloat16), mask=live[:, None])

    # Names a kernel's body uses have to be globals of its function.
    for kernel in (product, experts_swiglu_triton, experts_down_triton):
        kernel.fn.__globals__.update(tl=tl, product=product)
    return experts_swiglu_triton, experts_down_triton


def refuses(
    x, ids, weights, w13, s13, w2, s2, *, swiglu_limit=10.0, first_expert=0, precision="released", experts_total=None,
    plan_impl="auto", parts=1, spare_sms=0,
):  # fmt: skip
    """Why the kernel does not take these arguments, or None."""
    if precision != "released":
        return f"computes `released` only, this is {precision}"
    if layout.is_shuffled(w13):
        return "weights are in the Hopper kernel's order"
    if x.shape[1] % 128 or w2.shape[-1] % 64:
        return f"H and F expected multiples of 128, got {x.shape[1]} and {w2.shape[-1] * 2}"
    if x.shape[1] % (parts * 128):
        return f"H / parts expected a multiple of 128, got {x.shape[1]} / {parts}"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed"
    return None


def experts_parts(
    x, ids, weights, w13, s13, w2, s2, *, parts, spare_sms=0, swiglu_limit=10.0, first_expert=0, precision="released",
    experts_total=None, plan_impl="auto", capability=None, block=(128, 128), warps=8, stages=3,
):  # fmt: skip
    """See `api.experts_parts`. capability: e.g. 100, by default the registry's; block: (weight rows, channels).

    A program ends with its tile, so a collective gets its multiprocessors as tiles end: none need be spared."""
    del precision, experts_total, spare_sms
    import jax_triton

    swiglu, down = _kernels()
    local, h = w2.shape[:2]
    f = w2.shape[2] * 2
    plan = expert_plan(ids, weights, first_expert, local=local, tile_rows=ROWS, impl=plan_impl)
    m, rows = plan.tiles.shape[1], plan.token.shape[0]
    common = dict(H=h, F=f, M=m, BM=ROWS, BN=block[0], BK=block[1], num_warps=warps, num_stages=stages)
    if capability := capability or registry.current_capability():
        common["compute_capability"] = capability
    arch = registry.arch_of(capability)
    t = jax_triton.triton_call(
        *quantise(x, arch=arch), w13, s13, plan.tiles, plan.token, plan.weight, kernel=swiglu,
        out_shape=jax.ShapeDtypeStruct((rows, f), jnp.bfloat16), grid=(f // block[0], m), LIMIT=float(swiglu_limit),
        **common,
    )  # fmt: skip
    quantised, width = quantise(t, plan.count, arch=arch), h // parts

    def part(i, q, scale):
        y = jax_triton.triton_call(
            q, scale, w2, s2, plan.tiles, kernel=down, out_shape=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
            grid=(width // block[0], m), FIRST=i * width, WIDTH=width, **common,
        )  # fmt: skip
        return route.combine(y, plan)

    return route.in_turn(part, parts, *quantised)


def experts(*args, **kwargs):
    """f32[T, H]: `experts_parts` in one part."""
    return experts_parts(*args, parts=1, **kwargs)[0]
