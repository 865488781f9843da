"""Thread-level kernels written once, compiled for the GPU or run in numpy.

A kernel here is a Python function `kernel(m, ...)` over a machine `m`: one block of threads per row of a grid, 32-bit
words and predicates as values, shared memory, barriers, warp shuffles. `simt_mosaic.launch` gives it a machine that
emits Mosaic GPU code (histograms in shared memory, ballots and warp scans are not reachable from array-level Pallas);
`emulate` gives it the machine below, which runs all threads of all blocks in lock step and checks what lock step would
hide: reads of shared memory nobody wrote, accesses out of bounds, and two threads touching a shared word between the
same two barriers. So a kernel's logic is tested on a laptop, bit for bit, before a GPU sees it.

Words are 32 bits. `<`, `>` and friends compare as signed; `below` as unsigned; `>>` shifts in zeros.
"""

import contextlib

import numpy as np

FULL_WARP = 32


class Word:
    """A 32-bit value per thread."""

    __slots__ = ("m", "x")

    def __init__(self, m, x):
        self.m, self.x = m, x

    def _op(self, name, other, flip=False):
        other = self.m.word(other)
        a, b = (other, self) if flip else (self, other)
        return Word(self.m, self.m.binary(name, a.x, b.x))

    def _cmp(self, name, other):
        return Flag(self.m, self.m.compare(name, self.x, self.m.word(other).x))

    def __add__(self, o):
        return self._op("add", o)

    def __sub__(self, o):
        return self._op("sub", o)

    def __rsub__(self, o):
        return self._op("sub", o, flip=True)

    def __mul__(self, o):
        return self._op("mul", o)

    def __and__(self, o):
        return self._op("and", o)

    def __or__(self, o):
        return self._op("or", o)

    def __xor__(self, o):
        return self._op("xor", o)

    def __lshift__(self, o):
        return self._op("shl", o)

    def __rlshift__(self, o):
        return self._op("shl", o, flip=True)

    def __rshift__(self, o):
        return self._op("shr", o)

    def __lt__(self, o):
        return self._cmp("slt", o)

    def __le__(self, o):
        return self._cmp("sle", o)

    def __gt__(self, o):
        return self._cmp("sgt", o)

    def __ge__(self, o):
        return self._cmp("sge", o)

    def equals(self, o):
        return self._cmp("eq", o)

    def differs(self, o):
        return self._cmp("ne", o)

    def below(self, o):
        """Unsigned less-than."""
        return self._cmp("ult", o)

    def minimum(self, o):
        return self._op("smin", o)

    def maximum(self, o):
        return self._op("smax", o)

    def __floordiv__(self, o):
        """Unsigned quotient; cheap by a Python number."""
        return self._op("udiv", o)

    def half_min(self, o):
        """Unsigned minimum of each 16-bit half."""
        return self._op("umin2", o)

    def half_max(self, o):
        """Unsigned maximum of each 16-bit half."""
        return self._op("umax2", o)

    def shift_in_sign(self, o):
        """One bit to the left, the sign of `o` coming in."""
        return self._op("signin", o)

    def ones(self):
        """Number of set bits."""
        return Word(self.m, self.m.popcount(self.x))

    def lowest_bit(self):
        """Index of the lowest set bit (32 for 0)."""
        return ((self & (0 - self)) - 1).ones()

    def clamp(self, low, high):
        return self.maximum(low).minimum(high)


class Flag:
    """A truth value per thread."""

    __slots__ = ("m", "x")

    def __init__(self, m, x):
        self.m, self.x = m, x

    def __and__(self, o):
        return Flag(self.m, self.m.flag_and(self.x, o.x))

    def __or__(self, o):
        return Flag(self.m, self.m.flag_or(self.x, o.x))

    def __invert__(self):
        return Flag(self.m, self.m.flag_not(self.x))

    def pick(self, yes, no) -> Word:
        """yes where true, no elsewhere."""
        return Word(self.m, self.m.select(self.x, self.m.word(yes).x, self.m.word(no).x))


class Algorithms:
    """What both machines share: warp and block scans from shuffles, shared memory and barriers."""

    def scan_warp(self, value):
        """Inclusive prefix sum of one word over the lanes of a warp."""
        for step in (1, 2, 4, 8, 16):
            value = value + (self.lane >= step).pick(self.shuffle_up(value, step), 0)
        return value

    def scan_warps(self, total, scratch):
        """Exclusive prefix sum over the warps of each warp's `total` (uniform in a warp), and the block's sum.

        scratch: shared array with a word per warp, not in use since the last barrier. Holds one barrier.
        """
        self.put(scratch, self.warp, total, where=self.lane.equals(0))
        self.barrier()
        present = self.lane < self.warps
        sums = self.scan_warp(present.pick(self.get(scratch, present.pick(self.lane, 0)), 0))
        before = (self.warp > 0).pick(self.shuffle(sums, (self.warp - 1).maximum(0)), 0)
        return before, self.shuffle(sums, self.warps - 1)

    def scan_block(self, value, scratch):
        """Exclusive prefix sum of one word over all threads, and the block's sum. Holds one barrier."""
        inclusive = self.scan_warp(value)
        before, total = self.scan_warps(self.shuffle(inclusive, FULL_WARP - 1), scratch)
        return before + inclusive - value, total


class Array:
    """A global array as a machine sees it: flat words (or bytes), by index."""

    def __init__(self, ref):
        self.ref = ref


class Emulator(Algorithms):
    """All threads of `rows` blocks in lock step, in numpy."""

    def __init__(self, rows: int, threads: int, shared_words: int):
        self.rows, self.threads, self.warps = rows, threads, threads // FULL_WARP
        tid = np.arange(threads, dtype=np.int32)[None, :]
        self._thread = np.broadcast_to(tid, (rows, threads))
        self._block = np.broadcast_to(np.arange(rows)[:, None], (rows, threads))
        self.tid = Word(self, tid)
        self.lane, self.warp = Word(self, tid % FULL_WARP), Word(self, tid // FULL_WARP)
        self.row = Word(self, np.arange(rows, dtype=np.int32)[:, None])
        self._mask = np.ones((rows, threads), bool)
        self._shared = np.full((rows, shared_words), 0x5EADBEEF, np.int32)
        self._written = np.zeros((rows, shared_words), bool)
        self._used = 0
        self._forget()

    def _forget(self):
        shape = self._shared.shape
        self._writer = np.full(shape, -1)  # since the last barrier: the thread that wrote, -2 = atomics
        self._first = np.full(shape, 1 << 30)  # and the lowest and highest thread that read
        self._last = np.full(shape, -1)

    # values
    def word(self, x):
        if isinstance(x, Word):
            return x
        return Word(self, np.array([[x & 0xFFFFFFFF]], np.uint32).view(np.int32))

    def binary(self, name, a, b):
        ua, ub = a.view(np.uint32), b.view(np.uint32)
        if name in ("umin2", "umax2"):
            pick = np.minimum if name == "umin2" else np.maximum
            low = pick(ua & 0xFFFF, ub & 0xFFFF)
            return (low | (pick(ua >> 16, ub >> 16) << 16)).astype(np.uint32).view(np.int32)
        return {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "udiv": lambda: (ua // ub).view(np.int32),
            "and": lambda: a & b,
            "or": lambda: a | b,
            "xor": lambda: a ^ b,
            "shl": lambda: (ua << ub).view(np.int32),
            "shr": lambda: (ua >> ub).view(np.int32),
            "smin": lambda: np.minimum(a, b),
            "smax": lambda: np.maximum(a, b),
            "signin": lambda: ((ua << np.uint32(1)) | (ub >> np.uint32(31))).view(np.int32),
        }[name]()

    def compare(self, name, a, b):
        if name == "ult":
            return a.view(np.uint32) < b.view(np.uint32)
        return {"slt": np.less, "sle": np.less_equal, "sgt": np.greater, "sge": np.greater_equal, "eq": np.equal,
                "ne": np.not_equal}[name](a, b)  # fmt: skip

    def flag_and(self, a, b):
        return a & b

    def flag_or(self, a, b):
        return a | b

    def flag_not(self, a):
        return ~a

    def select(self, c, a, b):
        return np.where(c, a, b).astype(np.int32)

    def popcount(self, a):
        return np.bitwise_count(a.view(np.uint32)).astype(np.int32)

    def opaque(self, value):
        """The same value; what was computed from it before is computed again after (registers, not sharing)."""
        return value

    # control
    @contextlib.contextmanager
    def when(self, flag):
        saved, self._mask = self._mask, self._mask & flag.x
        yield
        self._mask = saved

    def loop(self, count, body):
        """body(i) for i = 0 .. count-1; count is the same for all threads of a block."""
        for i in range(int(np.max(count.x))):
            with self.when(Flag(self, i < count.x)):
                body(self.word(i))

    def fold(self, count, start, body):
        """carry = body(i, carry) for i = 0 .. count-1, from `start`; returns the last carry. A thread's own count."""
        for i in range(int(np.max(count.x))):
            live = Flag(self, i < count.x)
            with self.when(live):
                start = live.pick(body(self.word(i), start), start)
        return start

    def each_bit(self, bits, start, body):
        """carry = body(index, carry) over the set bits, lowest first, each thread for itself."""
        while True:
            live = Flag(self, bits.x != 0)
            if not (live.x & self._mask).any():
                return
            with self.when(live):
                start = live.pick(body(live.pick(bits.lowest_bit(), 0), start), start)
            bits = live.pick(bits & (bits - 1), 0)

    def amend(self, flag, words, change):
        """The words change() returns where `flag` holds, `words` elsewhere; skipped where the block agrees it is not."""
        return [flag.pick(a, b) for a, b in zip(change(), words, strict=True)]

    def barrier(self):
        assert self._mask.any(axis=1).all() and (self._mask == self._mask[:, :1]).all(), "barrier in divergent code"
        self._forget()

    # global memory
    def _active(self, where):
        return self._mask if where is None else self._mask & where.x

    def _checked(self, array, index, active, width=1):
        index = np.broadcast_to(index.x, active.shape)
        at = index[active]
        assert ((at >= 0) & (at + width <= array.ref.size)).all(), "global access out of bounds"
        return index, at

    def load(self, array, index, where=None, other=0):
        return self.load_many(array, index, 1, where, other)[0]

    def load_many(self, array, index, count, where=None, other=0, offset=0):
        """`count` consecutive words from index + offset, a multiple of `count`; `offset` is a Python number."""
        active, index = self._active(where), index + offset
        _, at = self._checked(array, index, active, count)
        assert (at % count == 0).all(), "misaligned vector load"
        out = []
        for i in range(count):
            value = np.full(active.shape, np.uint32(other & 0xFFFFFFFF).view(np.int32), np.int32)
            value[active] = array.ref[at + i]
            out.append(Word(self, value))
        return out

    load_byte = load  # a byte array's elements are its bytes

    def store(self, array, index, value, where=None):
        active = self._active(where)
        _, at = self._checked(array, index, active)
        assert len(np.unique(at)) == len(at), "two threads store one global element"
        array.ref[at] = np.broadcast_to(value.x, active.shape)[active]

    store_byte = store

    # shared memory
    def shared(self, words):
        base = self._used
        self._used += words
        assert self._used <= self._shared.shape[1], "shared memory overrun"
        return base, words

    def _slot(self, array, index, active):
        base, words = array
        at = np.broadcast_to(self.word(index).x, active.shape)[active]
        assert ((at >= 0) & (at < words)).all(), "shared access out of bounds"
        return self._block[active], base + at, self._thread[active]

    def get(self, array, index):
        active = self._mask
        block, at, thread = self._slot(array, index, active)
        writer = self._writer[block, at]
        assert self._written[block, at].all(), "shared word read before anyone wrote it"
        assert ((writer == -1) | (writer == thread)).all(), "shared word read in the epoch of another thread's write"
        np.minimum.at(self._first, (block, at), thread)
        np.maximum.at(self._last, (block, at), thread)
        value = np.zeros(active.shape, np.int32)
        value[active] = self._shared[block, at]
        return Word(self, value)

    def _aligned(self, array, index, count):
        at = np.broadcast_to(index.x, self._mask.shape)[self._mask] + array[0]
        assert (at % count == 0).all(), "misaligned shared access"

    def get_many(self, array, index, count):
        self._aligned(array, index, count)
        return [self.get(array, index + i) for i in range(count)]

    def put(self, array, index, value, where=None):
        active = self._active(where)
        block, at, thread = self._slot(array, index, active)
        assert len(np.unique(block * (1 << 32) + at)) == len(at), "two threads store one shared word"
        writer, first, last = self._writer[block, at], self._first[block, at], self._last[block, at]
        assert ((writer == -1) | (writer == thread)).all(), "shared word written twice between barriers"
        assert ((last == -1) | ((first == thread) & (last == thread))).all(), "shared word overwritten while read"
        self._writer[block, at], self._written[block, at] = thread, True
        self._shared[block, at] = np.broadcast_to(self.word(value).x, active.shape)[active]

    def put_many(self, array, index, values):
        """Store consecutive words at a multiple of their number."""
        self._aligned(array, index, len(values))
        for i, value in enumerate(values):
            self.put(array, index + i, value)

    def _atomic(self, ufunc, array, index, value, where):
        active = self._active(where)
        block, at, _ = self._slot(array, index, active)
        assert self._written[block, at].all(), "atomic on a shared word nobody wrote"
        assert np.isin(self._writer[block, at], (-1, -2)).all(), "atomic in the epoch of a plain write"
        assert (self._last[block, at] == -1).all(), "atomic on a shared word while others read it"
        self._writer[block, at] = -2
        ufunc.at(self._shared, (block, at), np.broadcast_to(self.word(value).x, active.shape)[active])

    def add(self, array, index, value, where=None):
        """Atomic add to a shared word."""
        self._atomic(np.add, array, index, value, where)

    def set_bits(self, array, index, value, where=None):
        """Atomic or into a shared word."""
        self._atomic(np.bitwise_or, array, index, value, where)

    # warps
    def _lanes(self, value):
        full = np.broadcast_to(value, (self.rows, self.threads))
        return full.reshape(self.rows, self.warps, FULL_WARP)

    def shuffle_up(self, value, step):
        lanes = self._lanes(value.x)
        moved = np.concatenate([lanes[..., :step], lanes[..., :-step]], -1)
        return Word(self, moved.reshape(self.rows, self.threads))

    def shuffle(self, value, lane):
        source = self._lanes(self.word(lane).x) % FULL_WARP
        return Word(self, np.take_along_axis(self._lanes(value.x), source, -1).reshape(self.rows, self.threads))

    def ballot(self, flag):
        bits = self._lanes(flag.x & self._mask).astype(np.uint32) << np.arange(FULL_WARP, dtype=np.uint32)
        word = bits.sum(-1, keepdims=True, dtype=np.uint32).view(np.int32)
        return Word(self, np.repeat(word, FULL_WARP, -1).reshape(self.rows, self.threads))

    def sum_warp(self, value):
        """Sum of one word over the lanes of a warp, in all of them."""
        total = self._lanes(value.x).sum(-1, keepdims=True, dtype=np.int32)
        return Word(self, np.repeat(total, FULL_WARP, -1).reshape(self.rows, self.threads))

    # launch control (no meaning here)
    def trigger_dependents(self):
        pass


def _flat(x):
    x = np.ascontiguousarray(x)
    if x.dtype.itemsize == 1:
        return x.view(np.uint8).reshape(-1)
    return x.reshape(-1).view(np.int32)


def emulate(kernel, inputs, outputs, *, rows: int, threads: int, shared_words: int, groups: int = 1):
    """Run `kernel(machine, *inputs, *outputs)` in numpy.

    inputs: arrays of 4-byte, 2-byte (an even number of elements) or 1-byte elements. outputs: (shape, dtype) each,
    poisoned before the run. Returns the list of outputs. Raises AssertionError on a race, an access out of bounds or
    a read of unwritten shared memory.
    """
    del groups  # how rows share blocks changes nothing here
    results = [np.full(shape, 0x5A if np.dtype(dtype).itemsize == 1 else 0x5A5A5A5A, dtype) for shape, dtype in outputs]
    machine = Emulator(rows, threads, shared_words)
    arrays = [Array(_flat(np.asarray(x))) for x in inputs] + [Array(_flat(r)) for r in results]
    kernel(machine, *arrays)
    return results
