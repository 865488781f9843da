"""Result files of the benches, read into rows that a table or a chart can show. Every row knows the run it came from."""

import dataclasses
import pathlib

from dsv41_jax.json_files import read_json_object

# what a report can hold: {kind: the command whose --out makes a file of it}
COMMANDS = {
    "decode": "python -m bench.decode --preset flash-rank",
    "layers": "python -m bench.layers --trace DIR --decode FILE",
    "operators": "python -m bench.operators",
    "experts": "python -m bench.experts",
    "sweep": "python -m bench.sweep --preset flash-rank --layers 6",
    "options": "python -m bench.options --preset flash-rank --layers 6",
    "agreement": "python -m bench.agreement --preset flash-rank --layers 6",
    "exchange": "python -m bench.exchange --ranks R",
    "ranks_check": "python -m bench.ranks_check --preset flash --layers 6 --ranks R",
    "engine": "python -m bench.engine --preset flash-rank --layers 6",
    "counters": "python -m bench.counters OPERATOR --spec SPEC",
}
# operators whose kernels were first measured by hand: {start of a spec's name: operator}
_BY_HAND = {
    "m384_blocks": "index_score_blocks",
    "m384_16k": "index_score",
    "m384_full1": "index_score",
    "m384": "sparse_attention",
}
# first goals of spec/performance.md in us, where the operator's spec carries none
_GOALS = {
    ("experts", "verify_balanced"): 890,
    ("sparse_attention", "m384_r1"): 128,
    ("sparse_attention", "m384_r2"): 128,
    ("index_score", "m384_16k"): 93,
    ("index_score_blocks", "m384_blocks"): 93,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """One result file: its name, kind, and the device, driver, versions, commit and date of its run."""

    file: str
    kind: str
    device: str
    driver: str | None
    versions: dict
    commit: str
    utc: str  # a day, or a day and a time

    @property
    def date(self) -> str:
        return self.utc[:10]


@dataclasses.dataclass(frozen=True)
class OperatorRow:
    """One implementation at one spec, in microseconds. median, low, high: by the clock, None where only the profiler
    measured; shown: it stands for its operator in a chart; goal: of the spec, where it has one; equal: the result is the
    definition's, None where nobody looked; device: what its kernels took by the profiler, which launches are no part of.
    memory_us, tensor_us: what its bytes and its flops alone take at the rates measured in the same run."""

    operator: str
    spec: str
    implementation: str
    median: float | None
    low: float | None
    high: float | None
    floor: float | None
    source: Source
    shown: bool = False
    goal: float | None = None
    equal: bool | None = None
    device: float | None = None
    memory_us: float | None = None
    tensor_us: float | None = None

    @property
    def best(self) -> float:
        """The smaller of clock and profiler: launches are in the one, waiting for the kernel before in the other."""
        return min(us for us in (self.median, self.device) if us is not None)

    @property
    def ratio(self) -> float | None:
        """`best` over the floor."""
        return None if self.floor is None else self.best / self.floor

    def share(self, us: float | None) -> str | None:
        """`us` as a share of `best`, in percent."""
        return None if us is None else f"{100 * us / self.best:.0f}"


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One workload of the decode protocol: what ran (`protocol` of bench.decode) and its `result`. axes: of a sweep."""

    protocol: dict
    result: dict
    source: Source
    axes: tuple[str, ...] = ()

    @property
    def series(self) -> tuple:
        """What two points of one line have in common."""
        p = self.protocol
        return (self.source.device, p["preset"], len(p["layers"]), p["gamma"], p.get("ranks", 1), p.get("exchange"),
                p.get("exchange_parts", 1), self.plain)  # fmt: skip

    @property
    def plain(self) -> bool:
        """No kernel in it: the XLA baseline."""
        return set(self.protocol.get("implementations", {}).values()) == {"reference"}


@dataclasses.dataclass
class Results:
    """Everything below one folder: sources in order of their names; raw: {source: file content} of the kinds that are
    shown as they are (layers, options, agreement, exchange, experts, counters)."""

    sources: list = dataclasses.field(default_factory=list)
    operators: list = dataclasses.field(default_factory=list)
    steps: list = dataclasses.field(default_factory=list)
    failed: list = dataclasses.field(default_factory=list)  # (source, axes, asked, error) of sweep points
    raw: dict = dataclasses.field(default_factory=dict)

    def of(self, kind: str) -> list[tuple[Source, dict]]:
        return [(s, self.raw[s.file]) for s in self.sources if s.kind == kind]

    def missing(self) -> dict[str, str]:
        """{kind without a file: the command that makes one}."""
        held = {s.kind for s in self.sources}
        return {kind: command for kind, command in COMMANDS.items() if kind not in held}


def kind_of(data: dict) -> str | None:
    """Which bench wrote a file, None if none did. A bench that names itself need not be known here."""
    named = data.get("benchmark")
    if isinstance(named, str) and "environment" in data:
        return named
    if isinstance(data.get("results"), list):
        return "operators"
    if isinstance(data.get("results"), dict) and "checks" in data:
        return "experts"
    if "against_one_device" in data:
        return "exchange"
    return "by hand" if isinstance(data.get("runs"), list) and "what" in data else None


def read(folder) -> Results:
    """All *.json of a folder. Raises ValueError (file, why) for one that is no JSON, that no bench wrote or that lacks a
    field, FileNotFoundError for a folder without any."""
    out, paths = Results(), sorted(pathlib.Path(folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no *.json in it")
    for path in paths:
        data = read_json_object(path)
        kind = kind_of(data)
        if kind is None:
            raise ValueError(
                f"{path}: expected a result of {', '.join(f'bench.{k}' for k in COMMANDS)}, got {sorted(data)[:8]}"
            )
        try:
            source = _source(path, kind, data)
            _READERS.get(kind, lambda *_: None)(data, source, out)
        except KeyError as e:
            raise ValueError(f"{path}: expected a {kind} result with the field {e.args[0]!r}, there is none") from None
        except (TypeError, AttributeError, IndexError) as e:
            raise ValueError(f"{path}: expected a {kind} result, its fields are of other types ({e})") from None
        out.sources.append(source)
        out.raw[path.name] = data
    goal = lambda r: _GOALS.get((r.operator, r.spec)) if r.goal is None else r.goal
    out.operators = [dataclasses.replace(r, goal=goal(r)) for r in out.operators]
    return out


def _source(path: pathlib.Path, kind: str, data: dict) -> Source:
    head = data.get("environment", data)
    if kind == "by hand":
        versions, commits = {k: head[k] for k in ("jax", "triton")}, [run["commit"] for run in head["runs"]]
        return Source(path.name, kind, head["device"], None, versions, ", ".join(commits), head["date"])
    commit = str(head["commit"])[:7] + (" (modified)" if head.get("modified") else "")
    return Source(path.name, kind, head["device"], head["driver"], head["versions"], commit, head["utc"])


def _implementations(operator: str) -> dict[str, str]:
    """{implementation of an operator: why "auto" passes it over, or ""}."""
    from bench.operators import OPERATORS

    found = [o for o in OPERATORS if (o.function or o.name) == operator]
    return {i.name: i.by_name_only for o in found for i in getattr(o.module("api"), o.implementations)}


def _by_name_only(operator: str) -> set[str]:
    """Implementations of an operator that "auto" passes over."""
    return {name for name, why in _implementations(operator).items() if why}


def _read_operators(data, source: Source, out: Results) -> None:
    from bench.operators import OPERATORS

    seen, peaks = set(), data["peaks"]
    rates = {o.function or o.name: peaks[f"{o.unit}_tflops"] for o in OPERATORS}
    for r in data["results"]:
        spec = r["spec"]["name"]
        # implementations are listed fastest first: the first kernel that takes a spec is what "auto" takes
        kernel = r["equals_definition"] is not None and r["implementation"] not in {"reference", *_by_name_only(r["operator"])}
        first = kernel and (r["operator"], spec) not in seen
        if first:
            seen.add((r["operator"], spec))
        out.operators.append(OperatorRow(
            r["operator"], spec, r["implementation"], r["median_us"], r["min_us"], r["max_us"], r["floor_us"], source,
            first, r["spec"].get("goal_us"), r["equals_definition"], r.get("device_us"), r["bytes"] / peaks["copy_gbps"] * 1e-3,
            r["flops"] / rates[r["operator"]] * 1e-6 if r["operator"] in rates else None,
        ))  # fmt: skip


def _read_experts(data, source: Source, out: Results) -> None:
    for key, r in data["results"].items():
        spec, variant = key.split("/")
        if "error" in r:
            continue
        name = variant if variant == "reference" else "hopper" if variant == "default" else f"hopper, {variant}"
        out.operators.append(OperatorRow("experts", spec, name, r["median_us"], r["min_us"], r["max_us"], r["floor_us"], source,
                                         variant == "default"))  # fmt: skip


def _read_by_hand(data, source: Source, out: Results) -> None:
    rows, floors = {}, {}
    for run in data["runs"]:  # a later run of the same name replaces an earlier one
        made_by = dataclasses.replace(source, commit=run["commit"])
        for key, r in run["results"].items():
            spec, _, variant = key.partition(" ")
            operator = next(op for start, op in _BY_HAND.items() if spec.startswith(start))
            floors[spec] = r.get("floor", floors.get(spec))
            name = "reference" if variant == "xla" else run.get("implementation", "hopper")
            name += "" if name in _implementations(operator) else " (since replaced)"
            name += f", {variant}" if variant and variant != "xla" else ""
            rows[spec, name] = OperatorRow(
                operator, spec, name, r.get("median"), r.get("min"), r.get("max"), None, made_by, device=r.get("device")
            )
    for (spec, _), row in rows.items():
        # "no fill" leaves columns unwritten: not the same work
        kernels = [r for (s, n), r in rows.items() if s == spec and n != "reference" and "no fill" not in n]
        fastest = row in kernels and row.best == min(r.best for r in kernels)
        out.operators.append(dataclasses.replace(row, floor=floors[spec], shown=fastest))


def _step(run: dict, source: Source, axes=()) -> StepRow:
    row = StepRow(run["protocol"], run["result"], source, tuple(axes))
    for field in ("batch", "context", "capacity", "gamma", "preset", "layers"):
        row.protocol[field]
    for field in ("step_ms", "floor_ms", "ratio", "rounds_step_ms", "tps_per_request", "tps_aggregate"):
        row.result[field]
    return row


def _read_decode(data, source: Source, out: Results) -> None:
    out.steps.append(_step(data, source))


def _read_sweep(data, source: Source, out: Results) -> None:
    for run in data["runs"]:
        if "error" in run:
            out.failed.append((source, run["axes"], run["asked"], run["error"]))
        else:
            out.steps.append(_step(run, source, run["axes"]))


_READERS = {"operators": _read_operators, "experts": _read_experts, "by hand": _read_by_hand, "decode": _read_decode,
            "sweep": _read_sweep}  # fmt: skip


def newest(rows: list[OperatorRow]) -> list[OperatorRow]:
    """Of every (operator, spec), the rows of its newest run alone."""
    latest = {}
    for r in rows:
        key = r.operator, r.spec
        latest[key] = max(latest.get(key, (r.source.utc, r.source.file)), (r.source.utc, r.source.file))
    return [r for r in rows if (r.source.utc, r.source.file) == latest[r.operator, r.spec]]


def plain_times(rows: list[OperatorRow]) -> dict[tuple[str, str], float]:
    """{(operator, spec): us of the definition compiled by XLA}, of the newest run that timed it."""
    return {(r.operator, r.spec): r.median for r in sorted(rows, key=lambda r: r.source.utc) if r.implementation == "reference"}


def main_specs(rows: list[OperatorRow]) -> list[OperatorRow]:
    """What stands for the operators: the specs that have a goal, and of an operator without one a verify step's, else the
    first."""
    shown = [r for r in rows if r.shown]
    goals = {r.operator for r in shown if r.goal}
    first = {}
    for r in sorted(shown, key=lambda r: not r.spec.startswith("verify")):
        first.setdefault(r.operator, r)
    return [r for r in shown if r.goal or (r.operator not in goals and r is first[r.operator])]
