"""What an engine counts, as plain data and as Prometheus text (exposition format 0.0.4)."""

import bisect
import dataclasses

TTFT_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
LATENCY_BOUNDS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)


@dataclasses.dataclass
class Histogram:
    """Observations in seconds by upper bound. counts[i]: those <= bounds[i] and above the bound before; counts[-1]: beyond."""

    bounds: tuple[float, ...]
    counts: list[int] = dataclasses.field(default_factory=list)
    total: float = 0.0

    def __post_init__(self):
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclasses.dataclass
class EngineMetrics:
    """Counts since the engine started (times in seconds); gauges are the values at the moment they were asked for.

    finished: {finish reason: requests}. prefill_tokens: prompt tokens that were run (recomputed ones too); output_tokens:
    tokens that requests got. tokens_per_s: output tokens over the time in which the engine had work. decode_rows,
    decode_rows_padded: live rows of decode steps, and rows with padding. drafted, accepted: per draft position.
    host_s: time spent in steps minus the time waiting for the device (wait_s). batches_built, batches_reused: decode batches
    sent to the device, and found there. prefix_*: lookups of admitted requests, hits, prompt tokens spared, entries and
    bytes of their snapshots held now. time_to_first_token, inter_token: histograms over requests and tokens.
    """

    submitted: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    preemptions: int = 0
    steps: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    decode_rows: int = 0
    decode_rows_padded: int = 0
    drafted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    batches_built: int = 0
    batches_reused: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    prefix_entries: int = 0
    prefix_bytes: int = 0
    prefix_evicted: int = 0
    reloads: int = 0
    time_to_first_token: Histogram = dataclasses.field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    inter_token: Histogram = dataclasses.field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    step: Histogram = dataclasses.field(default_factory=lambda: Histogram(LATENCY_BOUNDS))

    @property
    def host_s(self) -> float:
        return self.busy_s - self.wait_s

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def batch_fill(self) -> float:
        """Live share of the rows of decode steps."""
        return self.decode_rows / self.decode_rows_padded if self.decode_rows_padded else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per draft position: the share of drafts there that were accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_lookups if self.prefix_lookups else 0.0

    def count_drafts(self, accepted: int) -> None:
        """One verified row: every position drafted, the first `accepted` of them accepted."""
        for i in range(len(self.drafted)):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    def prometheus(self, prefix: str = "dsv41") -> str:
        """The text that a Prometheus server scrapes."""
        lines = []
        for name, kind, text in _SERIES:
            value = getattr(self, name)
            full = f"{prefix}_{_NAMES.get(name, name)}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
            if isinstance(value, Histogram):
                below = 0
                for bound, n in zip((*value.bounds, "+Inf"), value.counts, strict=True):
                    below += n
                    lines.append(f'{full}_bucket{{le="{bound}"}} {below}')
                lines += [f"{full}_sum {value.total}", f"{full}_count {value.count}"]
            elif isinstance(value, dict):
                lines += [f'{full}{{reason="{k}"}} {v}' for k, v in sorted(value.items())]
            elif isinstance(value, list):
                lines += [f'{full}{{position="{i}"}} {v}' for i, v in enumerate(value)]
            else:
                lines.append(f"{full} {value}")
        return "\n".join(lines) + "\n"


_NAMES = {"time_to_first_token": "time_to_first_token_seconds", "inter_token": "inter_token_latency_seconds",
          "step": "step_seconds", "busy_s": "busy_seconds", "wait_s": "wait_seconds", "finished": "requests_finished",
          "submitted": "requests_submitted", "waiting": "requests_waiting", "running": "requests_running"}  # fmt: skip

_SERIES = (
    ("submitted", "counter", "Requests taken."),
    ("finished", "counter", "Requests that ended, by reason."),
    ("waiting", "gauge", "Requests in the queue."),
    ("running", "gauge", "Requests in prefill or decode."),
    ("preemptions", "counter", "Requests sent back to the queue for want of pages."),
    ("steps", "counter", "Engine steps that ran something."),
    ("decode_steps", "counter", "Decode steps dispatched."),
    ("prefill_steps", "counter", "Prefill steps dispatched."),
    ("prefill_tokens", "counter", "Prompt tokens run."),
    ("output_tokens", "counter", "Tokens given to requests."),
    ("tokens_per_s", "gauge", "Output tokens per second of work."),
    ("busy_s", "counter", "Seconds in steps."),
    ("wait_s", "counter", "Seconds of them spent waiting for the device."),
    ("batch_fill", "gauge", "Live share of the rows of decode steps."),
    ("drafted", "counter", "Drafts verified, by position."),
    ("accepted", "counter", "Drafts accepted, by position."),
    ("batches_built", "counter", "Decode batches sent to the device."),
    ("batches_reused", "counter", "Decode batches found on the device."),
    ("pages_used", "gauge", "Pages with an owner."),
    ("pages_cached", "gauge", "Pages that the prefix cache owns, alone or with requests."),
    ("pages_total", "gauge", "Pages of the pools."),
    ("prefix_lookups", "counter", "Admitted requests whose prefix was looked up."),
    ("prefix_hits", "counter", "Those that started from a cached prefix."),
    ("prefix_tokens", "counter", "Prompt tokens that a cached prefix spared."),
    ("prefix_entries", "gauge", "Prefixes held."),
    ("prefix_bytes", "gauge", "Bytes of their snapshots."),
    ("prefix_evicted", "counter", "Prefixes dropped."),
    ("reloads", "counter", "Weight reloads."),
    ("time_to_first_token", "histogram", "From submission to the first token."),
    ("inter_token", "histogram", "Between tokens of a request."),
    ("step", "histogram", "Engine steps."),
)
