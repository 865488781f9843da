"""Block-scaled FP8 product on Hopper: weights expanded in registers, bf16 tensor cores, Mosaic GPU.

The product is computed transposed. A math warpgroup owns 64 weight rows, the left operand: it expands 64 input channels
at a time from e4m3 to exact bf16 in registers (ptx.py) and multiplies them with the tile's n rows of x, the right one,
in shared memory. A producer warpgroup streams both by TMA as they lie in memory: the weights in the checkpoint's order,
nothing expanded is written anywhere. While one chunk's instructions run, the next is expanded.

Every output is one fp32 accumulator that takes the channels in ascending order, 16 at a time, or, where few weight rows
meet many channels, the sum in order of `splits` of them, kept by blocks of a cluster that exchange their parts through
shared memory. `splits` depends on the weight's shape alone, so a row's bits depend neither on how many other rows there
are nor on their values.

Weights are held 2**32 below their value on the way, so that one product applies both the exponent bias and the scale:
exact for scale bytes up to LARGEST_SCALE (2**39; larger ones are taken for that, and refused where a checkpoint is
loaded) and every weight of at least 2**-101.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ..codecs import cdiv, round_up

BIAS = 120  # a byte of e4m3 in the places of a bf16's bits reads as its value times 2**-BIAS
HELD_BACK = 32  # octaves that weights are held below their value, so that one factor takes the bias and the scale
LARGEST_SCALE = 254 - BIAS + HELD_BACK  # scale byte up to which that factor is a bf16 number: 166
SHARED_BYTES = 226 * 1024  # of 227 KiB; the rest holds barriers
H200_SMS = 132
CHUNK = 64  # channels of a pipeline stage
MOST_COLUMNS = 192  # rows of x that a tile's accumulators leave registers for
STEP = 2 * CHUNK  # channels of one turn of the loop: four scale bytes, one word


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is cut.

    n: rows of x a tile. math: warpgroups of 64 weight rows a block. splits: blocks of a cluster that share a tile's
    channels. stages: of the pipeline, as many as fit if None. registers: of a thread of the producer and of a math
    warpgroup, where they are not all given the same.
    """

    n: int
    math: int = 2
    splits: int = 1
    stages: int | None = None
    registers: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return 64 * self.math

    @property
    def columns(self) -> int:
        """Rows of x that one block writes."""
        return self.n // self.splits

    @property
    def depth(self) -> int:
        stage = self.rows * CHUNK + self.n * CHUNK * 2
        return self.stages or min(12, (SHARED_BYTES - self.rows * self.columns * 2) // stage)

    def misfit(self, outputs: int, groups: int) -> str | None:
        """Why a product with so many weight rows cannot be cut like this, or None."""
        if groups > 1 and outputs // groups % self.rows:
            return f"{self.rows} rows do not divide a group's {outputs // groups}"
        if self.n > 256 or self.n % (8 * self.splits):
            return f"expected at most 256 columns, a multiple of 8 for each of {self.splits} blocks"
        if self.depth < 2 or self.splits > 1 and self.depth * CHUNK * 2 < self.rows * 4:
            return f"{self.depth} stages are too few"
        return None


def _issue(tile: Tile, c: int, w_ref, x_ref, word, total):
    """Expand chunk c of a step and issue its products. Returns (sums in flight, the registers that they read)."""
    from . import ptx

    _, warp, r, q = ptx.lane_ids()
    (word,) = ptx.words(word)
    # Fragment rows r and r + 8, channels 2q and 2q + 1 of each eight: in rows of 64 bytes, swizzled by (row // 2) % 4,
    # the eight r of a warp lie in different banks.
    row = ptx.add(ptx.mul(ptx.warpgroup(), 64 * CHUNK), ptx.add(ptx.mul(warp, 16 * CHUNK), ptx.mul(r, CHUNK)))
    turn = ptx.mul(ptx.low_bits(ptx.shift_right(r, 1), 2), 16)
    lane = ptx.add(ptx.add(ptx.smem_address(w_ref), row), ptx.add(turn, ptx.mul(q, 2)))
    a = []
    for s in range(CHUNK // 16):
        if s % 2 == 0:
            scale = ptx.factor(word, 2 * c + s // 2)
        piece = ptx.xor(lane, 16 * s)
        a += [ptx.decode(ptx.load_pair(piece, 8 * h + 8 * CHUNK * low), scale) for h in (0, 1) for low in (0, 1)]
    acc = ptx.chain(ptx.unpack(total), a, ptx.b_descriptor(ptx.smem_address(x_ref)), tile.n)
    return ptx.pack(acc, tile.n // 2), ptx.word_array(a)


def _drain(held):
    from . import ptx

    ptx.drain(ptx.words(held), 1)


def _settle(total, held):
    from . import ptx

    acc = ptx.unpack(total)
    ptx.drain(ptx.words(held), 0)
    return ptx.pack(ptx.settle(acc, 0), len(acc))


def _meet():
    from . import ptx

    ptx.cluster_barrier()


def _scale_word(s_ref, row, k):
    """The four scale bytes of step k for the calling warp's rows of the tile that starts at `row`."""
    from . import ptx

    blocks, pitch = s_ref.type.shape
    _, warp, _, _ = ptx.lane_ids()
    own = ptx.add(ptx.scalar(row), ptx.add(ptx.mul(ptx.warpgroup(), 64), ptx.mul(warp, 16)))
    block = ptx.smaller(ptx.shift_right(own, 5), ptx.const(blocks - 1))
    at = ptx.add(ptx.mul(block, pitch), ptx.mul(ptx.scalar(k), 4))
    return ptx.word_array([ptx.load_word(ptx.offset_address(ptx.gmem_address(s_ref), at, 1))])


def _sum_over_cluster(tile: Tile, total, x_ref, part):
    """The sums of this block's columns, parts added in the order of the blocks' channels."""
    from . import ptx

    thread, _, _, _ = ptx.lane_ids()
    total, blocks = ptx.unpack(total), tile.columns // 8
    # The pipeline's buffers are free once every block of the cluster is past its loop.
    ptx.cluster_barrier()
    size = blocks * tile.math * 2048
    mine = ptx.add(ptx.smem_address(x_ref), ptx.add(ptx.mul(ptx.warpgroup(), 2048), ptx.mul(thread, 16)))
    part = ptx.scalar(part)
    at = ptx.add(mine, ptx.mul(part, size))
    remote = [ptx.remote_address(at, owner) for owner in range(tile.splits)]
    for turn in range(tile.splits):  # every block sends to another one at a time: each receives from one
        for sender in range(tile.splits):
            owner, here = (sender + turn) % tile.splits, ptx.xor(part, sender)
            for j in range(blocks):
                ptx.put_remote(remote[owner], j * tile.math * 2048, total[4 * (owner * blocks + j) :][:4], here)
    ptx.cluster_barrier()
    sums = [v for j in range(blocks) for v in ptx.sum_parts(mine, j * tile.math * 2048, size, tile.splits)]
    return ptx.pack(sums, len(sums))


def _stage_out(total, out_ref):
    """Sums as bf16 [columns, 64] in shared memory, swizzled for TMA."""
    from . import ptx

    thread, warp, _, _ = ptx.lane_ids()
    total = ptx.rescaled(ptx.unpack(total))
    i, half, second = (ptx.low_bits(ptx.shift_right(thread, k), count) for k, count in ((0, 3), (3, 1), (4, 1)))
    piece = ptx.xor(ptx.add(ptx.mul(warp, 2), half), i)
    line = ptx.add(ptx.mul(ptx.add(ptx.mul(second, 8), i), 128), ptx.mul(piece, 16))
    address = ptx.add(ptx.smem_address(out_ref), line)
    for j in range(0, len(total) // 4, 2):
        ptx.store_transposed(ptx.add(address, ptx.const(1024 * j)), total[4 * j :][:8])


def _store_floats(tile: Tile, shape, total, out_ref, row, first):
    """Write fp32 sums to y[first + column, row + ...]; shape: (live rows of x, outputs)."""
    from . import ptx

    live, outputs = shape
    _, warp, r, q = ptx.lane_ids()
    total = ptx.rescaled(ptx.unpack(total))
    output = ptx.add(ptx.scalar(row), ptx.add(ptx.mul(ptx.warpgroup(), 64), ptx.add(ptx.mul(warp, 16), r)))
    column = ptx.add(ptx.scalar(first), ptx.mul(q, 2))
    address = ptx.offset_address(ptx.gmem_address(out_ref), column, 4 * outputs)
    address = ptx.offset_address(address, output, 4)
    for low in (0, 1):
        count = ptx.where_less(ptx.add(output, ptx.const(8 * low)), ptx.const(outputs), ptx.const(live))
        for j in range(tile.columns // 8):
            for c in (0, 1):
                k = 8 * j + c
                at, here = k * 4 * outputs + 32 * low, ptx.add(column, ptx.const(k))
                ptx.store_float(total[4 * j + 2 * low + c], address, at, here, count)


def product(x, w, s, *, tile: Tile, groups: int, out_dtype, sms: int):
    """See `api.block_scaled_matmul`.

    x,  # bf16[M, groups * I]
    w,  # f8[R, I]
    s,  # u8[ceil(R/32), I/32]
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, (outputs, inner) = x.shape[0], w.shape
    n, math, stages = tile.n, tile.math, tile.depth
    steps, n_tiles = inner // STEP, cdiv(rows, n)
    if reason := tile.misfit(outputs, groups):
        raise ValueError(f"block_scaled_matmul: {tile}: {reason}")
    items = cdiv(outputs, tile.rows) * n_tiles
    clusters = items if tile.splits > 1 else min(items, sms)
    per_group, wide = outputs // groups, out_dtype == jnp.float32
    strided = lambda count: plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    regs, left, one, splat = strided(64 * n), strided(128 * 16), strided(128), plgpu.Layout.WG_SPLAT(())
    own = strided(64 * tile.columns)
    over = lambda a, b: jax.lax.div(a, jnp.int32(b))  # not `//`, which minds signs and is slow to lower
    array = lambda layout, count, dtype: plgpu.ShapeDtypeStruct((count,), dtype, layout=layout)
    sums, own_sums = array(regs, 64 * n, jnp.float32), array(own, 64 * tile.columns, jnp.float32)
    swizzle, narrow = plgpu.SwizzleTransform(128), plgpu.SwizzleTransform(64)
    any_ref, x_ref, w_ref = plgpu.RefType(), plgpu.RefType((swizzle,)), plgpu.RefType((narrow,))

    def inline(arg_types, return_type, function):
        return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)(lambda ctx, *args: function(*args))

    issue = [
        inline((w_ref, x_ref, one, regs), (sums, array(left, 128 * 16, jnp.int32)), lambda *a, c=c: _issue(tile, c, *a))
        for c in (0, 1)
    ]
    drain, settle = inline((left,), None, _drain), inline((regs, left), sums, _settle)
    meet = inline((), None, _meet)
    scale_word = inline((any_ref, splat, splat), array(one, 128, jnp.int32), _scale_word)
    sum_over_cluster = inline((regs, x_ref, splat), own_sums, lambda *a: _sum_over_cluster(tile, *a))
    stage_out = inline((own, x_ref), None, _stage_out)
    store_floats = inline((own, any_ref, splat, splat), None, lambda *a: _store_floats(tile, (rows, outputs), *a))

    def body(x_gmem, w_gmem, s_gmem, out_gmem, x_smem, w_smem, full, empty, out_smem=None):
        wg, cluster, part = (jax.lax.axis_index(name) for name in ("wg", "cluster", "part"))
        mine = over(items - cluster + clusters - 1, clusters)
        after = lambda slot: jnp.where(slot == stages - 1, 0, slot + 1)
        begin, end = (over(steps * (part + i), tile.splits) for i in (0, 1))

        def place(i):
            """(first weight row, first row of x) of this block's i-th tile."""
            index = cluster + i * clusters
            return over(index, n_tiles) * tile.rows, jax.lax.rem(index, jnp.int32(n_tiles)) * n

        def produce():
            if tile.registers:
                plgpu.set_max_registers(tile.registers[0], action="decrease")

            def item(i, state):
                row, first = place(i)
                channel = over(row, per_group) * inner

                def step(k, state):
                    slot, filled = state

                    @pl.when(filled == stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    bar, own = full.at[slot], pl.ds(k * CHUNK, CHUNK)
                    plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(row, tile.rows), own], w_smem.at[slot], bar)
                    channels = pl.ds(channel + k * CHUNK, CHUNK)
                    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(first, n), channels], x_smem.at[slot], bar)
                    return after(slot), jnp.minimum(filled + 1, stages)

                return jax.lax.fori_loop(2 * begin, 2 * end, step, state)

            jax.lax.fori_loop(0, mine, item, (jnp.int32(0), jnp.int32(0)))
            if tile.splits > 1:  # the two meetings of `_sum_over_cluster`
                meet()
                meet()

        def consume():
            if tile.registers:
                plgpu.set_max_registers(tile.registers[1], action="increase")

            def item(i, slot):
                row, first = place(i)

                def step(k, state):
                    # One group of instructions is in flight while the next chunk is expanded, over the steps' ends too.
                    slot, total, held, word = state
                    before, second = jnp.where(slot == 0, stages - 1, slot - 1), after(slot)
                    following = scale_word(s_gmem, row, jnp.minimum(k + 1, steps - 1))
                    plgpu.barrier_wait(full.at[slot])
                    total, first_held = issue[0](w_smem.at[slot], x_smem.at[slot], word, total)
                    drain(held)
                    plgpu.barrier_arrive(empty.at[before], predicate=k > begin)
                    plgpu.barrier_wait(full.at[second])
                    total, held = issue[1](w_smem.at[second], x_smem.at[second], word, total)
                    drain(first_held)
                    plgpu.barrier_arrive(empty.at[slot])
                    return after(second), total, held, following

                zero = plgpu.layout_cast(jnp.zeros((64 * n,), jnp.float32), regs)
                none = plgpu.layout_cast(jnp.zeros((128 * 16,), jnp.int32), left)
                start = (slot, zero, none, scale_word(s_gmem, row, begin))
                slot, total, held, _ = jax.lax.fori_loop(begin, end, step, start)
                total = settle(total, held)
                plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, stages - 1, slot - 1)])
                if tile.splits > 1:
                    total = sum_over_cluster(total, x_smem.at[0], jnp.int32(part))
                    first += part * tile.columns
                if wide:
                    store_floats(total, out_gmem, row, first)
                    return slot
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                stage_out(total, out_smem.at[wg])
                plgpu.commit_smem()
                at = out_gmem.at[pl.ds(first, tile.columns), pl.ds(row + wg * 64, 64)]
                plgpu.copy_smem_to_gmem(out_smem.at[wg], at)
                return slot

            jax.lax.fori_loop(0, mine, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        jax.lax.cond(wg == math, produce, consume)

    scratch = dict(
        x_smem=plgpu.SMEM((stages, n, CHUNK), jnp.bfloat16, transforms=(swizzle,)),
        w_smem=plgpu.SMEM((stages, tile.rows, CHUNK), jnp.float8_e4m3fn, transforms=(narrow,)),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=math, num_barriers=stages),
    )
    if not wide:
        scratch["out_smem"] = plgpu.SMEM((math, tile.columns, 64), jnp.bfloat16, transforms=(swizzle,))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tile.splits,),
        cluster_names=("part",),
        num_threads=math + 1,
        thread_name="wg",
        kernel_name="block_scaled_matmul",
    )(x, w, s)


def splits(outputs: int, inner: int) -> int:
    """Blocks that share a tile's channels: four where there are too few weight rows to fill the device. Of the weight's
    shape alone: it decides the order of a sum."""
    return 4 if outputs <= 2048 and inner >= 2048 else 1


def choose(rows: int, outputs: int, inner: int, groups: int, sms: int) -> Tile:
    """The tile that is done first by a count of cycles: a chunk costs its tensor instructions or its expansion, a tile
    some 2500 more, and blocks come in whole waves."""
    parts = splits(outputs, inner)
    best = None
    for math in (2, 3):
        for count in range(cdiv(rows, MOST_COLUMNS), cdiv(rows, 96) + 1):
            n = round_up(cdiv(rows, count), 8 * parts)
            tile = Tile(n=n, math=math, splits=parts, registers=(32, 160) if math == 3 else None)
            if tile.misfit(outputs, groups):
                continue
            waves = cdiv(cdiv(outputs, tile.rows) * cdiv(rows, n) * parts, sms)
            chunk = max(2 * n * math, 190 * math, 400)
            cycles = waves * (inner // CHUNK / parts * chunk + 2500)
            if best is None or cycles < best[0]:
                best = cycles, tile
    return best[1]


def refuses(x, w, s, *, groups=1, quantised=False, out_dtype=None):
    """Why the kernel does not take these arguments, or None."""
    del s, quantised, out_dtype
    outputs, inner = w.shape
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel is for bfloat16"
    if inner % STEP:
        return f"input channels expected a multiple of {STEP}, got {inner}"
    if outputs % 8 or groups > 1 and outputs // groups % 128:
        return f"outputs expected a multiple of 8, of 128 in every group, got {outputs} in {groups}"
    return None


def block_scaled_matmul(
    x, w, s, *, groups=1, quantised=False, out_dtype=None, sms=None, tile: Tile | None = None
):
    """See `api.block_scaled_matmul`. sms: multiprocessors to fill (default: the device's); tile: for benchmarks."""
    del quantised
    sms = sms or (jax.devices()[0].core_count if jax.default_backend() == "gpu" else H200_SMS)
    tile = tile or choose(x.shape[0], *w.shape, groups, sms)
    return product(x, w, s, tile=tile, groups=groups, out_dtype=jnp.dtype(out_dtype or x.dtype), sms=sms)
