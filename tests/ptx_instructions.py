"""PTX instructions as tests/ptx_emulator.py knows them: types, and what each does to its machine.

What is modelled and what is not stands in that file. An instruction or modifier without an entry here is refused.
"""

import functools
import re

import ml_dtypes
import numpy as np

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
LANE = np.arange(32)


class PtxError(Exception):
    """The program did what the emulator refuses or does not know; the message has the line of the PTX."""


# --- types: registers are u64 bit patterns ----------------------------------------------------------------------------


@functools.cache
def _bits(kind: str) -> int:
    return 1 if kind == "pred" else 32 if kind == "bf16x2" else int(re.search(r"\d+$", kind).group())


def _decode(x, kind: str):
    """u64[...] -> i64 of a signed type, u64 of an unsigned one, f32 of a floating one (of bf16x2 [..., 2])."""
    if kind == "f32":
        return x.astype(np.uint32).view(np.float32)
    if kind == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "bf16x2":
        return np.stack([_decode(x, "bf16"), _decode(x >> np.uint64(16), "bf16")], -1)
    bits = _bits(kind)
    if kind[0] == "s":
        return (x << np.uint64(64 - bits)).view(np.int64) >> np.int64(64 - bits)
    return x if bits == 64 else x & np.uint64((1 << bits) - 1)


def _encode(x, kind: str):
    """The inverse; floats are rounded to nearest, integers wrap."""
    if kind == "f32":
        return x.astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind == "bf16":
        return x.astype(np.float32).astype(BF16).view(np.uint16).astype(np.uint64)
    if kind == "bf16x2":
        return _encode(x[..., 0], "bf16") | _encode(x[..., 1], "bf16") << np.uint64(16)
    if kind == "e4m3":
        return np.clip(x, -448, 448).astype(E4M3).view(np.uint8).astype(np.uint64)
    return _decode(x.astype(np.uint64) if x.dtype == bool else x.view(np.uint64), kind.replace("s", "u"))


# --- arithmetic: (bits of the type, decoded operands) -> result -------------------------------------------------------


def _quotient(a, b):
    b = np.where(b == 0, b.dtype.type(1), b)
    return (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(a.dtype)


def _shift_left(n, a, k):
    return np.where(k < n, a << np.minimum(k, np.uint64(63)), np.uint64(0))


def _shift_right(n, a, k):
    if a.dtype == np.int64:
        return a >> np.minimum(k, np.uint64(n - 1)).astype(np.int64)
    return np.where(k < n, a >> np.minimum(k, np.uint64(63)), np.uint64(0))


def _field(n, a, start, length):
    spare = np.uint64(64) - length
    top = a.view(np.uint64) >> start << spare
    return top.view(np.int64) >> spare.astype(np.int64) if a.dtype == np.int64 else top >> spare


def _permute(n, low, high, selector):
    pair, out = low | high << np.uint64(32), np.uint64(0)
    for i in range(4):
        k = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = pair >> (k % np.uint64(8) * np.uint64(8)) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        out = out | np.where(k < 8, byte, sign) << np.uint64(8 * i)
    return out


def _logic(n, a, b, c, table):
    out = np.uint64(0)
    for i in range(8):
        term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        out = out | np.where(table >> np.uint64(i) & np.uint64(1), term, np.uint64(0))
    return out


ARITHMETIC = {
    "add": lambda n, a, b: a + b,
    "sub": lambda n, a, b: a - b,
    "mul": lambda n, a, b: a * b,
    "mul.rn": lambda n, a, b: a * b,
    "mul.lo": lambda n, a, b: a * b,
    "mul.wide": lambda n, a, b: a * b,
    "mul.hi": lambda n, a, b: (a * b) >> a.dtype.type(n),
    "mad.lo": lambda n, a, b, c: a * b + c,
    "mad.wide": lambda n, a, b, c: a * b + c,
    "fma.rn": lambda n, a, b, c: a.astype(np.float64) * b + c,
    "div": lambda n, a, b: _quotient(a, b),
    "rem": lambda n, a, b: a - _quotient(a, b) * b,
    "div.full": lambda n, a, b: a / b,
    "and": lambda n, a, b: a & b,
    "or": lambda n, a, b: a | b,
    "xor": lambda n, a, b: a ^ b,
    "not": lambda n, a: ~a,
    "neg": lambda n, a: -a,
    "abs": lambda n, a: np.abs(a),
    "min": lambda n, a, b: np.fmin(a, b),
    "max": lambda n, a, b: np.fmax(a, b),
    "min.relu": lambda n, a, b: np.maximum(np.minimum(a, b), 0),
    "max.relu": lambda n, a, b: np.maximum(np.maximum(a, b), 0),
    "ex2.approx.ftz": lambda n, a: np.exp2(a.astype(np.float64)),
    "popc": lambda n, a: np.bitwise_count(a).astype(np.uint64),
    "selp": lambda n, a, b, p: np.where(p != 0, a, b),
    "shl": _shift_left,
    "shr": _shift_right,
    "bfe": _field,
    "prmt": _permute,
    "lop3": _logic,
    "setp.eq": lambda n, a, b: a == b,
    "setp.ne": lambda n, a, b: a != b,
    "setp.lt": lambda n, a, b: a < b,
    "setp.le": lambda n, a, b: a <= b,
    "setp.gt": lambda n, a, b: a > b,
    "setp.ge": lambda n, a, b: a >= b,
}
_OPERANDS = {"selp": ("", "", "pred"), "shl": ("", "u32"), "shr": ("", "u32"), "bfe": ("", "u32", "u32")}
TYPES = r"pred|[bus](?:8|16|32|64)|f32|bf16x2|bf16"


def arithmetic(key: str, kind: str):
    """-> execute(machine, operands) of an elementwise instruction."""
    function, bits = ARITHMETIC[key], _bits(kind)
    wide = kind[0] + str(2 * bits) if key.endswith("wide") else kind
    given = _OPERANDS.get(key, (kind, kind, wide if key.startswith("mad") else kind, "u32"))
    given = [k or kind for k in given]
    result = "pred" if key.startswith("setp") else "u32" if key == "popc" else wide

    def execute(machine, operands):
        values = [_decode(machine.read(x), k) for x, k in zip(operands[1:], given, strict=False)]
        machine.write(operands[0], _encode(function(bits, *values), result))

    return execute


# --- the other instructions: pattern -> execute(machine, operands, *groups of the pattern) ----------------------------


def _move(machine, operands, kind):
    to, value = operands
    many = to if isinstance(to, list) else value if isinstance(value, list) else None
    part = np.uint64(_bits(kind) // len(many)) if many else None
    if isinstance(value, list):
        mask = (np.uint64(1) << part) - np.uint64(1)
        machine.write(to, sum((machine.read(v) & mask) << np.uint64(i) * part for i, v in enumerate(value)))
    elif isinstance(to, list):
        value = machine.read(value)
        for i, name in enumerate(to):
            machine.write(name, value >> np.uint64(i) * part & ((np.uint64(1) << part) - np.uint64(1)))
    else:
        machine.write(to, machine.read(value) & np.uint64((1 << _bits(kind)) - 1))


def _convert(machine, operands, relu, to, source):
    values = [_decode(machine.read(x), source) for x in operands[1:]]
    if relu:
        values = [np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0))) for x in values]
    if to == "bf16x2":
        values = [np.stack(np.broadcast_arrays(values[1], values[0]), -1)]  # the first operand is the upper half
    if to == "e4m3x2":
        return machine.write(operands[0], _encode(values[1], "e4m3") | _encode(values[0], "e4m3") << np.uint64(8))
    machine.write(operands[0], _encode(values[0], to))


def _all_lanes(members) -> bool:
    return bool((members & np.uint64(0xFFFFFFFF) == 0xFFFFFFFF).all())


def _shuffle(machine, operands, mode):
    value, by = machine.lanes(operands[1]), int(operands[2].item())
    source = {"bfly": LANE ^ by, "idx": LANE * 0 + by, "up": np.where(LANE >= by, LANE - by, LANE)}[mode]
    if operands[3].item() != (0 if mode == "up" else 31) or not _all_lanes(machine.read(operands[4])):
        raise PtxError("only shuffles among all lanes are known")
    machine.write(operands[0], value[:, source])


def _reduce(machine, operands, mode, kind):
    value = _decode(machine.lanes(operands[1]), kind)
    if not _all_lanes(machine.read(operands[2])):
        raise PtxError("only reductions over all lanes are known")
    value = {"add": np.sum, "min": np.min, "max": np.max}[mode](value, axis=1, keepdims=True)
    machine.write(operands[0], _encode(value, kind))


def _parameter(machine, operands, kind):
    machine.write(operands[0], np.full((1, 1), machine.parameters[operands[1].base], np.uint64))


def _load(machine, operands, space, kind):
    registers = operands[0] if isinstance(operands[0], list) else [operands[0]]
    size = _bits(kind) // 8
    data = machine.gather(space, machine.address(operands[1]), size * len(registers), machine.mask)
    for i, name in enumerate(registers):
        part = np.zeros((*data.shape[:2], 8), np.uint8)
        part[..., :size] = data[..., i * size : (i + 1) * size]
        machine.write(name, part.view(np.uint64)[..., 0])


def _store(machine, operands, space, kind):
    registers = operands[1] if isinstance(operands[1], list) else [operands[1]]
    size = _bits(kind) // 8
    data = [machine.lanes(x)[..., None].view(np.uint8)[..., :size] for x in registers]
    machine.scatter(space, machine.address(operands[0]), np.concatenate(data, -1), machine.mask)


def _copy(machine, operands):
    """cp.async: bytes that lie in shared memory only once the lane's next arrival for its copies is issued."""
    to, source, size, *given = operands
    size, mask = int(size.item()), np.broadcast_to(machine.mask, (len(machine.active), 32))
    taken = machine.lanes(given[0]) if given else np.full(mask.shape, size, np.uint64)
    if ((taken != 0) & (taken != size)).any():
        raise PtxError("copies of part of their bytes are not known")
    data = machine.gather("global", machine.address(source), size, mask & (taken != 0))
    machine.copies.append((machine.active, machine.address(to), data, mask))


def _arrive_with_copies(machine, operands):
    kept = []
    for warps, at, data, mask in machine.copies:
        here = np.isin(warps, machine.active)
        active, machine.active = machine.active, warps[here]
        machine.scatter("shared", at[here], data[here], mask[here])
        machine.active = active
        if not here.all():
            kept.append((warps[~here], at[~here], data[~here], mask[~here]))
    machine.copies = kept
    _mbarrier(machine, [None, *operands], "arrive")


def _matrix(machine, operands, to):
    """Up to four 8x8 matrices of 16 bits: lanes 8j..8j+7 give the addresses of matrix j's rows."""
    registers, place = (operands[1], operands[0]) if to == "st" else operands
    rows = machine.address(place)
    for j, name in enumerate(registers):
        at = rows[:, 8 * j + LANE // 4] + np.uint64(4) * (LANE % 4).astype(np.uint64)
        if to == "st":
            machine.scatter("shared", at, machine.lanes(name)[..., None].view(np.uint8)[..., :4], machine.mask)
        else:
            data = machine.gather("shared", at, 4, machine.mask)
            machine.write(name, data.view(np.uint32)[..., 0].astype(np.uint64))


def _plane(machine, descriptor, rows, first, transposed):
    """Bytes u8[warp, rows, 32] of a wgmma operand in shared memory, rows `first` (i64[warp]) and on, through its
    descriptor: 32 bytes a row, or with `transposed` 16 two-byte channels of 64 rows side by side."""
    d = machine.lanes(descriptor)
    if (d != d[:, :1]).any() or (d >> np.uint64(49) & np.uint64(7)).any():
        raise PtxError("descriptors that differ in a warp or have a base offset are not known")
    part = lambda shift, mask: (d[:, 0] >> np.uint64(shift)).astype(np.int64) & mask
    start, leading, stride = (part(shift, 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = -part(62, 3) % 4  # a row of 16 << swizzle bytes
    if not swizzle.all() or (transposed and (swizzle != 3).any()):
        raise PtxError("a swizzle that is not known")
    over = lambda x: x[:, None, None]
    n, byte = over(first) + np.arange(rows)[:, None], np.arange(32)
    if transposed:
        k = byte // 2
        at = over(start) + n // 64 * over(leading) + n % 64 * 2 + k // 8 * over(stride) + k % 8 * 128 + byte % 2
    else:
        at = over(start) + n // 8 * over(stride) + n % 8 * over(16 << swizzle) + byte
    at = at ^ (at >> 7 & over((1 << swizzle) - 1)) << 4
    return machine.gather("shared", at.reshape(len(at), -1).astype(np.uint64), 1, True)[..., 0].reshape(at.shape)


def _product(machine, operands, columns, kind):
    """wgmma of one warp: its 16 rows of A times B, as its 4 warps hold 64 rows together."""
    accumulators, a, b, keep, *rest = operands
    columns, element = int(columns), {"e4m3": E4M3, "bf16": BF16}[kind]
    flags = [int(x.item()) for x in rest]  # scales of A and B, then which are transposed
    if flags[:2] != [1, 1] or (not isinstance(a, list) and kind == "bf16" and flags[2]):
        raise PtxError("negated or transposed A is not known")
    if isinstance(a, list):
        bytes_a = np.zeros((len(machine.active), 16, 32), np.uint8)
        for i, name in enumerate(a):
            word = machine.lanes(name)[..., None].view(np.uint8)[..., :4]
            at = 4 * (LANE % 4) + 16 * (i >> 1)
            bytes_a[:, (LANE // 4 + 8 * (i & 1))[:, None], at[:, None] + np.arange(4)] = word
    else:
        bytes_a = _plane(machine, a, 16, machine.warp[machine.active] % 4 * 16, False)
    transposed = kind == "bf16" and bool(flags[-1])
    bytes_b = _plane(machine, b, columns, np.zeros(len(machine.active), np.int64), transposed)
    values = [np.ascontiguousarray(x).view(element).astype(np.float64) for x in (bytes_a, bytes_b)]
    total = values[0] @ values[1].transpose(0, 2, 1)
    for i, name in enumerate(accumulators):
        x = total[:, LANE // 4 + 8 * (i >> 1 & 1), 2 * (LANE % 4) + (i & 1) + 8 * (i >> 2)]
        kept = machine.read(keep) != 0
        machine.write(name, _encode(np.where(kept, x + _decode(machine.read(name), "f32"), x), "f32"))


def _warp_product(machine, operands):
    """mma.sync of one warp: bf16 A [16, 16] times B [16, 8], added to C in fp32."""
    d, a, b, c = operands
    values = []
    for names, rows in ((a, 16), (b, 8)):
        matrix = np.zeros((len(machine.active), rows, 16, 2), np.uint8)
        for i, name in enumerate(names):
            row, channels = (8 * (i & 1), 8 * (i >> 1)) if rows == 16 else (0, 8 * i)
            word = machine.lanes(name)[..., None].view(np.uint8)[..., :4]
            for half in (0, 1):
                matrix[:, LANE // 4 + row, LANE % 4 * 2 + channels + half] = word[..., 2 * half : 2 * half + 2]
        values.append(np.ascontiguousarray(matrix).view(BF16)[..., 0].astype(np.float64))
    total = values[0] @ values[1].transpose(0, 2, 1)
    before = [_decode(machine.read(name), "f32") for name in c]  # D may be C
    for i, name in enumerate(d):
        x = total[:, LANE // 4 + 8 * (i >> 1), 2 * (LANE % 4) + (i & 1)]
        machine.write(name, _encode(x + before[i], "f32"))


def _mbarrier(machine, operands, action):
    """A phase of `count` arrivals completes and the next one begins: [count, still to come, phases completed]."""
    if len(operands) != 2:
        raise PtxError("only single arrivals are known")
    address = machine.address(operands[0] if action == "init" else operands[1])
    mask = np.broadcast_to(machine.mask, address.shape)
    for i, lane in zip(*np.nonzero(mask), strict=True):
        key = (machine.cta[machine.active[i]], int(address[i, lane]))
        if action == "init":
            machine.mbarriers[key] = [int(operands[1].item()), int(operands[1].item()), 0]
            continue
        barrier = machine.mbarriers[key]
        barrier[1] -= 1
        if barrier[1] == 0:
            barrier[1:] = barrier[0], barrier[2] + 1


_NOTHING = (
    r"griddepcontrol\.wait|fence\.proxy\.async\.shared::cta|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32|"
    r"prefetch\.global\.L2|wgmma\.(?:fence|commit_group|wait_group)\.sync\.aligned"
)
OTHERS = [
    (_NOTHING, lambda machine, operands: None),
    (rf"mov\.({TYPES})", _move),
    (r"cvt(?:\.rn)?(\.relu)?(?:\.satfinite)?\.(f32|bf16|bf16x2|e4m3x2|[us]\d+)\.(f32|bf16|[us]\d+)", _convert),
    (r"shfl\.sync\.(bfly|idx|up)\.b32", _shuffle),
    (r"redux\.sync\.(add|min|max)\.([us]32)", _reduce),
    (r"ld\.param\.(b64|b32)", _parameter),
    (r"ld\.(global|shared)(?:\.v[24])?\.([bu]\d+|f32)", _load),
    (r"st\.(global|shared)(?:\.v[24])?\.([bus]\d+|f32)", _store),
    (r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared\.b16", _matrix),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(?:16|32)\.f32\.(e4m3|bf16)\.(?:e4m3|bf16)", _product),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", _warp_product),
    (r"mbarrier\.(init|arrive)\.shared::cta\.b64", _mbarrier),
    (r"cp\.async\.c[ag]\.shared\.global", _copy),
    (r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64", _arrive_with_copies),
]
CONTROL = r"bra(\.uni)?|brx\.idx|ret|bar\.sync|barrier\.sync|mbarrier\.try_wait\.parity\.shared\.b64"
