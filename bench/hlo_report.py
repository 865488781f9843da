"""What a compiled, scheduled GPU module will do: collectives with their bytes, kernels it launches, moves of whole pools."""

import dataclasses
import math
import re

_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e8m0fnu": 8, "s16": 16, "u16": 16,
              "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}  # fmt: skip
_ARRAY = re.compile(r"\b(" + "|".join(sorted(_ITEM_BITS, key=len, reverse=True)) + r")\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^\n]*)?\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|to_apply|calls|called_computations=\{)[=%]*%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")
_HANDLES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_MOVES = {"copy", "copy-start", "transpose", "concatenate", "pad"}


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction: name, opcode, the arrays of its result as (dtype, elements), jax's name stack, and its line."""

    name: str
    opcode: str
    arrays: tuple[tuple[str, int], ...]
    scope: str
    line: str

    @property
    def sizes(self) -> list[int]:
        """Bytes of every array of the result."""
        return [n * _ITEM_BITS[d] // 8 for d, n in self.arrays]


def _arrays(shape: str):
    return tuple((d, math.prod(int(x) for x in dims.split(",") if x)) for d, dims in _ARRAY.findall(shape))


def computations(hlo: str) -> tuple[str, dict[str, list[Op]]]:
    """(name of the entry computation, {computation: its instructions in schedule order})."""
    entry, out, current = "", {}, None
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = out.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
            continue
        m = _INSTRUCTION.match(line)
        if m and current is not None:
            scope = _SCOPE.search(line)
            current.append(Op(m.group(1), m.group(3), _arrays(m.group(2)), scope.group(1) if scope else "", line))
    return entry, out


def _base(opcode: str) -> str | None:
    """The collective an opcode starts or is, None for others (and for the -done half)."""
    name = opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def _received(kind: str, op: Op, ranks: int) -> int:
    """Bytes that one GPU takes in over the links, for a collective over all ranks."""
    starts = op.opcode.endswith("-start")
    if kind in ("all-gather", "collective-permute", "ragged-all-to-all"):
        size = op.sizes[-1] if op.sizes else 0  # a -start's tuple is (operands, results)
        return size if kind == "collective-permute" else size * (ranks - 1) // ranks
    size = sum(op.sizes) // (2 if starts and len(op.sizes) > 1 else 1)
    if kind == "all-to-all":
        return size * (ranks - 1) // ranks
    if kind == "reduce-scatter":  # the result is one rank's share
        return (op.sizes[-1] if op.sizes else 0) * (ranks - 1)
    return 2 * size * (ranks - 1) // ranks  # all-reduce as a ring


def walk(hlo: str):
    """Yields (times, Op) for everything that runs once the module is launched: loop bodies as often as they are known to
    run (once if unknown), of a conditional the longer branch; bodies of fusions are not entered."""
    entry, comps = computations(hlo)

    def run(name: str, times: int):
        for op in comps.get(name, ()):
            if op.opcode == "while":
                trips = _TRIPS.search(op.line)
                body = re.search(r"body=%?([\w.\-]+)", op.line)
                yield from run(body.group(1), times * (int(trips.group(1)) if trips else 1))
            elif op.opcode == "conditional":
                m = _BRANCHES.search(op.line)
                names = [b.strip().lstrip("%") for b in (m.group(1) or f"{m.group(2)},{m.group(3)}").split(",")]
                yield from max((list(run(b, times)) for b in names), key=len)
            elif op.opcode in ("call", "async-start"):
                called = re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", op.line)
                yield from run(called.group(1), times) if called and called.group(1) in comps else [(times, op)]
            else:
                yield times, op

    yield from run(entry, 1)


def collectives(hlo: str, ranks: int) -> list[dict]:
    """[{kind, count, bytes_each, bytes}]: bytes one GPU receives, by kind and size, largest total first."""
    totals: dict[tuple, int] = {}
    for times, op in walk(hlo):
        kind = _base(op.opcode)
        if kind:
            key = kind, _received(kind, op, ranks)
            totals[key] = totals.get(key, 0) + times
    rows = [{"kind": k, "count": n, "bytes_each": size, "bytes": n * size} for (k, size), n in totals.items()]
    return sorted(rows, key=lambda r: -r["bytes"])


def launches(hlo: str) -> dict[str, int]:
    """{opcode: how many are launched} of kernels, library calls, copies and collectives; custom calls by their target."""
    out: dict[str, int] = {}
    for times, op in walk(hlo):
        if op.opcode in _HANDLES or op.opcode.endswith("-done"):
            continue
        name = op.opcode
        if name == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', op.line)
            name = f"custom-call {target.group(1)}" if target else name
        out[name] = out.get(name, 0) + times
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))


def pool_copies(hlo: str, pools: set[tuple[str, int]]) -> list[str]:
    """Instructions that write a copy of a whole pool. pools: {(HLO dtype, elements of one GPU's pool)}."""
    moved = []
    for _, op in walk(hlo):
        fused = op.opcode == "fusion" and re.match(r"(wrapped_)?(copy|transpose|concatenate|pad)[._\d]*(_fusion)?", op.name)
        if (op.opcode in _MOVES or fused) and any(a in pools for a in op.arrays):
            moved.append(op.line.strip()[:200])
    return moved


def recomputed(hlo: str) -> int:
    """Instructions that XLA computes again to save memory."""
    return sum(".remat" in op.name for ops in computations(hlo)[1].values() for op in ops)


def transfers(hlo: str) -> list[tuple[str, list[Op]]]:
    """[(collective, what is launched between its start and its end)] in the order of their ends; nothing is between those
    of one instruction. Of every computation, once."""
    out = []
    for ops in computations(hlo)[1].values():
        places = {op.name: i for i, op in enumerate(ops)}
        for i, op in enumerate(ops):
            kind = _base(op.opcode.removesuffix("-done"))
            if kind is None or op.opcode.endswith("-start"):
                continue
            start = i
            if op.opcode.endswith("-done"):
                operand = re.search(r"%?([\w.\-]+)\)?", op.line.split(f" {op.opcode}(", 1)[1])
                start = places.get(operand.group(1), i)
            out.append((kind, [o for o in ops[start + 1 : i] if o.opcode not in _HANDLES]))
    return out


def overlapped(hlo: str) -> dict[str, int]:
    """{"asynchronous": collectives with other work scheduled between start and done, "exposed": the others}."""
    busy = [bool(between) for _, between in transfers(hlo)]
    return {"asynchronous": sum(busy), "exposed": len(busy) - sum(busy)}
