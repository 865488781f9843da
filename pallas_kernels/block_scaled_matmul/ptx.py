"""The per-lane pieces of the Hopper kernel as inline PTX: e4m3 to bf16, wgmma chains, sums across a cluster, stores.

Every function emits code for the calling lane of a warpgroup; values are MLIR values. Imported only while a kernel is
being traced. The pieces that the experts kernel has too are that kernel's.
"""

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax.experimental.mosaic.gpu import utils

from ..experts.ptx import (
    add, asm, b_descriptor, const, f32, gmem_address, i32, lane_ids, mul, offset_address, pack, scalar, settle,
    smem_address, unpack,
)  # fmt: skip
from .hopper import BIAS, HELD_BACK, LARGEST_SCALE

__all__ = [
    "add", "b_descriptor", "chain", "cluster_barrier", "const", "decode", "drain", "factor", "gmem_address", "lane_ids",
    "load_pair", "load_word", "low_bits", "mul", "offset_address", "pack", "put_remote", "remote_address", "rescaled",
    "scalar", "settle", "shift_right", "smaller", "smem_address", "store_float", "store_transposed", "sum_parts", "unpack",
    "warpgroup", "where_less", "word_array", "words", "xor",
]  # fmt: skip



def warpgroup():
    """Index of the calling lane's warpgroup in its block, i32."""
    return arith.shrui(utils.thread_idx(), const(7))


def xor(a, b):
    return arith.xori(a, const(b) if isinstance(b, int) else b)


def shift_right(a, n: int):
    return arith.shrui(a, const(n))


def low_bits(a, n: int):
    return arith.andi(a, const((1 << n) - 1))


def smaller(a, b):
    return arith.minsi(a, b)


def where_less(a, b, value):
    """value where a < b, else 0 (i32)."""
    return arith.select(arith.cmpi(arith.CmpIPredicate.slt, a, b), value, const(0))


# --- registers as arrays ----------------------------------------------------------------------------------------------


def word_array(values):
    """n i32 values per lane as the traced i32[128 * n] array of a warpgroup."""
    vector_type = ir.VectorType.get((1,), i32())
    registers = np.array([vector.broadcast(vector_type, v) for v in values], dtype=object)
    layout = mgpu.WGStridedFragLayout((128 * len(values),), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def words(array):
    return [vector.extract(r, dynamic_position=[], static_position=[0]) for r in array.registers.flat]


# --- weights ----------------------------------------------------------------------------------------------------------


def load_word(address):
    """One word of global memory that the kernel only reads."""
    return asm([i32()], [address], "ld.global.nc.b32 $0, [$1];", "=r,l", effects=True)[0]


def load_pair(address, offset: int):
    """Two neighbouring bytes of shared memory."""
    text = f"{{ .reg .b16 h; ld.shared.b16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
    return asm([i32()], [address], text, "=r,r", effects=True)[0]


def factor(scales, byte: int):
    """bf16 pair of 2**(b - 127 + BIAS - HELD_BACK), b the given byte of `scales`."""
    text = (
        "{ .reg .b32 b;\n"
        f"bfe.u32 b, $1, {8 * byte}, 8;\n"
        f"min.u32 b, b, {LARGEST_SCALE};\n"
        "shl.b32 b, b, 7;\n"
        f"add.u32 b, b, {(BIAS - HELD_BACK) << 7};\n"
        "prmt.b32 $0, b, b, 0x1010; }"
    )
    return asm([i32()], [scales], text, "=r,r")[0]


def decode(pair, scale):
    """Two e4m3 bytes -> one bf16 pair times `scale`, exactly.

    Sign-extended bytes, shifted, have sign, exponent and mantissa in the places of a bf16, subnormals included; the
    product moves the exponent.
    """
    text = (
        "{ .reg .b32 a;\n"
        "prmt.b32 a, $1, 0, 0x9180;\n"
        "shl.b32 a, a, 4;\n"
        "and.b32 a, a, 0x87F087F0;\n"
        "mul.rn.bf16x2 $0, a, $2; }"
    )
    return asm([i32()], [pair, scale], text, "=r,r,r")[0]


# --- tensor cores -----------------------------------------------------------------------------------------------------


def chain(acc, a, descriptor, n: int):
    """Issue the four instructions of a 64 x n x 64 product added to `acc` and commit them as one group.

    a: 16 registers, four per instruction. Returns n/2 accumulators, not to be read before `settle`.
    """
    count = n // 2
    regs = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    lines = ["{ .reg .pred on; .reg .b64 d;", "setp.eq.b32 on, 0, 0;", "wgmma.fence.sync.aligned;"]
    for i in range(4):
        left = "{" + ",".join(f"${2 * count + 4 * i + j}" for j in range(4)) + "}"
        lines.append(f"add.s64 d, ${2 * count + 16}, {2 * i};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {regs}, {left}, d, on, 1, 1, 0;")
    lines.append("wgmma.commit_group.sync.aligned; }")
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * 16 + ["l"])
    return asm([f32()] * count, [*acc, *a, descriptor], "\n".join(lines), constraints, effects=True)


def drain(held, pending: int):
    """Wait until at most `pending` groups are in flight, the one that reads the registers `held` not among them: being
    this statement's operands, they are given to nothing else before."""
    constraints = ",".join(["r"] * len(held))
    asm([], held, f"wgmma.wait_group.sync.aligned {pending};", constraints, effects=True)


# --- sums across the blocks of a cluster ------------------------------------------------------------------------------


def cluster_barrier():
    """Wait until every thread of the cluster has come here; orders shared-memory accesses across its blocks."""
    asm([], [], "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "", effects=True)


def remote_address(address, rank: int):
    """The address of the same place in the shared memory of the cluster's block `rank`."""
    return asm([i32()], [address], f"mapa.shared::cluster.u32 $0, $1, {rank};", "=r,r")[0]


def put_remote(address, offset: int, values, here):
    """Four floats to another block's shared memory, where the i32 `here` is 0."""
    text = f"{{ .reg .pred p; setp.eq.s32 p, $5, 0; @p st.shared::cluster.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}}; }}"
    asm([], [address, *values, here], text, "r,f,f,f,f,r", effects=True)


def sum_parts(address, offset: int, stride: int, parts: int):
    """Four sums of `parts` float4 values in shared memory, `stride` bytes apart, added in order."""
    text = "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4+%d];"
    load = lambda i: asm([f32()] * 4, [address], text % (offset + i * stride), "=f,=f,=f,=f,r", effects=True)
    loaded = [load(i) for i in range(parts)]
    total = loaded[0]
    for part in loaded[1:]:
        total = [arith.addf(t, v) for t, v in zip(total, part, strict=True)]
    return total


# --- epilogue ---------------------------------------------------------------------------------------------------------


def rescaled(acc):
    """Sums times 2**HELD_BACK."""
    back = arith.constant(f32(), ir.FloatAttr.get(f32(), 2.0**HELD_BACK))
    return [arith.mulf(a, back) for a in acc]


def store_transposed(address, acc):
    """One or two column blocks (4 sums each) as bf16 to shared memory: `address` is that of the calling lane's line.

    Lane 8 m + i gives the 16 bytes that take matrix m's column i: rows 0..7 (m even) or 8..15 (m odd) of column block
    m // 2.
    """
    count = len(acc) // 4
    names = [f"h{i}" for i in range(2 * count)]
    lines = [f"{{ .reg .b32 {', '.join(names)};"]
    lines += [f"cvt.rn.bf16x2.f32 h{i}, ${2 * i + 1}, ${2 * i};" for i in range(2 * count)]
    regs = "{" + ", ".join(names) + "}"
    lines.append(f"stmatrix.sync.aligned.m8n8.x{2 * count}.trans.shared.b16 [${4 * count}], {regs}; }}")
    asm([], [*acc, address], "\n".join(lines), ",".join(["f"] * 4 * count + ["r"]), effects=True)


def store_float(value, address, offset: int, column, count):
    """f32 at `address` + offset of global memory, if column < count."""
    text = f"{{ .reg .pred p; setp.lt.s32 p, $2, $3; @p st.global.f32 [$1+{offset}], $0; }}"
    asm([], [value, address, column, count], text, "f,l,r,r", effects=True)
