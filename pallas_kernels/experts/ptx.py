"""The per-lane pieces of the Hopper kernel as inline PTX: FP4 table decode, wgmma chains, epilogue stores.

Every function emits code for the calling lane of a warpgroup; values are MLIR values. Imported only while a kernel is
being traced (it needs Mosaic's MLIR bindings).
"""

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax.experimental.mosaic.gpu import utils


def i32():
    return ir.IntegerType.get_signless(32)


def f32():
    return ir.F32Type.get()


def const(x: int):
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), x))


def asm(returns, args, text, constraints, *, effects=False):
    """One inline-assembly statement; returns a list of values."""
    if not returns:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), args, text, constraints, has_side_effects=effects, asm_dialect=0)
        return []
    if len(returns) == 1:
        return [llvm.inline_asm(returns[0], args, text, constraints, has_side_effects=effects, asm_dialect=0)]
    struct = llvm.StructType.get_literal(returns)
    out = llvm.inline_asm(struct, args, text, constraints, has_side_effects=effects, asm_dialect=0)
    return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(returns)]


def smem_address(ref):
    """32-bit shared address of a SMEM memref's first element."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def gmem_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def lane_ids():
    """(thread in warpgroup, warp in warpgroup, lane // 4, lane % 4), all i32."""
    t = arith.andi(utils.thread_idx(), const(127))
    return t, arith.shrui(t, const(5)), arith.andi(arith.shrui(t, const(2)), const(7)), arith.andi(t, const(3))


def add(a, b):
    return arith.addi(a, b)


def mul(a, n: int):
    return arith.muli(a, const(n))


def scalar(array):
    """The MLIR value of a traced scalar argument."""
    return array.registers.flat[0]


# --- registers as arrays ----------------------------------------------------------------------------------------------


def unpack(array):
    """f32[128 * n] array of n registers per lane -> list of n f32 values."""
    return [vector.extract(r, dynamic_position=[], static_position=[0]) for r in array.registers.flat]


def pack(values, n: int):
    layout = mgpu.WGStridedFragLayout((128 * n,), 1)
    vec = ir.VectorType.get((1,), f32())
    registers = np.array([vector.broadcast(vec, v) for v in values], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


# --- loads and decode -------------------------------------------------------------------------------------------------


def load_words(address, offset: int):
    """Four 32-bit words of shared memory."""
    text = f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"
    return asm([i32()] * 4, [address], text, "=r,=r,=r,=r,r", effects=True)


def load_word(address, offset: int):
    return asm([i32()], [address], f"ld.shared.b32 $0, [$1+{offset}];", "=r,r", effects=True)[0]


def load_floats2(address, offset: int):
    return asm([f32()] * 2, [address], f"ld.shared.v2.f32 {{$0,$1}}, [$2+{offset}];", "=f,=f,r", effects=True)


def table(scales, byte: int):
    """Two registers: the e4m3 bytes of code * 2**(t-6) for codes 0..7, t = the given byte of `scales`, 1..12."""
    t = asm([i32()], [scales], f"bfe.u32 $0, $1, {8 * byte}, 8;", "=r,r")[0]
    low = arith.addi(mul(t, 0x08080800), const(0x0C080000))
    high = arith.addi(mul(t, 0x08080808), const(0x1C181410))
    return low, high


def decode(word, low, high):
    """One word of 8 codes (layout.py's sign order) -> two registers of four e4m3 bytes each."""
    text = (
        "{ .reg .b32 m, s;\n"
        "and.b32 m, $2, 0x77777777;\n"
        "shl.b32 s, $2, 4;\n"
        "prmt.b32 $0, $3, $4, m;\n"
        "shr.u32 m, m, 16;\n"
        "prmt.b32 $1, $3, $4, m;\n"
        "lop3.b32 $0, $0, $2, 0x80808080, 0xF8;\n"
        "lop3.b32 $1, $1, s, 0x80808080, 0xF8; }"
    )
    return asm([i32()] * 2, [word, low, high], text, "=&r,=&r,r,r,r")


# --- tensor cores -----------------------------------------------------------------------------------------------------


def b_descriptor(address):
    """wgmma descriptor of 128-byte-swizzled rows of 128 bytes (K-major), 8-row groups 1024 bytes apart."""
    i64 = ir.IntegerType.get_signless(64)
    start = arith.extui(i64, arith.andi(arith.shrui(address, const(4)), const(0x3FFF)))
    fixed = (1 << 62) | (64 << 32) | (1 << 16)
    return arith.ori(start, arith.constant(i64, ir.IntegerAttr.get(i64, fixed)))


def chain(a, descriptor, n: int):
    """Issue the four instructions of a 64 x n x 128 product and commit them as one group.

    a: 16 registers, four per instruction. Returns n/2 accumulators, not to be read before `settle`.
    """
    count = n // 2
    acc = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    lines = ["{ .reg .pred off, on; .reg .b64 d;", "setp.ne.b32 off, 0, 0;", "setp.eq.b32 on, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    for i in range(4):
        regs = "{" + ",".join(f"${count + 4 * i + j}" for j in range(4)) + "}"
        lines.append(f"add.s64 d, ${count + 16}, {2 * i};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {acc}, {regs}, d, {'on' if i else 'off'}, 1, 1;"
        )
    lines.append("wgmma.commit_group.sync.aligned; }")
    constraints = ",".join(["=f"] * count + ["r"] * 16 + ["l"])
    return asm([f32()] * count, [*a, descriptor], "\n".join(lines), constraints, effects=True)


def settle(acc, pending: int):
    """Wait until at most `pending` groups are in flight; returns the accumulators, now readable."""
    n = len(acc)
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)])
    return asm([f32()] * n, acc, f"wgmma.wait_group.sync.aligned {pending};", constraints, effects=True)


def fma(a, b, c):
    return asm([f32()], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")[0]


# --- epilogue ---------------------------------------------------------------------------------------------------------


def _bits(x: float) -> str:
    return f"0f{np.float32(x).view(np.uint32):08X}"


def load_factors(address):
    """The lane's two row factors (f32 pair in global memory)."""
    return asm([f32()] * 2, [address], "ld.global.nc.v2.f32 {$0,$1}, [$2];", "=f,=f,l", effects=True)


def load_global(address, offset: int):
    return asm([f32()], [address], f"ld.global.nc.f32 $0, [$1+{offset}];", "=f,l", effects=True)[0]


def store_swiglu(gate, up, factors, weight, address, column, count, limit: float):
    """bf16(weight * silu(min(g, limit)) * clamp(v, +-limit)) at `address` if column < count; g, v rounded to bf16."""
    text = (
        "{ .reg .f32 g, u, e; .reg .b16 h; .reg .pred p;\n"
        "setp.lt.s32 p, $6, $7;\n"
        "mul.f32 g, $0, $2; cvt.rn.bf16.f32 h, g; cvt.f32.bf16 g, h;\n"
        "mul.f32 u, $1, $3; cvt.rn.bf16.f32 h, u; cvt.f32.bf16 u, h;\n"
        f"min.NaN.f32 g, g, {_bits(limit)};\n"
        f"min.NaN.f32 u, u, {_bits(limit)}; max.NaN.f32 u, u, {_bits(-limit)};\n"
        f"mul.f32 e, g, {_bits(-1.4426950408889634)}; ex2.approx.f32 e, e; add.f32 e, e, {_bits(1.0)};\n"
        "rcp.approx.f32 e, e;\n"
        "mul.f32 g, g, e; mul.f32 g, g, u; mul.f32 g, g, $4;\n"
        "cvt.rn.bf16.f32 h, g;\n"
        "@p st.global.b16 [$5], h; }"
    )
    asm([], [gate, up, *factors, weight, address, column, count], text, "f,f,f,f,f,l,r,r", effects=True)


def store_pair(even, odd, factors, address, column, count):
    """Two neighbouring bf16 outputs at `address` if column < count."""
    text = (
        "{ .reg .f32 a, b; .reg .b32 h; .reg .pred p;\n"
        "setp.lt.s32 p, $5, $6;\n"
        "mul.f32 a, $0, $2; mul.f32 b, $1, $3;\n"
        "cvt.rn.bf16x2.f32 h, b, a;\n"
        "@p st.global.b32 [$4], h; }"
    )
    asm([], [even, odd, *factors, address, column, count], text, "f,f,f,f,l,r,r", effects=True)


def offset_address(base, index, width: int):
    """base + index * width as a 64-bit address; index i32, non-negative."""
    return asm(
        [ir.IntegerType.get_signless(64)], [base, index], f"mad.wide.s32 $0, $2, {width}, $1;", "=l,l,r"
    )[0]
