"""PNG charts of the results. A chart is drawn only if there is something to show."""

import pathlib
import sys
from collections import defaultdict

from bench.report import merged_parts, part_floors, ranks_of
from bench.results_files import OperatorRow, Results, StepRow, main_specs, newest, plain_times

KERNEL, PLAIN, FLOOR, GOAL, TEXT = "#2f6f9f", "#9aa4ad", "#c9d6df", "#c8553d", "#333333"


def _plots():
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.exit("bench.report: charts need matplotlib: pip install -e '.[report]'")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888",
        "axes.titlesize": 10, "axes.titleweight": "bold", "figure.dpi": 110, "text.color": TEXT, "legend.frameon": False,
    })  # fmt: skip
    return plt


def draw(results: Results, folder) -> list[str]:
    """Write the charts that the results allow into `folder`, remove those that they do not; returns the names written."""
    plt = _plots()
    written = []
    for name, make in (
        ("step.png", step),
        ("operators.png", operators),
        ("scaling.png", scaling),
        ("options.png", options),
    ):
        figure, path = make(plt, results), pathlib.Path(folder) / name
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        written.append(name)
    return written


def provenance(sources) -> str:
    """Device, commit and date of what a chart shows, one line per run."""
    return "\n".join(dict.fromkeys(f"{s.device}, commit {s.commit}, {s.date} ({s.file})" for s in sources))


def _foot(figure, sources) -> None:
    figure.tight_layout()
    figure.text(0.01, 0, provenance(sources), fontsize=6.5, color="#777777", va="top")


LEAST_FLOOR = 0.5  # us: below, an operator is a latency, and its floor says nothing


def bars(results: Results) -> list[tuple[OperatorRow, float | None]]:
    """[(kernel's row, plain XLA's time or None)] of what stands for the operators, where bytes or flops are the bound."""
    plain = plain_times(results.operators)
    rows = main_specs(newest(results.operators))
    return [(r, plain.get((r.operator, r.spec))) for r in rows if (r.floor or 0) >= LEAST_FLOOR]


def operators(plt, results: Results):
    """Time over floor per operator and spec; a mark where the spec has a goal, the plain XLA time beside it."""
    rows = bars(results)
    if not rows:
        return None
    figure, ax = plt.subplots(figsize=(8.6, 0.9 + 0.3 * len(rows)))
    y = range(len(rows), 0, -1)
    ax.barh(y, [r.ratio for r, _ in rows], color=KERNEL, height=0.62, label="kernel, whisker min to max")
    for at, (r, plain) in zip(y, rows, strict=True):
        clocked = r.best == r.median and r.low is not None and r.high is not None
        if clocked:
            ax.plot([r.low / r.floor, r.high / r.floor], [at, at], color="#12334d", lw=1.2)
        if r.goal:
            ax.plot([r.goal / r.floor] * 2, [at - 0.42, at + 0.42], color=GOAL, lw=2)
        ax.text(max(r.ratio, (r.goal or 0) / r.floor, r.high / r.floor if clocked else 0) * 1.06, at,
                f"{r.best:.4g} us  x{r.ratio:.2f}", va="center", fontsize=8)  # fmt: skip
        if plain:
            ax.plot([plain / r.floor], [at], marker="D", color=PLAIN, ms=4, ls="none")
    ax.plot([], [], color=GOAL, lw=2, label="goal")
    ax.plot([], [], marker="D", color=PLAIN, ms=4, ls="none", label="plain XLA")
    ax.axvline(1, color="#555555", lw=1)
    ax.set_xscale("log")
    ax.set_xlim(0.8, None)
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t <= ax.get_xlim()[1]]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    ax.set_yticks(list(y), [f"{r.operator}  {r.spec}" for r, _ in rows])
    ax.set_ylim(0.3, len(rows) + 0.7)
    ax.set_xlabel("time / roofline floor (1 = floor)")
    ax.set_title("Operators", loc="left")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, ncols=3)
    _foot(figure, [r.source for r, _ in rows])
    return figure


def step(plt, results: Results):
    """Parts of the step, largest first, beside their floors, one panel per file of bench.layers."""
    found = results.of("layers")
    if not found:
        return None
    panels = [(source, d, merged_parts(d["parts_us"])) for source, d in found]
    tall = max(len(parts) for *_, parts in panels)
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, columns, figsize=(7.6 * columns, (1.3 + 0.27 * tall) * rows), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, (source, d, parts) in zip(axes.flat, panels, strict=False):
        floors, y = part_floors(results, source), range(len(parts), 0, -1)
        ax.barh(y, [us / 1e3 for us in parts.values()], color=KERNEL, height=0.62, label="measured")
        if floors:
            ax.barh(y, [floors.get(part, 0) / 1e3 for part in parts], color=FLOOR, height=0.3, label="floor")
        for at, us in zip(y, parts.values(), strict=True):
            label = f"  {us / 1e3:.3g} ms, {100 * us / d['measured_step_us']:.1f} %"
            ax.text(max(us, 0) / 1e3, at, label, va="center", fontsize=7.5)
        ax.set_yticks(list(y), list(parts))
        ax.set_xlim(min(0, *(us / 1e3 for us in parts.values())), 1.25 * max(parts.values()) / 1e3)
        ax.set_xlabel("ms of one step")
        p = d["protocol"]
        what = f"{p['preset']}, {len(p['layers'])} layers{ranks_of(p)}, B {p['batch']}, context {p['context']}"
        ax.set_title(f"{what}:\n{d['measured_step_us'] / 1e3:.2f} ms a step", loc="left")
        if floors:
            ax.legend(loc="lower right", fontsize=8)
    _foot(figure, [s for s, *_ in panels])
    return figure


def lines(rows: list[StepRow], axis: str) -> dict[tuple, list[StepRow]]:
    """{what a line has in common: its points by x} of one axis; a line has at least two places on it.

    Points of a sweep belong to the axes they were measured for. Runs of their own belong to a line if they differ in that
    axis alone. The context line of a sweep may change its batch on the way: the chart says where."""
    key = {"context": ("batch",), "batch": ("context",), "capacity": ("context", "batch")}[axis]
    out = defaultdict(dict)
    for r in rows:
        if r.axes and axis not in r.axes:
            continue
        p = r.protocol
        fixed = tuple(p[k] for k in key) if not r.axes else ("sweep", r.source.file)
        usual = axis == "capacity" or r.axes or p["capacity"] - p["context"] <= 1024
        if usual:
            out[(*r.series, *fixed)][p[axis]] = r
    return {k: [points[x] for x in sorted(points)] for k, points in out.items() if len(points) > 1}


def size(n: int) -> str:
    """A number of tokens, short: 4k, 33k, 1M."""
    if n < 1024:
        return str(n)
    return f"{round(n / 2**20, 1):g}M" if n > 1000 * 1024 else f"{n // 1024}k"


def scaling(plt, results: Results):
    """Step time and floor over context, batch and capacity: a panel for each axis that has a line."""
    found = {axis: lines(results.steps, axis) for axis in ("context", "batch", "capacity")}
    found = {axis: by for axis, by in found.items() if by}
    if not found:
        return None
    figure, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found), 3.6), squeeze=False)
    shade = plt.get_cmap("tab10")
    for ax, (axis, by) in zip(axes[0], found.items(), strict=True):
        commits = {points[0].source.commit for points in by.values()}
        for i, points in enumerate(by.values()):
            x = [r.protocol[axis] for r in points]
            p = points[0].protocol
            label = f"{p['preset']}, {len(p['layers'])} layers" + (
                f", {p['ranks']} ranks" if p.get("ranks", 1) > 1 else ""
            )
            label += f", {points[0].source.commit}" if len(commits) > 1 else ""
            ax.plot(x, [r.result["step_ms"] for r in points], marker="o", ms=4, color=shade(i), label=label)
            ax.plot(x, [r.result["floor_ms"] for r in points], ls="--", lw=1, color=shade(i), label="floor")
            shrunk = len({r.protocol["batch"] for r in points}) > 1 and axis == "context"
            for r in points:
                beside = f"\nB {r.protocol['batch']}" if shrunk else ""
                ax.annotate(f"{r.result['step_ms']:.3g}{beside}", (r.protocol[axis], r.result["step_ms"]), fontsize=7,
                            textcoords="offset points", xytext=(0, 7), ha="center")  # fmt: skip
        ticks = sorted({r.protocol[axis] for points in by.values() for r in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [size(t) for t in ticks])
        ax.minorticks_off()
        ax.margins(x=0.1)
        ax.set_ylim(0, 1.25 * max(r.result["step_ms"] for points in by.values() for r in points))
        ax.set_xlabel(
            {"context": "context, tokens", "batch": "batch, requests", "capacity": "page-table capacity, tokens"}[axis]
        )
        ax.set_ylabel("step, ms")
        held = sorted({r.protocol["context"] for points in by.values() for r in points})
        at = f" at context {', '.join(map(size, held))}" if axis != "context" else ""
        ax.set_title(f"Step time by {axis}{at}", loc="left")
        ax.legend(fontsize=7, loc="lower right")
    _foot(figure, [r.source for by in found.values() for points in by.values() for r in points])
    return figure


def options(plt, results: Results):
    """Each switch's cost against the default of the same rounds, whisker from the smallest to the largest difference."""
    found = [(s, d, r) for s, d in results.of("options") for r in d["results"] if r["variant"] != "default"]
    if not found:
        return None
    figure, ax = plt.subplots(figsize=(7.6, 0.9 + 0.3 * len(found)))
    y = range(len(found), 0, -1)
    for at, (_, d, r) in zip(y, found, strict=True):
        base = d["results"][0]["step_ms"]["median"]
        low, mid, high = (100 * r["minus_default_ms"][k] / base for k in ("min", "median", "max"))
        settled = r["verdict"] != "within the spread" and r["field"]
        ax.plot([low, high], [at, at], color=KERNEL if settled else PLAIN, lw=2)
        ax.plot([mid], [at], marker="o", color=KERNEL if settled else PLAIN)
        ax.text(high, at, f"  {mid:+.2f} %", va="center", fontsize=8)
    ax.axvline(0, color="#555555", lw=1)
    ax.set_xscale("symlog", linthresh=10)
    ax.margins(x=0.15, y=0.1)
    ticks = [t for t in (-100, -10, -5, 0, 5, 10, 100, 1000) if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_yticks(list(y), [r["variant"] for *_, r in found])
    ax.set_xlabel("step time against the default of the same round, % (grey: within the spread)")
    ax.set_title("Switches, each alone", loc="left")
    _foot(figure, [s for s, *_ in found])
    return figure
