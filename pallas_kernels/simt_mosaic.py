"""The machine of `simt` on the GPU: emits MLIR inside a Mosaic GPU kernel, one block of threads per row."""

import contextlib

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

from . import simt
from .codecs import cdiv, round_up
from .simt import FULL_WARP, Word

_PREDICATES = {"eq": 0, "ne": 1, "slt": 2, "sle": 3, "sgt": 4, "sge": 5, "ult": 6}


def _i32():
    return ir.IntegerType.get_signless(32)


def _shift_in_sign(a, b):
    return utils.inline_ptx("shf.l.wrap.b32 $0, $2, $1, 1;", a, b, result_types=_i32())


class Machine(simt.Algorithms):
    """See `simt.Emulator` for what each method means; here each one emits code."""

    def __init__(self, threads: int, groups: int, shared_ref, shared_words: int):
        self.threads, self.warps, self._groups = threads, threads // FULL_WARP, groups
        self._used = 0
        i32 = _i32()
        thread = Word(self, arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)))
        block = Word(self, arith.index_cast(i32, gpu.block_id(gpu.Dimension.x)))
        warp = Word(self, utils.warp_idx())
        self.lane = thread & (FULL_WARP - 1)
        self._group = Word(self, arith.divui(warp.x, self.word(self.warps).x))
        self.warp = warp - self._group * self.warps
        self.tid = thread - self._group * threads
        self.row = block * groups + self._group
        base = utils.memref_ptr(shared_ref)
        self._shared_base = utils.getelementptr(base, [(self._group * shared_words).x], i32)

    # values
    def word(self, x):
        if isinstance(x, Word):
            return x
        x &= 0xFFFFFFFF
        return Word(self, utils.c(x - (1 << 32) if x >> 31 else x, _i32()))

    def binary(self, name, a, b):
        if name in ("umin2", "umax2"):
            pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(16))
            op = arith.minui if name == "umin2" else arith.maxui
            return llvm.bitcast(_i32(), op(llvm.bitcast(pair, a), llvm.bitcast(pair, b)))
        return {
            "add": arith.addi, "sub": arith.subi, "mul": arith.muli, "udiv": arith.divui, "and": arith.andi,
            "or": arith.ori, "xor": arith.xori, "signin": _shift_in_sign, "shl": arith.shli, "shr": arith.shrui, "smin": arith.minsi, "smax": arith.maxsi,
        }[name](a, b)  # fmt: skip

    def compare(self, name, a, b):
        return arith.cmpi(_PREDICATES[name], a, b)

    def flag_and(self, a, b):
        return arith.andi(a, b)

    def flag_or(self, a, b):
        return arith.ori(a, b)

    def flag_not(self, a):
        return arith.xori(a, utils.c(1, a.type))

    def select(self, c, a, b):
        return arith.select(c, a, b)

    def popcount(self, a):
        return llvm.intr_ctpop(a)

    def opaque(self, value):
        return Word(self, utils.inline_ptx("mov.b32 $0, $1;", value.x, result_types=_i32(), has_side_effects=True))

    # control
    @contextlib.contextmanager
    def when(self, flag):
        with utils.when(flag.x):
            yield

    def loop(self, count, body):
        zero, one = utils.c(0, _i32()), utils.c(1, _i32())
        op = scf.ForOp(zero, count.x, one, [])
        with ir.InsertionPoint(op.body):
            body(Word(self, op.induction_variable))
            scf.yield_([])

    def fold(self, count, start, body):
        op = scf.ForOp(utils.c(0, _i32()), count.x, utils.c(1, _i32()), [start.x])
        with ir.InsertionPoint(op.body):
            scf.yield_([body(Word(self, op.induction_variable), Word(self, op.inner_iter_args[0])).x])
        return Word(self, op.results[0])

    def each_bit(self, bits, start, body):
        types = [_i32(), _i32()]
        op = scf.WhileOp(types, [bits.x, start.x])
        before, after = op.before.blocks.append(*types), op.after.blocks.append(*types)
        with ir.InsertionPoint(before):
            scf.condition(Word(self, before.arguments[0]).differs(0).x, list(before.arguments))
        with ir.InsertionPoint(after):
            left, carry = (Word(self, x) for x in after.arguments)
            carry = body(left.lowest_bit(), carry)
            scf.yield_([(left & (left - 1)).x, carry.x])

    def amend(self, flag, words, change):
        op = scf.IfOp(flag.x, [_i32()] * len(words), has_else=True)
        for block, branch in ((op.then_block, change), (op.else_block, lambda: words)):
            with ir.InsertionPoint(block):
                scf.yield_([w.x for w in branch()])
        return [Word(self, r) for r in op.results]

    def barrier(self):
        """The threads of one row meet; named barriers from the top, away from those Mosaic takes from the bottom."""
        if self._groups == 1:
            gpu.barrier()
        else:
            identity = (15 - self._group).x
            text = f"bar.sync $0, {self.threads};"
            utils.inline_ptx(text, identity, has_side_effects=True, convergent=True)

    # global memory
    def _address(self, array, index, element_bits):
        wide = arith.extui(ir.IntegerType.get_signless(64), index.x)
        return utils.getelementptr(array.ref, [wide], ir.IntegerType.get_signless(element_bits))

    def _flag_word(self, where):
        return arith.extui(_i32(), where.x)

    def load(self, array, index, where=None, other=0):
        if where is None:
            return Word(self, llvm.load(_i32(), self._address(array, index, 32)))
        return self.load_many(array, index, 1, where, other)[0]

    def load_many(self, array, index, count, where=None, other=0, offset=0):
        address = llvm.ptrtoint(ir.IntegerType.get_signless(64), self._address(array, index, 32))
        names = [f"${i}" for i in range(count)]
        target = names[0] if count == 1 else "{" + ", ".join(names) + "}"
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[count]
        args, guard, setup = [address], "", ""
        # Not ld.global.nc: ptxas moves that over griddepcontrol.wait, to where the kernel before has not written yet.
        if where is not None:  # one predicated load, so that several stay in flight
            args.append(self._flag_word(where))
            fill = " ".join(f"mov.b32 {n}, {other & 0xFFFFFFFF};" for n in names)
            setup, guard = f".reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {fill} ", "@p "
        text = f"{{ {setup}{guard}ld.global.{kind} {target}, [${count} + {4 * offset}]; }}"
        return [Word(self, x) for x in utils.inline_ptx(text, *args, result_types=[_i32()] * count)]

    def load_byte(self, array, index, where=None, other=0):
        i8 = ir.IntegerType.get_signless(8)
        if where is not None:
            index = where.pick(index, 0)
        value = Word(self, arith.extui(_i32(), llvm.load(i8, self._address(array, index, 8))))
        return value if where is None else where.pick(value, other)

    def store(self, array, index, value, where=None):
        with self._guarded(where):
            llvm.store(value.x, self._address(array, index, 32))

    def store_byte(self, array, index, value, where=None):
        with self._guarded(where):
            byte = arith.trunci(ir.IntegerType.get_signless(8), value.x)
            llvm.store(byte, self._address(array, index, 8))

    def _guarded(self, where):
        return contextlib.nullcontext() if where is None else self.when(where)

    # shared memory
    def shared(self, words):
        base = self._used
        self._used += words
        return base, words

    def _slot(self, array, index):
        at = self.word(index) + array[0]
        return utils.getelementptr(self._shared_base, [at.x], _i32())

    def get(self, array, index):
        return Word(self, llvm.load(_i32(), self._slot(array, index)))

    def get_many(self, array, index, count):
        """`count` consecutive words from a multiple of `count`."""
        i32 = _i32()
        vector = llvm.load(ir.VectorType.get((count,), i32), self._slot(array, index), alignment=4 * count)
        return [Word(self, llvm.extractelement(vector, utils.c(i, i32))) for i in range(count)]

    def put(self, array, index, value, where=None):
        with self._guarded(where):
            llvm.store(self.word(value).x, self._slot(array, index))

    def put_many(self, array, index, values):
        vector = llvm.mlir_undef(ir.VectorType.get((len(values),), _i32()))
        for i, value in enumerate(values):
            vector = llvm.insertelement(vector, value.x, utils.c(i, _i32()))
        llvm.store(vector, self._slot(array, index), alignment=4 * len(values))

    def _reduce(self, kind, array, index, value, where):
        address = llvm.ptrtoint(_i32(), self._slot(array, index))
        args, text = [address, self.word(value).x], f"red.shared.{kind} [$0], $1;"
        if where is not None:
            args.append(self._flag_word(where))
            text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p {text} }}"
        utils.inline_ptx(text, *args, has_side_effects=True)

    def add(self, array, index, value, where=None):
        self._reduce("add.u32", array, index, value, where)

    def set_bits(self, array, index, value, where=None):
        self._reduce("or.b32", array, index, value, where)

    # warps
    def _shuffle(self, value, lane, clamp, kind):
        mask, clamp = utils.c(-1, _i32()), utils.c(clamp, _i32())
        return Word(self, nvvm.shfl_sync(mask, value.x, self.word(lane).x, clamp, kind))

    def shuffle_up(self, value, step):
        return self._shuffle(value, step, 0, nvvm.ShflKind.up)

    def shuffle(self, value, lane):
        return self._shuffle(value, lane, FULL_WARP - 1, nvvm.ShflKind.idx)

    def ballot(self, flag):
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
        args = [self._flag_word(flag)]
        return Word(self, utils.inline_ptx(text, *args, result_types=_i32(), has_side_effects=True, convergent=True))

    def sum_warp(self, value):
        text = "redux.sync.add.s32 $0, $1, 0xffffffff;"
        return Word(self, utils.inline_ptx(text, value.x, result_types=_i32(), has_side_effects=True, convergent=True))

    # launch control
    def trigger_dependents(self):
        utils.inline_ptx("griddepcontrol.launch_dependents;", has_side_effects=True)


def _global_array(memref) -> simt.Array:
    return simt.Array(llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(memref)))


def launch(kernel, inputs, outputs, *, name: str, rows: int, threads: int, shared_words: int, groups: int = 1):
    """Run `kernel(machine, *inputs, *outputs)` with `threads` threads per row.

    inputs: jax arrays. outputs: (shape, dtype) each. threads * groups: a multiple of 128, at most 1024. groups: rows
    that share a block of threads. The compiler sizes registers for the threads of a block, so putting as many rows in
    a block as should live on an SM at once is how a kernel says how many registers it may use.
    Waits for the kernels before it (programmatic dependent launch) before it reads. Returns the tuple of outputs.
    """
    out_type = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs)
    count = len(inputs) + len(outputs)
    shared_words = round_up(shared_words, 4)  # every row's part starts where a 16-byte access may

    def body(*refs):
        plgpu.griddepcontrol_wait()

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (count + 1))
        def emit(ctx, *memrefs):
            del ctx
            machine = Machine(threads, groups, memrefs[-1], shared_words)
            arrays = [_global_array(r) for r in memrefs[:-1]]
            guard = machine.when(machine.row < rows) if rows % groups else contextlib.nullcontext()
            with guard:
                kernel(machine, *arrays)

        emit(*refs)

    call = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[plgpu.SMEM((shared_words * groups,), jnp.int32)],
        grid=(cdiv(rows, groups),),
        grid_names=("block",),
        num_threads=threads * groups // 128,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(*inputs)
