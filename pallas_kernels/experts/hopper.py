"""Routed experts on Hopper: MXFP4 decoded in registers, FP8 tensor cores, Mosaic GPU.

Both GEMMs are one persistent kernel each. A producer warpgroup streams weights, scales and activations through shared
memory by TMA; every other warpgroup owns one block of 64 weight rows: it decodes 128 input channels into e4m3 registers
(layout.py, ptx.py), multiplies them with the tile's rows, and adds the product to fp32 sums after each 128 channels.
The first GEMM ends in the clamped SwiGLU, the second in bf16 rows. Quantisation is one launch before each of them
(requantise.py); sorting is `expert_plan`, the sum over a token's experts an XLA fusion.

What is rounded otherwise than in `reference`: within each 128 channels the four per-32 scales of an activation row are
re-expressed as one that holds all, so a value smaller than 2**-6 of that scale keeps only multiples of 2**-9 of it (error
at most 2**-10 of it, the model's own FP8 rounding of a group's largest value being 2**4); products of 128
channels are summed at the tensor core's own accuracy (about 14 bits of the largest term) before fp32 takes over. All
else is the same: weights exact (rows whose exponents span 12 octaves), bf16 where the model rounds, fp32 combine.
"""

import functools

import jax
import jax.numpy as jnp

from ..codecs import cdiv
from ..expert_plan import expert_plan
from . import layout, requantise, route

SHARED_BYTES = 226 * 1024  # of 227 KiB; the rest holds barriers
TILE_ROWS = (8, 16, 24, 32, 64)
H200_SMS = 132


def tile_rows(slots: int, experts: int) -> int:
    """Rows of a tile for `slots` evenly spread over `experts`: the mean and a third, so that most experts need one."""
    mean = cdiv(slots, experts)
    return next((n for n in TILE_ROWS if n * 3 >= mean * 4), TILE_ROWS[-1])


def pipeline_stages(n: int, groups: int) -> int:
    """Stages of 256 channels that fit: weights and scales of each warpgroup, the tile's rows and their scales."""
    stage = groups * (layout.STAGE * 4096 + 512) + layout.STAGE * (n * 128 + max(n, 32) * 4)
    return min(8, SHARED_BYTES // stage)


def _step(n: int, w_ref, s_ref, x_ref, scale_ref, total):
    """One stage (256 channels) of one warpgroup: returns the fp32 sums with this stage's products added."""
    from . import ptx

    thread, _, _, q = ptx.lane_ids()
    words = ptx.add(ptx.smem_address(w_ref), ptx.mul(thread, 16))
    scales = ptx.load_word(ptx.add(ptx.smem_address(s_ref), ptx.mul(thread, 4)), 0)
    columns = ptx.add(ptx.smem_address(scale_ref), ptx.mul(q, 8))
    x = ptx.smem_address(x_ref)
    padded = max(n, 32)
    partial = []
    for c in range(layout.STAGE):
        tables = [ptx.table(scales, 2 * c + row) for row in (0, 1)]
        a = []
        for half in (0, 1):
            w = ptx.load_words(words, 4096 * c + 2048 * half)
            for i in (0, 1):
                low, high = (ptx.decode(w[2 * i + row], *tables[row]) for row in (0, 1))
                a += [low[0], high[0], low[1], high[1]]
        partial.append(ptx.chain(a, ptx.b_descriptor(ptx.add(x, ptx.const(c * n * 128))), n))
    total = ptx.unpack(total)
    for c in range(layout.STAGE):
        product = ptx.settle(partial[c], layout.STAGE - 1 - c)
        for j in range(n // 8):
            scale = ptx.load_floats2(columns, 4 * (c * padded + 8 * j))
            for r in range(4):
                total[4 * j + r] = ptx.fma(product[4 * j + r], scale[r % 2], total[4 * j + r])
    return ptx.pack(total, n // 2)


def _finish(n, kind, limit, shape, total, s_ref, weight_ref, out_ref, expert, block, first, count):
    """Write one warpgroup's results: `kind` "swiglu" (t in chunk-major order) or "down" (rows of H)."""
    from . import ptx

    blocks, from_block, steps, rows, width = shape
    thread, warp, r, q = ptx.lane_ids()
    expert, block, first, count = (ptx.scalar(v) for v in (expert, block, first, count))
    total = ptx.unpack(total)
    line = ptx.add(ptx.add(ptx.mul(expert, blocks), block), ptx.const(from_block))
    at = ptx.add(ptx.mul(line, (steps + 2) * 128), ptx.const(steps * 128))
    factors = ptx.load_factors(ptx.offset_address(ptx.gmem_address(s_ref), ptx.add(at, ptx.mul(thread, 2)), 4))
    column = ptx.mul(q, 2)
    row = ptx.add(first, column)
    out = ptx.gmem_address(out_ref)
    if kind == "swiglu":
        weights = ptx.offset_address(ptx.gmem_address(weight_ref), row, 4)
        # Position 32 * block + 8 * warp + r of the width, stored [chunk, row, position in the chunk].
        chunk, inner = ptx.arith.shrui(block, ptx.const(2)), ptx.mul(ptx.arith.andi(block, ptx.const(3)), 32)
        inner = ptx.add(inner, ptx.add(ptx.mul(warp, 8), r))
        line = ptx.add(ptx.mul(chunk, rows), row)
        base = ptx.offset_address(ptx.offset_address(out, line, 256), inner, 2)
    else:
        inner = ptx.add(ptx.mul(block, 64), ptx.add(ptx.mul(warp, 16), ptx.mul(r, 2)))
        base = ptx.offset_address(ptx.offset_address(out, row, 2 * width), inner, 2)
    for j in range(n // 8):
        for c in (0, 1):
            a, b = total[4 * j + c], total[4 * j + 2 + c]
            here, k = ptx.add(column, ptx.const(8 * j + c)), 8 * j + c
            if kind == "swiglu":
                target = ptx.offset_address(base, ptx.const(k), 256)
                ptx.store_swiglu(a, b, factors, ptx.load_global(weights, 4 * k), target, here, count, limit)
            else:
                target = ptx.offset_address(base, ptx.const(k), 2 * width)
                ptx.store_pair(a, b, factors, target, here, count)


def grouped_gemm(x, scale, w, s, plan, *, n, kind, limit, groups, sms, blocks=None, stages=None, registers=None):
    """Every tile of sorted rows times its expert's weights, or times `blocks` of them: a range of blocks of 64 rows.

    x,      # u8[inner/128, R, 128] e4m3
    scale,  # f32[inner/128, R]
    w, s,   # shuffled weights (layout.py)
    n: rows of a tile; kind: "swiglu" -> bf16[F/128, R, 128], "down" -> bf16[R, H]; groups: math warpgroups of a block.
    Rows past the plan's count are left unwritten.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    chunks, rows, _ = x.shape
    steps, blocks = chunks // layout.STAGE, blocks or range(w.shape[1])
    bands = len(blocks) // groups
    width = len(blocks) * layout.ROWS // (2 if kind == "swiglu" else 1)
    padded = max(n, 32)
    stages = stages or pipeline_stages(n, groups)
    out = jax.ShapeDtypeStruct((width // 128, rows, 128) if kind == "swiglu" else (rows, width), jnp.bfloat16)
    regs = plgpu.Layout.WG_STRIDED((64 * n,), vec_size=1)
    splat = plgpu.Layout.WG_SPLAT
    swizzle = plgpu.SwizzleTransform(128)
    over = lambda a, b: jax.lax.div(a, jnp.int32(b))  # not `//`, which minds signs and is slow to lower

    def body(x_gmem, scale_gmem, w_gmem, s_gmem, tiles, weight_gmem, out_gmem, x_smem, scale_smem, w_smem, s_smem,
             full, empty):  # fmt: skip
        wg, block = jax.lax.axis_index("wg"), jax.lax.axis_index("block")
        items = tiles[3, 0] * bands
        mine = over(items - block + sms - 1, sms)
        after = lambda slot: jnp.where(slot == stages - 1, 0, slot + 1)

        def produce():
            if registers:
                plgpu.set_max_registers(registers[0], action="decrease")

            def item(i, state):
                index = block + i * sms
                tile, band = over(index, bands), jax.lax.rem(index, jnp.int32(bands))
                expert, first = tiles[0, tile], tiles[1, tile]
                own = pl.ds(blocks.start + band * groups, groups)

                def step(k, state):
                    slot, filled = state

                    @pl.when(filled == stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    pair = pl.ds(k * layout.STAGE, layout.STAGE)
                    bar = full.at[slot]
                    plgpu.copy_gmem_to_smem(w_gmem.at[expert, own, pair], w_smem.at[slot], bar)
                    plgpu.copy_gmem_to_smem(s_gmem.at[expert, own, k], s_smem.at[slot], bar)
                    plgpu.copy_gmem_to_smem(x_gmem.at[pair, pl.ds(first, n)], x_smem.at[slot], bar)
                    plgpu.copy_gmem_to_smem(scale_gmem.at[pair, pl.ds(first, padded)], scale_smem.at[slot], bar)
                    return after(slot), jnp.minimum(filled + 1, stages)

                return jax.lax.fori_loop(0, steps, step, state)

            jax.lax.fori_loop(0, mine, item, (jnp.int32(0), jnp.int32(0)))

        def consume():
            if registers:
                plgpu.set_max_registers(registers[1], action="increase")
            step_fn = plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType((swizzle,)), plgpu.RefType(), regs),
                return_type=plgpu.ShapeDtypeStruct((64 * n,), jnp.float32, layout=regs),
            )(lambda ctx, *args: _step(n, *args))
            finish = plgpu.inline_mgpu(arg_types=(regs, *[plgpu.RefType()] * 3, *[splat(())] * 4))(
                lambda ctx, *args: _finish(n, kind, limit, (w.shape[1], blocks.start, steps, rows, width), *args)
            )

            def item(i, slot):
                index = block + i * sms
                tile, band = over(index, bands), jax.lax.rem(index, jnp.int32(bands))

                def step(_, state):
                    slot, total = state
                    plgpu.barrier_wait(full.at[slot])
                    total = step_fn(
                        w_smem.at[slot, wg], s_smem.at[slot, wg], x_smem.at[slot], scale_smem.at[slot], total
                    )
                    plgpu.barrier_arrive(empty.at[slot])
                    return after(slot), total

                zero = plgpu.layout_cast(jnp.zeros((64 * n,), jnp.float32), regs)
                slot, total = jax.lax.fori_loop(0, steps, step, (slot, zero))
                finish(
                    total, s_gmem, weight_gmem, out_gmem,
                    tiles[0, tile], band * groups + wg, tiles[1, tile], tiles[2, tile],
                )  # fmt: skip
                return slot

            jax.lax.fori_loop(0, mine, item, jnp.int32(0))

        jax.lax.cond(wg == groups, produce, consume)

    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, layout.STAGE, n, 128), jnp.uint8, transforms=(swizzle,)),
            scale_smem=plgpu.SMEM((stages, layout.STAGE, padded), jnp.float32),
            w_smem=plgpu.SMEM((stages, groups, layout.STAGE, 8, 128), jnp.int32),
            s_smem=plgpu.SMEM((stages, groups, 128), jnp.int32),
            full=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        grid=(sms,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="wg",
        kernel_name=f"experts_{kind}",
    )(x, scale, w, s, plan.tiles, plan.weight)


def _groups(blocks: int, n: int) -> int:
    """Math warpgroups of a block: four, two for wide tiles (registers), fewer where the row blocks do not divide."""
    return next(g for g in ((4, 3, 2, 1) if n <= 32 else (2, 1)) if blocks % g == 0)


def refuses(
    x, ids, weights, w13, s13, w2, s2, *, swiglu_limit=10.0, first_expert=0, precision="released", experts_total=None,
    plan_impl="auto", parts=1, spare_sms=0,
):  # fmt: skip
    """Why the kernel does not take these arguments, or None."""
    if precision != "released":
        return f"computes `released` only, this is {precision}"
    if not layout.is_shuffled(w13):
        return "weights are in the checkpoint's order: apply shuffle_weights at load"
    if x.shape[1] % (parts * layout.ROWS):
        return f"H / parts expected a multiple of {layout.ROWS}, got {x.shape[1]} / {parts}"
    return None


def experts_parts(
    x, ids, weights, w13, s13, w2, s2, *, parts, spare_sms=0, swiglu_limit=10.0, first_expert=0, precision="released",
    experts_total=None, plan_impl="auto", sms=None, tuning=None,
):  # fmt: skip
    """See `api.experts_parts`; takes shuffled weights, `released` only.

    sms: multiprocessors to fill (default: the device's). tuning: {"n": rows of a tile, "swiglu": {...}, "down": {...}},
    the two GEMMs' `groups`, `stages`, `registers`; for benchmarks.
    """
    del precision
    local, tuning = w13.shape[0], tuning or {}
    n = tuning.get("n") or tile_rows(ids.size, experts_total or local)
    sms = sms or (jax.devices()[0].core_count if jax.default_backend() == "gpu" else H200_SMS)
    plan = expert_plan(ids, weights, first_expert, local=local, tile_rows=n, impl=plan_impl)
    gemm = functools.partial(grouped_gemm, plan=plan, n=n, limit=swiglu_limit)
    q, scale = requantise.spread_rows(x, plan.position, plan.count, plan.token.shape[0])
    config = {"groups": _groups(w13.shape[1], n), **tuning.get("swiglu", {})}
    t = gemm(q, scale, w13, s13, kind="swiglu", sms=sms, **config)
    q, scale = requantise.sorted_rows(t, plan.count)
    count = w2.shape[1] // parts
    config = {"groups": _groups(count, n), **tuning.get("down", {})}

    def part(i, q, scale):
        # A block of this kernel fills its multiprocessor until the kernel ends: beside the transfer of the part before,
        # a collective's blocks need some of their own.
        own = dict(sms=max(1, sms - spare_sms) if i else sms, blocks=range(i * count, (i + 1) * count))
        return route.combine(gemm(q, scale, w2, s2, kind="down", **own, **config), plan)

    return route.in_turn(part, parts, q, scale)


def experts(*args, **kwargs):
    """f32[T, H]: `experts_parts` in one part."""
    return experts_parts(*args, parts=1, **kwargs)[0]
