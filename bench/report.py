"""The result files of bench/results as one markdown table file and charts:  python -m bench.report

Reads every *.json of a folder (default bench/results), writes README.md and PNG charts beside them, and the summary
between the marks of the repository's README. Nothing is measured and no number is typed: each comes from a file and its row
names the file, whose device, versions, commit and date are in the table of sources.
"""

import argparse
import pathlib
import sys

from bench.command_line import run_program
from bench.results_files import OperatorRow, Results, Source, StepRow, main_specs, newest, plain_times, read

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER, README = ROOT / "bench" / "results", ROOT / "README.md"
MARKS = "<!-- results: written by python -m bench.report -->", "<!-- end of results -->"


def number(x) -> str:
    """Four significant digits, "-" for None."""
    if x is None:
        return "-"
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def table(heads: list[str], rows: list[list]) -> str:
    """A markdown table; numbers by `number`."""
    cell = lambda x: x if isinstance(x, str) else number(x) if isinstance(x, int | float) or x is None else str(x)
    lines = [heads, ["---"] * len(heads), *([cell(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def spread(low, high) -> str:
    if low is None and high is None:
        return "-"
    return f"from {number(low)}" if high is None else f"{number(low)} .. {number(high)}"


def links(results: Results) -> dict[str, str]:
    return {s.file: f"[{i}]({s.file})" for i, s in enumerate(results.sources, 1)}


# sections ---------------------------------------------------------------------------------------------------------------


def sources(results: Results) -> str:
    link = links(results)
    versions = lambda s: ", ".join(f"{k} {v}" for k, v in s.versions.items() if k in ("jax", "jax-triton", "triton"))
    rows = [[link[s.file], s.file, s.kind, s.device, s.driver or "-", versions(s), s.commit, s.date] for s in results.sources]
    return table(["", "file", "kind", "device", "driver", "versions", "commit", "date"], rows)


def ranks_of(p: dict) -> str:
    """Ranks and exchange of a protocol in words, behind a comma; "" for one rank."""
    ranks = f", {p['ranks']} ranks" if p.get("ranks", 1) > 1 else ""
    named, parts = p.get("exchange"), p.get("exchange_parts", 1)
    ranks += f", exchange{f' {named}' if named else ''}{f' in {parts} parts' if parts > 1 else ''}" if named or parts > 1 else ""
    return ranks


def what_ran(row: StepRow) -> str:
    """The workload and the implementations that are not kernels, in words."""
    p = row.protocol
    plain = ["every operator"] if row.plain else [op for op, name in p.get("implementations", {}).items() if name == "reference"]
    beside = f"; plain XLA: {', '.join(plain)}" if plain else ""
    return f"{p['preset']}, {len(p['layers'])} layers{ranks_of(p)}{beside}"


def steps(results: Results, rows: list[StepRow]) -> str:
    link, out = links(results), []
    for row in sorted(rows, key=lambda r: (r.source.utc, r.protocol["context"], r.protocol["batch"])):
        p, r = row.protocol, row.result
        memory, host = r.get("memory_gb", {}), r.get("host_ms_per_step", {})
        out.append([
            what_ran(row), p["batch"], str(p["context"]), str(p["capacity"]), p["gamma"], r["step_ms"],
            spread(min(r["rounds_step_ms"]), max(r["rounds_step_ms"])), r["floor_ms"], r["ratio"], r["tps_per_request"],
            r["tps_aggregate"], host.get("median"), memory.get("peak_in_use"), link[row.source.file],
        ])  # fmt: skip
    heads = ["workload", "B", "context", "capacity", "gamma", "step ms", "rounds", "floor ms", "ratio", "tokens/s a request",
             "tokens/s", "host ms a step", "memory GB", "source"]  # fmt: skip
    return table(heads, out)


def operators(results: Results, rows: list[OperatorRow]) -> str:
    link = links(results)
    heads = ["operator", "spec", "implementation", "us", "min .. max", "kernels us", "floor us", "ratio", "% of memory", "% of tensor",
             "goal us", "equal", "source"]  # fmt: skip
    out = []
    place = {}
    for r in rows:
        place.setdefault((r.operator, r.spec), len(place))
    for r in sorted(rows, key=lambda r: place[r.operator, r.spec]):
        equal = "-" if r.equal is None else "yes" if r.equal else "**no**"
        commit = "" if r.source.commit in (s.commit for s in results.sources) else f" {r.source.commit}"
        out.append([r.operator, r.spec, r.implementation, r.median, spread(r.low, r.high), r.device, r.floor, r.ratio,
                    r.share(r.memory_us), r.share(r.tensor_us), r.goal, equal, link[r.source.file] + commit])  # fmt: skip
    return table(heads, out)


def layers(results: Results) -> str:
    link, out = links(results), ""
    for source, d in results.of("layers"):
        step = d["measured_step_us"]
        floors = part_floors(results, source)
        kernels = merged_parts(d["kernels"])
        rows = [[part, us, f"{100 * us / step:.1f} %", floors.get(part), kernels.get(part)]
                for part, us in merged_parts(d["parts_us"]).items()]  # fmt: skip
        busy, traced = d["busy_us"], d["traced_step_us"]
        out += (f"Step {number(step)} us by the clock, source {link[source.file]}. The trace of it: kernels {number(busy)} us, from the first to "
                f"the last {number(traced)} us, {100 * traced / step:.1f} % of the step by the clock. \"gaps\" is the step by the clock less the "
                "kernels.\n\n")  # fmt: skip
        out += table(["part", "us", "share", "floor us", "kernels"], rows) + "\n"
        classes = [[kind, c["layers"], c["us"], c["reference_b300_us"]] for kind, c in d["attention"]["classes"].items()]
        mean = sum(c["layers"] for c in d["attention"]["classes"].values())
        out += table(["attention interval", "layers", "us", "reference system on B300, us"],
                     [*classes, ["weighted mean", mean, d["attention"]["mean_us"], None]]) + "\n"  # fmt: skip
        out += longest_kernels(d.get("by_kernel", {}), busy=d["busy_us"])
    return out


def longest_kernels(by_kernel: dict, busy: float, most: int = 20) -> str:
    """The kernels of a traced step that took longest, those of one part and name together."""
    rows = [(part, name, k["count"], k["us"], f"{100 * k['us'] / busy:.1f} %")
            for part, kernels in by_kernel.items() for name, k in kernels.items()]  # fmt: skip
    rows.sort(key=lambda row: -row[3])
    return table(["part", "kernel", "launches", "us", "share of busy"], rows[:most]) + "\n" if rows else ""


# parts of bench.layers -> operators of the floor
_FLOORS = {
    "experts": ("routed experts",), "shared expert": ("shared expert",), "router": ("router",), "mHC": ("mHC site",),
    "engram": ("engram",), "lm_head": ("lm_head",), "draft lm_head": ("draft lm_head",), "Markov head": ("Markov head",),
    "attention: front_projection": ("wq_a + wkv",), "attention: qb": ("wq_b", "index columns of QB"),
    "attention: output_projection": ("wo_a", "wo_b"), "draft experts": ("draft experts",),
    "attention: sparse_attention": ("attention, window + selected", "attention, window alone"),
    "attention: indexer": ("dense score FULL2", "dense score FULL1", "sparse score", "select tokens", "candidate blocks + plan"),
    "attention: global_producer": ("producer FULL2", "producer FULL1"), "draft commit": ("main_proj", "draft commit"),
}  # fmt: skip


def merged_parts(parts: dict[str, float]) -> dict[str, float]:
    """Parts of bench.layers (us, or kernels), largest first, those of the hyper-connections as one: their floor is one too."""
    out = {}
    for part, us in parts.items():
        name = "mHC" if part.startswith("mHC") else part
        out[name] = out.get(name, 0.0) + us
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))


def part_floors(results: Results, source: Source) -> dict[str, float]:
    """{part: floor us of one step}, from the decode run that was traced; {} if its file is not there."""
    run = next((r for r in results.steps if r.source.utc == source.utc and "rows" in r.result.get("floor", {})), None)
    if run is None:
        return {}
    floors = {}
    for row in run.result["floor"]["rows"]:
        floors[row["op"]] = floors.get(row["op"], 0.0) + row["count"] * row["us"]
    return {part: sum(floors.get(op, 0.0) for op in ops) for part, ops in _FLOORS.items()}


def switches(results: Results) -> str:
    link, out = links(results), ""
    for source, d in results.of("options"):
        p = d["protocol"]
        rows = [[r["variant"], r["step_ms"]["median"], spread(r["step_ms"]["min"], r["step_ms"]["max"]),
                 r["minus_default_ms"]["median"], spread(r["minus_default_ms"]["min"], r["minus_default_ms"]["max"]),
                 r["verdict"] if r["field"] else "-"] for r in d["results"]]  # fmt: skip
        out += f"{p['preset']}, {len(p['layers'])} layers, B {p['batch']}, context {p['context']}, source {link[source.file]}.\n\n"
        out += table(["variant", "step ms", "rounds", "minus default, same round", "rounds", "verdict"], rows)
        out += "".join(f"\nNot taken: {name}: {why}." for name, why in d["not_taken"].items()) + "\n\n"
    return out


def agreement(results: Results) -> str:
    link, out = links(results), ""
    for source, d in results.of("agreement"):
        p, r = d["protocol"], d["result"]
        out += (f"**{r['statement']}**: {p['a']['asked']} against {p['b']['asked']}, {p['weights']}, {len(p['layers'])} layers, "
                f"prompts of {p['prompt_tokens'][0]} to {p['prompt_tokens'][1]} tokens ({p['prompts']}), {p['max_new_tokens']} "
                f"tokens each, source {link[source.file]}.\n\n")  # fmt: skip
        rows = [[task, f"{s['identical']} of {s['prompts']}", ", ".join(map(str, s["first_divergence"])) or "-",
                 s["logits_rms"]["median"], s["logits_rms"]["max"], s["kl"]["max"], s["same_largest"]]
                for task, s in [*r["tasks"].items(), ("total", r["total"])]]  # fmt: skip
        out += table(["task", "identical", "first divergence", "logits rms, median", "max", "KL max", "same largest logit"], rows)
        out += "".join(f"\n{note}." for note in p["notes"]) + "\n\n"
    return out


def exchange(results: Results) -> str:
    """What each exchange adds to a layer when nothing hides it, and whether it gives what one device does."""
    link, rows = links(results), []
    for source, d in results.of("exchange"):
        for name, r in d.get("exchanges", {}).items():
            same = "; ".join(f"{routing}: {told if isinstance(told, str) else f'off by {told:.2g}' if told else 'equal but for the sign of zeros'}"
                             for routing, told in d["against_one_device"][name].items())  # fmt: skip
            rows.append([name, d["what"]["ranks"], d["what"]["rows"], r["median_us"], r["exposed_us"], r["bytes_received"] / 1e6,
                         r["gbps"], r["share_of_measured_link"], r["share_of_data_sheet"], same, link[source.file]])  # fmt: skip
    heads = ["exchange", "ranks", "rows a rank", "us", "us without the stand-in", "MB received", "GB/s", "of the measured link",
             "of the data sheet", "against one device, rows routed", "source"]  # fmt: skip
    return table(heads, rows) if rows else ""


def compiled(results: Results) -> str:
    """Steps compiled without a GPU: what one GPU holds, receives and launches in a step."""
    link, out = links(results), []
    for source, d in results.of("compile_report"):
        w, m, overlap = d["what"], d["memory_bytes"], d["collective_overlap"]
        received = sum(row["bytes"] for row in d["collectives"])
        out.append([f"{w['preset']}, {w['layers']} layers", f"{w['ranks']} x {w['target']}", w["batch_per_rank"], str(w["context"]),
                    *(x / 1e9 for x in (d["weights_bytes"]["total"], d["pools_bytes"]["total"], m["temporaries"], m["peak"], m["card"])),
                    received / 1e6, f"{overlap['asynchronous']} of {sum(overlap.values())}", str(d["launches"]["total"]),
                    d["seconds"]["compile"], link[source.file]])  # fmt: skip
    heads = ["workload", "GPUs", "B a rank", "context", "weights GB", "caches GB", "temporaries GB", "peak GB", "card GB",
             "received MB a step", "collectives beside other work", "launches", "compile s", "source"]  # fmt: skip
    return table(heads, out) if out else ""


def counters(results: Results) -> str:
    """What hardware counters say of kernels: shares of each unit's peak, and what a warp waits for."""
    link, rows = links(results), []
    fields = ("us", "dram_percent", "l2_percent", "l1_percent", "busiest_pipe_percent", "issue_slots_percent", "occupancy_percent",
              "registers", "blocks")  # fmt: skip
    for source, d in results.of("counters"):
        for r in d["results"]:
            for k in r["kernels"]:
                waits = ", ".join(f"{reason} {number(cycles)}" for reason, cycles in list(k["stalls"].items())[:3])
                rows.append([r["operator"], r["spec"], k["kernel"], *(k.get(f) for f in fields), waits or "-", link[source.file]])
    heads = ["operator", "spec", "kernel", "us, caches empty", "DRAM %", "L2 %", "L1 and shared memory %", "busiest pipe %", "issue slots %",
             "occupancy %", "registers", "blocks", "cycles a warp waits per instruction", "source"]  # fmt: skip
    return table(heads, rows) if rows else ""


_SECTIONS = ("counters", "compile_report", "decode", "layers", "operators", "experts", "by hand", "sweep", "options", "agreement", "exchange")


def numbers_of(value, path: str = "") -> list[tuple[str, float]]:
    """[(path, number)] of nested plain data, lists left out."""
    if isinstance(value, dict):
        return [n for k, v in value.items() for n in numbers_of(v, f"{path} {k}".strip())]
    return [(path, value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def others(results: Results) -> str:
    """Results of benches that have no section of their own, as they are."""
    link, found = links(results), [s for s in results.sources if s.kind not in _SECTIONS]
    rows = [[s.kind, path, x, link[s.file]] for s in found for path, x in numbers_of(results.raw[s.file].get("result", {}))]
    return table(["bench", "what", "value", "source"], rows) if rows else ""


def report(results: Results, charts: list[str]) -> str:
    """The whole markdown file. charts: PNG names that exist beside it."""
    show = lambda name: f"![{name}]({name})\n\n" if name in charts else ""
    plain = [r for r in results.steps if not r.axes]
    swept = [r for r in results.steps if r.axes]
    missing = "".join(f"* {kind}: no file; `{cmd} --out FILE` makes one\n" for kind, cmd in results.missing().items())
    failed = "".join(f"\nDid not fit: {asked}: {why} ({links(results)[s.file]})." for s, _, asked, why in results.failed)
    parts = [
        ("Sources", sources(results)),
        ("The whole step", steps(results, plain) if plain else ""),
        ("Where the step goes", show("step.png") + layers(results)),
        ("Operators", show("operators.png") + operators(results, newest(results.operators)) if results.operators else ""),
        ("What bounds a kernel", counters(results)),
        ("Scaling", show("scaling.png") + (steps(results, swept) + failed if swept else "")),
        ("Switches, each alone against the default", show("options.png") + switches(results)),
        ("Agreement of outputs", agreement(results)),
        ("Expert exchange", exchange(results)),
        ("Compiled for GPUs that were not there (bytes of one GPU)", compiled(results)),
        ("Other benches", others(results)),
        ("Not measured yet", missing),
    ]  # fmt: skip
    head = "# Results\n\nWritten by `python -m bench.report` from the JSON files in this folder; do not edit.\n"
    return head + "".join(f"\n## {title}\n\n{text.rstrip()}\n" for title, text in parts if text.strip())


def summary(results: Results, folder: str, charts: list[str]) -> str:
    """What the repository's README shows. folder: where the results are, seen from there."""
    def machine(s: Source) -> str:
        return ", ".join([s.device, *(f"{k} {s.versions[k]}" for k in ("jax", "triton") if k in s.versions)])

    whole = sorted((r for r in results.steps if not r.axes), key=lambda r: r.source.utc)
    latest_operators = newest(results.operators)
    shown = [*(r.source for r in whole), *(r.source for r in latest_operators if r.shown), *(s for s, _ in results.of("agreement"))]
    machines = sorted(set(map(machine, shown)))
    same = len(machines) == 1  # said once, not in every row

    def where(s: Source) -> str:
        return f"[{s.commit}, {s.date}{'' if same else ', ' + machine(s)}]({folder}/{s.file})"

    out = f"Every run: {machines[0]}; commit and date in the last column.\n\n" if same else ""
    if whole:
        latest = {f"{what_ran(r)}, B {r.protocol['batch']}, context {r.protocol['context']}": r for r in whole}
        rows = [[what, r.result["step_ms"],
                 spread(min(r.result["rounds_step_ms"]), max(r.result["rounds_step_ms"])), r.result["floor_ms"],
                 r.result["ratio"], where(r.source)] for what, r in latest.items()]  # fmt: skip
        out += table(["whole step", "ms", "rounds", "floor ms", "ratio", "run"], rows) + "\n"
    plain = plain_times(results.operators)
    rows = [[f"{r.operator}, {r.spec}", r.implementation, r.median, r.device, r.floor, r.ratio, r.goal,
             plain.get((r.operator, r.spec)), where(r.source)] for r in main_specs(latest_operators)]  # fmt: skip
    if rows:
        heads = ["operator, spec", "kernel", "us", "kernels us", "floor us", "ratio", "goal us", "plain XLA us", "run"]
        out += ("\"us\": a call by the clock, launches included; \"kernels us\": its kernels by the profiler, a kernel's wait for the one "
                "before it included. The ratio is the smaller one's.\n\n")  # fmt: skip
        out += table(heads, rows) + "\n"
    for source, d in results.of("agreement"):
        p = d["protocol"]
        sides = f"{p['a']['asked']} against {p['b']['asked']}"
        out += f"{d['result']['statement']}: {sides}, {p['weights']}, {len(p['layers'])} layers, {where(source)}.\n\n"
    out += "".join(f"![{name}]({folder}/{name})\n\n" for name in charts)
    missing = results.missing()
    lacking = f"Not measured yet: {', '.join(missing)}. " if missing else ""
    return f"{out}{lacking}Every row: [{folder}]({folder}/README.md).\n"


def check(results: Results, folder: pathlib.Path) -> None:
    """Show every file alone. Raises ValueError (file, why) for one that holds something else than its kind of result."""
    for source in results.sources:
        of_it = lambda rows, name=source.file: [r for r in rows if r.source.file == name]
        alone = Results([source], of_it(results.operators), of_it(results.steps), [], {source.file: results.raw[source.file]})
        try:
            report(alone, [])
            summary(alone, "", [])
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
            why = f"{type(e).__name__}: {e}"
            raise ValueError(f"{folder / source.file}: expected a {source.kind} result, its fields cannot be shown ({why})") from e


def insert(text: str, section: str) -> str:
    """A README with `section` between its marks. Raises ValueError where they are missing."""
    start, end = (text.find(mark) for mark in MARKS)
    if not 0 <= start < end:
        raise ValueError(f"README: expected the lines {MARKS[0]!r} and {MARKS[1]!r}, in this order")
    return text[: start + len(MARKS[0])] + "\n\n" + section + "\n" + text[end:]


def main(argv=None) -> None:
    p = argparse.ArgumentParser(prog="bench.report", description=__doc__.split("\n\n")[0])
    p.add_argument("--results", type=pathlib.Path, default=FOLDER, help="folder of JSON files (default bench/results)")
    p.add_argument("--readme", type=pathlib.Path, help="file with the marks (default: the repository's, for the default folder)")
    args = p.parse_args(argv)
    readme = args.readme or (README if args.results.resolve() == FOLDER else None)
    try:
        results = read(args.results)
        check(results, args.results)
        text = readme.read_text() if readme else None
        if text is not None:
            insert(text, "")  # refuses a file without the marks before anything is written
            inside = args.results.resolve().relative_to(readme.resolve().parent).as_posix()  # and one that cannot link there
    except (ValueError, OSError) as e:
        sys.exit(f"bench.report: {e}")
    from bench.charts import draw

    charts = draw(results, args.results)
    (args.results / "README.md").write_text(report(results, charts))
    print(f"{args.results / 'README.md'}: {len(results.sources)} files, charts {', '.join(charts)}")
    for kind, command in results.missing().items():
        print(f"no {kind} file: {command} --out FILE")
    if readme:
        readme.write_text(insert(text, summary(results, inside, charts)))
        print(f"{readme}: results section")


if __name__ == "__main__":
    run_program("bench.report", main)
