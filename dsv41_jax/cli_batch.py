"""`dsv41 generate --prompts FILE.jsonl --out OUT.jsonl`: a file of prompts through the engine, one JSON line a result.

Results are appended as requests finish, so whatever ends the run, they are there; the same command goes on from them. When
all are there, the lines are put in the order of the prompts.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence

from dsv41_jax import checkpoint
from dsv41_jax.cli_run import result_record, whole_file, writable
from dsv41_jax.config import ModelConfig
from dsv41_jax.json_files import parse_json
from dsv41_jax.options import DecodeOptions
from dsv41_jax.tokenizer import Tokenizer

QUEUED = 4  # requests handed to the engine, in multiples of its batch
REFRESH_S = 0.1
RATE_S = 5  # the live rate is that of the last seconds


def generate_file(args, config: ModelConfig, tokenizer: Tokenizer | None, prompts: Sequence[list[int]], sampling,
                  gamma: int | None) -> int:  # fmt: skip
    """Exit code 0, 1 if a request ended in an error of its own, 128 + n after signal n. Raises ValueError if the file there
    is not an earlier run's, OSError."""
    settings = _fingerprint(args, sampling, gamma)
    writable(args.out)
    done = _finished(args.out, prompts, settings)
    todo = [i for i in range(len(prompts)) if i not in done]
    if done:
        print(f"{args.out}: {len(done)} of {len(prompts)} finished before", file=sys.stderr)
    stop = 0
    if todo:
        params = checkpoint.load(args.checkpoint, config, engram=args.engram, progress=not args.no_progress)
        _write(args.out, done)  # without half a line, and without those that are run again
        stop = _serve(args, params, config, tokenizer, prompts, todo, sampling, gamma, settings)
        done = _finished(args.out, prompts, settings, failed=True)
    if stop:
        left = len(prompts) - len(done)
        print(f"dsv41: interrupted; {left} of {len(prompts)} are left, the same command goes on", file=sys.stderr)
        return 128 + stop
    _write(args.out, done)
    failed = {i: r for i, r in done.items() if r["finish_reason"] == "error"}
    for i, record in failed.items():
        print(f"dsv41: prompt {i}: {record['error']}", file=sys.stderr)
    return 1 if failed else 0


def _serve(args, params, config, tokenizer, prompts, todo, sampling, gamma, settings) -> int:
    """Run `todo` and append a line for each as it ends; the number of the signal that ended it, 0 = none did."""
    from dsv41_jax.engine import Engine, shutdown_on_signals

    longest = max(map(len, prompts))
    rows = min(args.batch, len(prompts))
    engine = Engine(
        params, config, DecodeOptions.from_env(), rows,
        args.max_context or min(longest + args.max_new_tokens, config.max_position_embeddings),
        gamma=gamma, precision=args.precision, chunk=min(args.chunk or 256, longest), end_ids=len(sampling.stop_ids) + 4,
        batch_buckets=(rows,), prefill_buckets=(min(4, rows),),
    )  # fmt: skip
    broken: list[OSError] = []
    with (
        open(args.out, "a", encoding="utf-8") as out,
        shutdown_on_signals(engine, told=_tell) as stop,
        _Progress(args, engine, todo) as bar,
    ):

        def finished(index: int, request) -> None:
            if request.finish_reason == "cancelled":
                return
            record = result_record(index, prompts[index], request, tokenizer) | {"settings": settings}
            if request.error is not None:
                record["error"] = str(request.error)
            try:
                out.write(json.dumps(record) + "\n")
                out.flush()
            except OSError as e:  # a result that cannot be kept ends the run, not the request
                broken.append(e)
                engine.shutdown(drain=False, wait=False)
            bar.finished += 1

        waiting, handed = iter(todo), 0
        while True:
            while handed - bar.finished < QUEUED * rows and (index := next(waiting, None)) is not None:
                engine.submit(prompts[index], sampling, max_new_tokens=args.max_new_tokens,
                              on_finish=lambda request, index=index: finished(index, request))  # fmt: skip
                handed += 1
            if not engine.step() and (handed == len(todo) or stop.received or broken):
                break
            bar.update()
    if broken:
        raise broken[0]
    print(bar.summary(), file=sys.stderr)
    return stop.received or 0


def _tell(number: int) -> None:
    """A step, and a compilation above all, can take a while to end."""
    print("dsv41: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)


# the file -------------------------------------------------------------------------------------------------------------


def _fingerprint(args, sampling, gamma) -> str:
    """What the results depend on beside the prompts, as 12 hex digits."""
    values = [str(pathlib.Path(args.checkpoint).resolve()), dataclasses.asdict(sampling), args.max_new_tokens, gamma,
              args.precision, args.max_context]  # fmt: skip
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


def _finished(path, prompts, settings: str, failed: bool = False) -> dict[int, dict]:
    """{index: record} of the results in a file, those of failed requests too if asked for. Half a line at its end is what a
    killed run leaves. Raises ValueError for any other line that is no result of these prompts with these settings."""
    path, out = pathlib.Path(path), {}
    if not path.exists():
        return out
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            index = record["index"]
            ours = record["prompt_ids"] == prompts[index] and index >= 0 and record["settings"] == settings
            reason = record["finish_reason"]
        except (ValueError, KeyError, TypeError, IndexError):
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: expected a result of an earlier run to go on from, got {line[:60]}; "
                             "give another --out or remove it") from None  # fmt: skip
        if not ours:
            raise ValueError(f"{path}:{number}: expected results of these prompts with these settings, got another run's; "
                             "give another --out or remove it")  # fmt: skip
        if reason != "error" or failed:
            out[index] = record
    return dict(sorted(out.items()))


def _write(path, records: dict[int, dict]) -> None:
    with whole_file(path, "w") as f:
        f.writelines(json.dumps(records[i]) + "\n" for i in sorted(records))


# the terminal ---------------------------------------------------------------------------------------------------------


class _Progress:
    """A live line on stderr: requests, tokens a second of late, who runs and waits, how many drafts are accepted."""

    def __init__(self, args, engine, todo):
        self._engine, self._total, self.finished = engine, len(todo), 0
        self._start = self._shown = time.perf_counter()
        self._stack, self._bar = contextlib.ExitStack(), None
        self._wanted = not args.no_progress
        self._late: collections.deque = collections.deque([(self._start, 0)])  # (time, tokens)

    def __enter__(self):
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = ("generating", BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = self._stack.enter_context(Progress(*columns, console=Console(stderr=True)))
            self._task = self._bar.add_task("compiling", total=self._total)
        return self

    def __exit__(self, *exc):
        self._show()
        return self._stack.__exit__(*exc)

    def update(self) -> None:
        if time.perf_counter() - self._shown >= REFRESH_S:
            self._show()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        if self._bar:
            m = self._engine.metrics
            self._late.append((self._shown, m.output_tokens))
            while len(self._late) > 2 and self._shown - self._late[0][0] > RATE_S:
                self._late.popleft()
            then, tokens = self._late[0]
            rate = (m.output_tokens - tokens) / max(self._shown - then, 1e-9)
            text = f"{rate:.0f} tokens/s, {m.running} running, {m.waiting} waiting" + _drafts(m)
            self._bar.update(self._task, completed=self.finished, description=text)

    def summary(self) -> str:
        m, seconds = self._engine.metrics, time.perf_counter() - self._start
        reasons = ", ".join(f"{n} {reason}" for reason, n in m.finished.items() if n)
        return (f"{self.finished} requests ({reasons}); {m.output_tokens} tokens in {seconds:.1f} s, compilation included"
                f"; batch {m.batch_fill:.0%} full{_drafts(m)}; prefixes spared {m.prefix_tokens} tokens")  # fmt: skip


def _drafts(m) -> str:
    drafted = sum(m.drafted)
    return f", {sum(m.accepted) / drafted:.0%} of drafts accepted" if drafted else ""
