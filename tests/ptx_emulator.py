"""Run the PTX of the Hopper (Gluon) kernels on a CPU, launched as their own module launches them.

    with ptx_emulator.emulated():
        got = hopper.index_score(**inputs)

`gluon_call` compiles the kernel for sm_90a and builds its launch as for a GPU; what it would hand to jaxlib (PTX,
grid, warps, bytes of shared memory, arrays) is run here instead. All warps of the grid are numpy lanes [warp, 32] of
one machine; those that stand at the same instruction execute it at once.

Modelled: integer, predicate, f32, bf16 and packed e4m3 arithmetic bit by bit (fma through fp64); warp shuffles and
reductions; global memory with 16-byte-aligned buffers, where an access outside a buffer, misaligned, or a write to an
input is an error and the output starts as NaN; shared memory, which starts as NaN; ldmatrix and stmatrix; named
barriers with their thread counts; mbarriers (init, arrive, wait for a parity); cp.async, which lands when its arrival
is issued; wgmma of e4m3 and bf16 with A in registers or in shared memory and B in shared memory through its descriptor
(offsets, 32-, 64- and 128-byte swizzle, MN-major B); mma.sync of bf16; branches by index. A warp runs until it waits,
and `order` says which of the ready ones is next: where a barrier is missing, one of the orders reads or overwrites too
early, unless another barrier stands in for it. A deadlock and a program without end are errors.

Not modelled: time; asynchrony (a wgmma reads its operands and writes its result where it is issued, so fences, commits
and waits for it do nothing, nor do griddepcontrol, setmaxnreg and prefetches, and their absence goes unseen); the
tensor core's short accumulation (a product is summed in fp64 and rounded to fp32 once an instruction); the error of
ex2.approx and div.full, which round correctly here and keep subnormals; lanes of one warp that part at a branch (an
error); clusters, TMA, local memory. The instructions are the tables of tests/ptx_instructions.py: any other, or
another modifier, is refused with its line before anything runs.
"""

import contextlib
import dataclasses
import functools
import pickle
import re
import types
import zlib
from unittest import mock

import numpy as np

from tests.ptx_instructions import ARITHMETIC, CONTROL, LANE, OTHERS, TYPES, PtxError, arithmetic

MOST_SHARED = 227 * 1024  # bytes that a program may have on sm_90
MOST_BLOCKS = 10**6  # basic blocks that a grid may execute
ORDERS = ("together", "ascending", "descending")
_BASE = 1 << 40  # address of the first buffer
_GAP = 4096  # bytes that belong to nobody around a buffer
_RUNNING, _AT_BARRIER, _AT_MBARRIER, _DONE = range(4)


# --- the program ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Address:
    base: object  # register or immediate
    offset: int


@dataclasses.dataclass
class _Instruction:
    line: int
    text: str
    operands: list
    predicate: str | None
    negated: bool
    execute: object = None  # (machine, operands, *details), None of a control instruction
    details: tuple = ()
    control: str = ""
    targets: tuple[int, ...] = (-1,)  # of a branch, more than one if by index


_STATEMENT = re.compile(r"\s*(?:([{}])|([\w$]+):(?!:)|((?:[^;{}]|\{[^}]*\})*);)")
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0f[0-9a-fA-F]{8}|\d+)U?")


def _operand(text: str):
    text = text.strip()
    if text[0] == "{":
        return [_operand(x) for x in text[1:-1].split(",")]
    if text[0] == "[":
        base, _, offset = text[1:-1].partition("+")
        return _Address(_operand(base), int(offset or 0))
    if text == "global_smem":  # shared memory begins at 0
        return np.zeros((1, 1), np.uint64)
    if _NUMBER.fullmatch(text):
        digits = text.rstrip("U")
        number = int(digits.replace("0f", "0x"), 0)
        return np.full((1, 1), number & (2**64 - 1), np.uint64)
    if not re.fullmatch(r"[%$a-zA-Z_][$\w.]*", text):
        raise PtxError(f"{text!r} is no operand")
    return text


def _instruction(line: int, text: str) -> _Instruction:
    guard, name, rest = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?(\S+)\s*(.*)", text, re.DOTALL).groups()
    operands = [_operand(x) for x in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)]
    made = _Instruction(line, text, operands, guard and guard.lstrip("!"), bool(guard) and guard[0] == "!")
    if re.fullmatch(CONTROL, name):
        made.control = name.split(".")[0]
        return made
    elementwise = re.fullmatch(rf"(.+)\.({TYPES})", name)
    if elementwise and elementwise[1] in ARITHMETIC and not re.fullmatch(r"mul\.hi\.\w64", name):
        made.execute = arithmetic(*elementwise.groups())
        return made
    for pattern, execute in OTHERS:
        if match := re.fullmatch(pattern, name):
            made.execute, made.details = execute, match.groups()
            return made
    raise PtxError(f"line {line}: {text!r} is no instruction that the emulator knows")


@functools.lru_cache(maxsize=2)
def parse(ptx: str) -> tuple[list[str], list[_Instruction]]:
    """-> (parameters' names, instructions) of the only entry of a module. Raises PtxError for what it does not know."""
    ptx = re.sub(r"//[^\n]*|^[ \t]*\.(?:loc|file)\b[^\n]*", "", ptx, flags=re.MULTILINE)
    head = ptx.index("{", ptx.index(".entry"))
    parameters = re.findall(r"(\w+_param_\d+)", ptx[ptx.index(".entry") : head])
    at, line, code, scopes, labels, branches = head + 1, 1 + ptx.count("\n", 0, head + 1), [], [0], {}, []
    tables = dict(re.findall(r"([$\w]+):\s*\.branchtargets\s+([^;]*);", ptx))
    while scopes:
        match = _STATEMENT.match(ptx, at)
        if not match:
            raise PtxError(f"line {line}: what follows is no statement: {ptx[at : at + 80]!r}")
        brace, label, text = match.groups()
        first, line = line + ptx.count("\n", at, match.start(match.lastindex)), line + ptx.count("\n", at, match.end())
        at = match.end()
        if brace == "{":
            scopes.append(at)  # labels of inline assembly are its own
        elif brace == "}":
            scopes.pop()
        elif label:
            labels[scopes[-1], label] = len(code)
        elif text.strip() and not text.strip().startswith("."):
            code.append(_instruction(first, " ".join(text.split())))
            if code[-1].control in ("bra", "brx"):
                branches.append((code[-1], list(scopes)))
    for branch, around in branches:
        name = branch.operands[-1]
        names = [x.strip() for x in tables.get(name, "").split(",")] if branch.control == "brx" else [name]
        places = []
        for name in names:
            scope = next((s for s in reversed(around) if (s, name) in labels), None)
            if scope is None:
                raise PtxError(f"line {branch.line}: there is no label {name}")
            places.append(labels[scope, name])
        branch.targets = tuple(places)
    return parameters, code


# --- the machine ------------------------------------------------------------------------------------------------------


class _Machine:
    """All warps of a grid. `active`: the warps that execute now; `mask`: the lanes of them that do, bool[warp, 32]."""

    def __init__(self, ptx, arrays, out_bytes, grid, warps, shared):
        names, self.code = parse(ptx)
        ctas = int(np.prod(grid))
        self.cta, self.warp = np.divmod(np.arange(ctas * warps), warps)
        self.warps, self.shared_bytes = warps, shared
        self.shared = np.full(ctas * shared, 0xFF, np.uint8)
        self.mbarriers, self.registers = {}, {}
        self.copies = []  # (warps, shared addresses, bytes, lanes) on their way
        self.pc, self.state = np.zeros(len(self.cta), np.int64), np.full(len(self.cta), _RUNNING)
        self.waits = [None] * len(self.cta)
        self.starts = {0, *(t for c in self.code for t in c.targets), *(i + 1 for i, c in enumerate(self.code) if c.control)}
        buffers = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
        buffers.append(np.full(out_bytes, 0xFF, np.uint8))
        self.parameters, at = dict.fromkeys(names, 0), _BASE
        for name, buffer in zip(names, buffers, strict=False):
            self.parameters[name] = at
            at += len(buffer) + _GAP - len(buffer) % 16
        self.buffers = buffers  # not copied: of a huge input only what is touched need be there
        self.first = np.array([self.parameters[name] for name in names[: len(buffers)]])
        self.lengths = np.array([len(buffer) for buffer in buffers])
        special = {"%tid.x": self.warp[:, None] * 32 + LANE, "%dynamic_smem_size": shared}
        for axis, index in zip("xyz", np.unravel_index(self.cta, grid[::-1])[::-1], strict=True):
            special |= {f"%ctaid.{axis}": index[:, None], f"%nctaid.{axis}": grid["xyz".index(axis)]}
        for name, value in special.items():
            self.registers[name] = np.broadcast_to(np.asarray(value, np.uint64), (len(self.cta), 32)).copy()

    def read(self, operand):
        """u64, broadcastable to [active, 32]."""
        if not isinstance(operand, str):
            return operand
        return self._register(operand)[self.active]

    def _register(self, name):
        """u64[warp, 32]; all bits are set, which is NaN, before anything is written there."""
        if name not in self.registers:
            if name[0] == "%" and not re.fullmatch(r"%[a-z]{1,2}\d+", name):
                raise PtxError(f"{name} is no special register that the emulator knows")
            self.registers[name] = np.full((len(self.cta), 32), 2**64 - 1, np.uint64)
        return self.registers[name]

    def lanes(self, operand):
        return np.ascontiguousarray(np.broadcast_to(self.read(operand), (len(self.active), 32)))

    def write(self, name, value):
        register = self._register(name)
        if self.mask is not True:
            value = np.where(self.mask, value, register[self.active])
        register[self.active] = value

    def address(self, place: _Address):
        return self.lanes(place.base) + np.uint64(place.offset & (2**64 - 1))

    def _bytes_at(self, space, address, size, mask, writes):
        """-> ([(memory, which of the lanes in `mask` it is of, i64[n, size] indices of those)], that mask)."""
        mask = np.broadcast_to(mask, address.shape)
        at = address[mask].astype(np.int64)
        wrong = (at < 0) | (at % size != 0)
        if space == "global":
            buffer = np.maximum(np.searchsorted(self.first, at, "right") - 1, 0)
            at = at - self.first[buffer]
            wrong |= (at < 0) | (at + size > self.lengths[buffer])
            if writes:
                wrong |= buffer != len(self.buffers) - 1
        else:
            wrong |= at + size > self.shared_bytes
            at = at + np.broadcast_to(self.cta[self.active][:, None], address.shape)[mask] * self.shared_bytes
        if wrong.any():
            where = f"{space} address {int(address[mask][wrong][0]):#x}"
            raise PtxError(f"{size} bytes at {where} lie outside what may be accessed or are misaligned")
        at = at[:, None] + np.arange(size)
        if space != "global":
            return [(self.shared, slice(None), at)], mask
        return [(self.buffers[b], buffer == b, at[buffer == b]) for b in np.unique(buffer)], mask

    def gather(self, space, address, size, mask):
        """-> u8[*address.shape, size], zeros where `mask` is false."""
        pieces, mask = self._bytes_at(space, address, size, mask, False)
        out, found = np.zeros((*address.shape, size), np.uint8), np.empty((np.count_nonzero(mask), size), np.uint8)
        for memory, lanes, at in pieces:
            found[lanes] = memory[at]
        out[mask] = found
        return out

    def scatter(self, space, address, data, mask):
        pieces, mask = self._bytes_at(space, address, data.shape[-1], mask, True)
        for memory, lanes, at in pieces:
            memory[at] = data[mask][lanes]

    def run(self, order):
        """Execute until every warp has returned. Raises PtxError with the line that went wrong."""
        with np.errstate(all="ignore"):
            for _ in range(MOST_BLOCKS):
                if (self.state == _DONE).all():
                    return
                ready = np.flatnonzero(self.state == _RUNNING)
                if not len(ready):
                    self._release()
                    continue
                if order != "together":
                    turn = self.warp[ready].min() if order == "ascending" else self.warp[ready].max()
                    ready = ready[self.warp[ready] == turn]
                at = self.pc[ready].min()
                self.active = ready[self.pc[ready] == at]
                self._block(int(at))
        raise PtxError(f"no end after {MOST_BLOCKS} basic blocks, at line {self.code[at].line}")

    def _block(self, at):
        """Execute the active warps to the end of their basic block."""
        while True:
            code = self.code[at]
            try:
                self.mask = True
                if code.predicate:
                    self.mask = (self.lanes(code.predicate) != 0) != code.negated
                if code.control:
                    self.pc[self.active] = at + 1
                    return self._control(code, at)
                if self.mask is True or self.mask.any():
                    code.execute(self, code.operands, *code.details)
            except Exception as error:
                raise PtxError(f"line {code.line}: {code.text}: {error}") from error
            at += 1
            if at in self.starts:
                self.pc[self.active] = at
                return

    def _control(self, code, at):
        if code.control == "bra":
            taken = np.broadcast_to(self.mask, (len(self.active), 32))
            if (taken != taken[:, :1]).any():
                raise PtxError("lanes of a warp part ways")
            self.pc[self.active[taken[:, 0]]] = code.targets[0]
        elif self.mask is not True:
            raise PtxError("not known under a predicate")
        elif code.control == "brx":
            index = np.broadcast_to(self.lanes(code.operands[0]), (len(self.active), 32)).astype(np.int64)
            if (index != index[:, :1]).any():
                raise PtxError("lanes of a warp part ways")
            self.pc[self.active] = np.array(code.targets)[index[:, 0]]
        elif code.control == "ret":
            self.state[self.active] = _DONE
        elif code.control in ("bar", "barrier"):
            threads = int(code.operands[1].item()) if len(code.operands) > 1 else 32 * self.warps
            for w in self.active:
                self.waits[w] = (self.cta[w], int(code.operands[0].item()), threads)
            self.state[self.active] = _AT_BARRIER
            self._open_barriers()
        else:  # mbarrier.try_wait: the loop around it ends at once when the warp goes on
            self.write(code.operands[0], np.ones((1, 1), np.uint64))
            address, parity = self.address(code.operands[1])[:, 0], self.lanes(code.operands[2])[:, 0]
            for i, w in enumerate(self.active):
                self.waits[w] = (self.cta[w], int(address[i]), int(parity[i]))
                if self.waits[w][:2] not in self.mbarriers:
                    raise PtxError(f"there is no mbarrier at {address[i]:#x}")
            self.state[self.active] = _AT_MBARRIER

    def _open_barriers(self):
        for key in {self.waits[w] for w in self.active}:
            there = [w for w in np.flatnonzero(self.state == _AT_BARRIER) if self.waits[w] == key]
            if 32 * len(there) == key[2]:
                self.state[there] = _RUNNING

    def _release(self):
        """Let go whoever waits for a phase that has completed; somebody has to."""
        stuck = True
        for w in np.flatnonzero(self.state == _AT_MBARRIER):
            cta, address, parity = self.waits[w]
            if self.mbarriers[cta, address][2] % 2 != parity:
                self.state[w], stuck = _RUNNING, False
        if stuck:
            where = [f"warp {self.warp[w]} of program {self.cta[w]} at line {self.code[self.pc[w] - 1].line}"
                     for w in np.flatnonzero(self.state != _DONE)]  # fmt: skip
            raise PtxError("deadlock: " + ", ".join(where))


# --- launches ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def emulated(order: str = "together", edit=None):
    """While it is open, what `gluon_call` launches runs here, and its calls return numpy arrays.

    order: of the warps that could go on, "together": those that are furthest behind, at once; "ascending",
    "descending": the first or the last of a program alone, until it waits. edit: a function of the PTX that returns
    what to run.
    Raises ValueError for an unknown order; PtxError comes out of the call that launches the kernel.
    """
    import jax
    from jax._src import lib

    if order not in ORDERS:
        raise ValueError(f"emulated: order expected one of {ORDERS}, got {order!r}")

    class Call:
        def __init__(self, kernel, *rest):
            self.launch = (*kernel, *rest)

        def to_proto(self, name, metadata):
            return pickle.dumps(self.launch)

    def kernel(name, warps, ctas, shared, ptx, ttgir, capability):
        if ctas != 1 or capability != 90 or shared > MOST_SHARED:
            wanted = f"sm_{capability}, clusters of {ctas}, {shared} bytes of shared memory"
            raise ValueError(f"emulated: {name} wants {wanted}; there are sm_90, clusters of 1, {MOST_SHARED} bytes")
        return ptx, warps, shared

    def ffi_call(target, out_shape, *, custom_call_api_version, legacy_backend_config):
        ptx, warps, shared, *grid, _ = pickle.loads(zlib.decompress(legacy_backend_config))

        def call(*arrays):
            dtype = np.dtype(out_shape.dtype)
            size = int(np.prod(out_shape.shape)) * dtype.itemsize
            text = edit(ptx) if edit else ptx
            machine = _Machine(text, [np.asarray(a) for a in arrays], size, tuple(grid), warps, shared)
            machine.run(order)
            return machine.buffers[-1].view(dtype).reshape(out_shape.shape)

        return call

    library = types.SimpleNamespace(TritonKernel=kernel, TritonKernelCall=Call, create_array_parameter=lambda *_: None)
    with mock.patch.object(lib, "gpu_triton", library, create=True), mock.patch.object(jax.ffi, "ffi_call", ffi_call):
        yield
