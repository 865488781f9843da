"""The `dsv41` command: generate, score, inspect, make-checkpoint, demo.

Errors are one line on stderr and exit code 2; results go to stdout or to files that appear only when they are whole.
"""

import argparse
import os
import signal
import sys

from dsv41_jax.arguments import at_least

PRECISION_NAMES = ("released", "float32_cache", "float32")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 if a request failed while it ran, 2 for bad input, 130
    when interrupted. DSV41_TRACEBACK=1 lets the exceptions behind exit code 2 through."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: as a reader that went away
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the program runs)
    args = _parser().parse_args(argv)
    if argv is None:  # as a program: being told to end cleans up like any other end
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # the reader went away: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("dsv41: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as e:
        if os.environ.get("DSV41_TRACEBACK") == "1" or not _of_the_input(e):
            raise
        print(f"dsv41: error: {_one_line(e)}", file=sys.stderr)
        return 2


def _of_the_input(e: Exception) -> bool:
    """Whether an exception tells the user something; RuntimeError does where the device's memory is not enough."""
    return not isinstance(e, RuntimeError) or str(e).startswith("RESOURCE_EXHAUSTED")


def _one_line(e: Exception) -> str:
    lines = [part.strip() for part in str(e).splitlines() if part.strip()]
    if not lines:
        return type(e).__name__
    head, rest = lines[0], lines[1:]
    if len(rest) > 40:
        rest = [*rest[:40], f"and {len(rest) - 40} more"]
    return " ".join([head, "; ".join(rest)]).strip()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("dsv41", description="DeepSeek-V4.1-Flash decode in JAX.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    _add_generate(commands)
    _add_score(commands)
    _add_inspect(commands)
    _add_make_checkpoint(commands)
    _add_demo(commands)
    return parser


def _command(commands, name: str, module: str, help: str):
    """A subcommand whose module is imported only when it runs: `dsv41 --help` needs no jax."""

    def run(args):
        import importlib

        return getattr(importlib.import_module(f"dsv41_jax.{module}"), name.replace("-", "_"))(args)

    sub = commands.add_parser(name, help=help, description=help)
    sub.set_defaults(run=run)
    return sub


def _ids(text: str) -> list[int]:
    try:
        return [int(t) for t in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected comma-separated token ids, got {text!r}") from None


def _add_engram(p) -> None:
    p.add_argument("--engram", choices=("device", "host"), default="device",
                   help="where the engram tables are; host: in the files, mapped, each step fetches its rows (default device)")  # fmt: skip


def _add_sampling(p) -> None:
    p.add_argument("--temperature", type=float, help="0 = greedy; default: generation_config.json")
    p.add_argument("--top-k", type=int, help="0 = off")
    p.add_argument("--top-p", type=float, help="1 = off")
    p.add_argument("--min-p", type=float, help="0 = off")
    p.add_argument("--seed", type=int, default=0, help="of the requests' random numbers (default 0)")
    p.add_argument("--draft", choices=("on", "off"), default="on", help="speculate with DSpark (default on)")
    p.add_argument("--gamma", type=at_least(0), help="drafts verified a step (default: the block size)")


def _add_generate(commands) -> None:
    p = _command(commands, "generate", "cli_run", "Continue prompts.")
    p.add_argument("--checkpoint", required=True, metavar="DIR")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-ids", type=_ids, metavar="1,2,3")
    what.add_argument("--prompts", metavar="FILE.jsonl", help='lines {"prompt": "text"} or {"prompt_ids": [1, 2]}')
    p.add_argument("--max-new-tokens", type=at_least(1), default=64, metavar="N")
    p.add_argument("--stop-id", type=at_least(0), action="append", default=[], metavar="ID", help="ends the output; repeatable")
    p.add_argument("--ignore-eos", action="store_true")
    _add_sampling(p)
    p.add_argument("--precision", choices=PRECISION_NAMES, default="released")
    _add_engram(p)
    p.add_argument("--chunk", type=at_least(1), help="prompt tokens a prefill step")
    p.add_argument("--batch", type=at_least(1), default=32, help="requests decoded at once with --prompts and --out (default 32)")
    p.add_argument("--max-context", type=at_least(2), help="positions to reserve (default: what the prompts need)")
    p.add_argument("--json", action="store_true", help="one JSON line a request")
    p.add_argument("--out", metavar="FILE", help="write there instead of stdout; with --prompts JSON lines, and an "
                   "interrupted run goes on from them")
    p.add_argument("--no-progress", action="store_true", help="no bars")


def _add_score(commands) -> None:
    p = _command(commands, "score", "cli_run", "Teacher-forced logits of given ids, through the decode path.")
    p.add_argument("--checkpoint", required=True, metavar="DIR")
    p.add_argument("--ids", required=True, metavar="IDS.npy", help="int [B, L]")
    p.add_argument("--out", required=True, metavar="OUT.npz")
    p.add_argument("--precision", choices=PRECISION_NAMES, default="released")
    _add_engram(p)
    p.add_argument("--prefill", type=at_least(0), default=0, metavar="N", help="first N tokens as one chunk (default 0)")
    p.add_argument("--chunk", type=at_least(1), default=1, metavar="S", help="then S tokens a step (default 1)")
    p.add_argument("--drafts", action="store_true", help="add the drafter's proposals for every anchor from N on")
    p.add_argument("--dump", action="store_true", help="add per-layer arrays")
    p.add_argument("--no-progress", action="store_true", help="no loading bar")


def _add_inspect(commands) -> None:
    p = _command(commands, "inspect", "cli_tools", "Config, layer schedule, parameters, memory per GPU, options.")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", metavar="DIR")
    which.add_argument("--preset", metavar="NAME")
    p.add_argument("--batch", type=at_least(1), default=64, help="requests per rank (default 64)")
    p.add_argument("--context", type=at_least(1), help="tokens per request (default 32768, or all the model takes)")
    p.add_argument("--ranks", type=at_least(1), default=1, help="GPUs that share the experts and engram tables (default 1)")
    _add_engram(p)
    p.add_argument("--json", action="store_true")


def _add_make_checkpoint(commands) -> None:
    p = _command(commands, "make-checkpoint", "cli_tools", "Write a random checkpoint in the released format.")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--preset", metavar="NAME")
    which.add_argument("--config", metavar="CONFIG.json", help="any geometry")
    p.add_argument("--seed", type=at_least(0), default=0)
    p.add_argument("--out", required=True, metavar="DIR", help="must not exist")
    p.add_argument("--shard-gb", type=float, default=5.0, help="split the weights above this size (default 5)")


def _add_demo(commands) -> None:
    p = _command(commands, "demo", "cli_run", "Make a tiny random checkpoint and generate from it: a check of the whole path.")
    p.add_argument("--prompt", default="Once upon a time there was a small house by the sea.", metavar="TEXT")
    p.add_argument("--max-new-tokens", type=at_least(1), default=48, metavar="N")
    _add_sampling(p)


if __name__ == "__main__":
    sys.exit(main())
