"""The commands that run the model: generate, score, demo (spec: issue text of the command line; see `cli`)."""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
import zipfile
from collections.abc import Collection

import numpy as np

from dsv41_jax import checkpoint
from dsv41_jax.config import ModelConfig
from dsv41_jax.json_files import parse_json
from dsv41_jax.options import DecodeOptions
from dsv41_jax.tokenizer import Tokenizer, TokenizerError, check_prompt


def generate(args) -> int:
    """`dsv41 generate`: exit code 0, or 1 if a request ended in an error of its own. Raises ValueError or OSError for bad
    input, before anything is written."""
    folder = pathlib.Path(args.checkpoint)
    config = _config(folder)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    prompts = _prompts(args, folder, tokenizer)
    for label, ids in prompts:
        _check_request(label, ids, args, config)
    gamma, options = _gamma(args, config), DecodeOptions.from_env()
    sampling = _sampling(args, folder)
    if args.prompts is not None and args.out is not None:
        from dsv41_jax.cli_batch import generate_file

        return generate_file(args, config, tokenizer, [ids for _, ids in prompts], sampling, gamma)
    with _sink(args.out) as out:
        params = checkpoint.load(folder, config, engram=args.engram, progress=not args.no_progress)
        results = _run(args, params, config, tokenizer, [ids for _, ids in prompts], sampling, gamma, options, out)
    failed = [label for (label, _), result in zip(prompts, results, strict=True) if result.finish_reason == "error"]
    for label in failed:
        print(f"dsv41: {label}: stopped, a logit that decided a token was not finite", file=sys.stderr)
    return 1 if failed else 0


def score(args) -> None:
    """`dsv41 score`. Raises ValueError or OSError for bad input, before anything is written."""
    from dsv41_jax.score import check_ids
    from dsv41_jax.score import score as run

    config = _config(args.checkpoint)
    try:
        ids = np.load(args.ids, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as e:
        raise ValueError(f"{args.ids}: not a .npy array ({e})") from None
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{args.ids}: expected one .npy array, got an archive")
    check_ids(ids, config, args.ids)
    options = DecodeOptions.from_env()
    writable(args.out)
    params = checkpoint.load(args.checkpoint, config, engram=args.engram, progress=not args.no_progress)
    arrays = run(
        params, config, ids, prefill=args.prefill, chunk=args.chunk, precision=args.precision,
        drafts=args.drafts, dump=args.dump, options=options,
    )  # fmt: skip
    with whole_file(args.out) as f:
        np.savez(f, **arrays)
    print(f"{args.out}: " + ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in list(arrays.items())[:4])
          + (f" and {len(arrays) - 4} more" if len(arrays) > 4 else ""), file=sys.stderr)  # fmt: skip


def demo(args) -> int:
    """`dsv41 demo`: a tiny random checkpoint in a temporary folder, then `generate` from it."""
    from dsv41_jax.make_checkpoint import make_checkpoint
    from dsv41_jax.presets import TINY

    with tempfile.TemporaryDirectory(prefix="dsv41-demo-") as folder:
        path = make_checkpoint(TINY, pathlib.Path(folder) / "tiny", seed=0)
        print("dsv41 demo: a tiny network with random weights (so the text is noise); compiling takes a while", file=sys.stderr)
        args.checkpoint, args.prompt_ids, args.prompts = str(path), None, None
        args.stop_id, args.ignore_eos, args.precision = [], True, "released"
        args.chunk = args.max_context = args.out = None
        args.json, args.no_progress, args.engram = False, True, "device"
        return generate(args)


# input ----------------------------------------------------------------------------------------------------------------


def _config(folder) -> ModelConfig:
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint folder")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json, so this is no checkpoint folder")
    return ModelConfig.from_file(folder)


def _prompts(args, folder, tokenizer: Tokenizer | None) -> list[tuple[str, list[int]]]:
    """[(where it came from, ids)]"""
    if args.prompt_ids is not None:
        return [("--prompt-ids", args.prompt_ids)]
    if args.prompt is not None:
        return [("--prompt", _encode("--prompt", args.prompt, folder, tokenizer))]
    return [(label, prompt_ids(label, line, folder, tokenizer)) for label, line in prompt_lines(args.prompts)]


def prompt_lines(path) -> list[tuple[str, str]]:
    """[(file:number, line)] of a JSONL file of prompts, empty lines left out. Raises ValueError for bytes that are no
    UTF-8 or a file without a prompt, OSError."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: expected UTF-8, got byte {e.object[e.start]:#04x} at offset {e.start}") from None
    # not splitlines(): JSON strings may hold U+2028 and the like as they are
    out = [(f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not out:
        raise ValueError(f"{path}: no prompts in it")
    return out


def prompt_ids(label: str, line: str, folder, tokenizer: Tokenizer | None, more: Collection[str] = ()) -> list[int]:
    """The ids of one line of such a file; more: keys that may stand beside the prompt. Raises ValueError (label, expected,
    got)."""
    try:
        raw = parse_json(line)
    except ValueError as e:
        raise ValueError(f"{label}: not JSON ({e})") from None
    if not isinstance(raw, dict) or len(raw.keys() & {"prompt", "prompt_ids"}) != 1:
        raise ValueError(f'{label}: expected an object with "prompt" or "prompt_ids", got {line.strip()[:60]}')
    if unknown := sorted(raw.keys() - {"prompt", "prompt_ids", *more}):  # a setting here would be taken for one that counts
        raise ValueError(f"{label}: expected no other keys than the prompt, got {', '.join(unknown)}")
    if "prompt" in raw:
        if not isinstance(raw["prompt"], str):
            raise ValueError(f"{label}: prompt expected a string, got {raw['prompt']!r}")
        return _encode(label, raw["prompt"], folder, tokenizer)
    ids = raw["prompt_ids"]
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{label}: prompt_ids expected a list of integers")
    return ids


def _encode(label: str, text: str, folder, tokenizer: Tokenizer | None) -> list[int]:
    if not text:
        raise ValueError(f"{label}: the prompt is empty")
    if tokenizer is None:
        raise TokenizerError(f"{folder}: no tokenizer.json, so text prompts are not possible (give token ids)")
    try:
        return tokenizer.encode(text)
    except TokenizerError as e:
        raise TokenizerError(f"{label}: {e}") from None


def _check_request(label: str, ids: list[int], args, c: ModelConfig) -> None:
    try:
        check_prompt(ids, c)
    except ValueError as e:
        raise ValueError(f"{label}: {e}") from None
    limit = args.max_context or c.max_position_embeddings
    if limit > c.max_position_embeddings:
        raise ValueError(f"--max-context: expected at most {c.max_position_embeddings}, got {limit}")
    if len(ids) >= limit:
        raise ValueError(f"{label}: expected fewer tokens than the context of {limit}, got {len(ids)}")
    for token in args.stop_id:
        if token >= c.vocab_size:
            raise ValueError(f"--stop-id: expected ids 0..{c.vocab_size - 1}, got {token}")


def _gamma(args, c: ModelConfig) -> int | None:
    if args.draft == "off":
        if args.gamma:
            raise ValueError(f"--gamma {args.gamma} asks for drafts, --draft off for none")
        return 0
    if args.gamma is None:
        return None if c.has_draft else 0
    if args.gamma > (c.dspark_block_size if c.has_draft else 0):
        raise ValueError(f"--gamma: expected 0..{c.dspark_block_size if c.has_draft else 0}, got {args.gamma}")
    return args.gamma


def _sampling(args, folder):
    from dsv41_jax.sampling import SamplingParams

    return SamplingParams.from_folder(
        folder, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        stop_ids=tuple(args.stop_id), ignore_eos=args.ignore_eos,
    )  # fmt: skip


# output ---------------------------------------------------------------------------------------------------------------


def _run(args, params, config, tokenizer, prompts, sampling, gamma, options, out):
    from dsv41_jax.generate import generate as run

    watch = _Watch()
    stream = tokenizer.stream() if tokenizer and len(prompts) == 1 and not args.json else None

    def on_token(request: int, ids: list[int]) -> None:
        watch.count(len(ids))
        if stream:
            out.write(stream.push(ids))
            out.flush()

    results = run(
        params, config, prompts, max_new_tokens=args.max_new_tokens, sampling=sampling, gamma=gamma,
        precision=args.precision, options=options, chunk=args.chunk, max_context=args.max_context,
        on_token=on_token,
    )  # fmt: skip
    if stream:
        out.write(stream.finish() + "\n")
    else:
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            label = i if args.json or len(prompts) > 1 else None
            out.write(_result_line(label, prompt, result, tokenizer, args.json))
    drafted, accepted = sum(r.drafted for r in results), sum(r.accepted for r in results)
    print(watch.report() + (f"; {accepted} of {drafted} drafts accepted ({accepted / drafted:.0%})" if drafted else ""),
          file=sys.stderr)  # fmt: skip
    return results


def result_record(index: int | None, prompt, result, tokenizer) -> dict:
    """What a JSON line says of a GenerationResult or an engine's Request."""
    ids = [int(t) for t in result.token_ids]
    return {
        "index": index, "prompt_ids": prompt, "token_ids": ids, "text": tokenizer.decode(ids) if tokenizer else None,
        "finish_reason": result.finish_reason, "drafted": int(result.drafted), "accepted": int(result.accepted),
    }  # fmt: skip


def _result_line(index: int | None, prompt, result, tokenizer, as_json: bool) -> str:
    record = result_record(index, prompt, result, tokenizer)
    ids, text = record["token_ids"], record["text"]
    if as_json:
        return json.dumps(record) + "\n"
    label = "" if index is None else f"[{index}] "
    return label + (text if text is not None else ",".join(map(str, ids))) + "\n"


class _Watch:
    """Time until decoding runs, and the rate from there. The first call of `count` follows the compilation of the prefill
    step, the second that of the decode step: both count as start-up."""

    def __init__(self):
        self._start = self._ready = self._last = time.perf_counter()
        self._calls = self._tokens = self._decoded = 0

    def count(self, tokens: int) -> None:
        self._last = time.perf_counter()
        self._calls += 1
        self._tokens += tokens
        if self._calls <= 2:
            self._ready = self._last
        else:
            self._decoded += tokens

    def report(self) -> str:
        text = f"{self._tokens} tokens; {self._ready - self._start:.1f} s to compile and start"
        if self._decoded:
            text += f", then {self._decoded / (self._last - self._ready):.1f} tokens/s"
        return text


def writable(path) -> None:
    """Raises OSError or ValueError if a file of that name can neither be made nor replaced."""
    parent = pathlib.Path(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise FileNotFoundError(f"{path}: its folder does not exist or cannot be written")
    if pathlib.Path(path).is_dir():
        raise IsADirectoryError(f"{path}: is a folder")
    if pathlib.Path(path).exists() and not pathlib.Path(path).is_file():
        raise ValueError(f"{path}: expected a file or a new name, got a device or pipe, which must not be replaced")


@contextlib.contextmanager
def whole_file(path, mode: str = "wb"):
    """A file that takes its name only if the block ends well; otherwise nothing is left of it. A link stays one: the file
    that it leads to is replaced."""
    writable(path)
    path = pathlib.Path(os.path.realpath(path))
    writable(path)
    f = tempfile.NamedTemporaryFile(mode, prefix=f".{path.name}.", dir=path.parent, delete=False)
    try:
        with f:
            yield f
        os.chmod(f.name, 0o644)
        os.replace(f.name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f.name)
        raise


@contextlib.contextmanager
def _sink(path):
    if path is None:
        yield sys.stdout
    else:
        with whole_file(path, "w") as f:
            yield f
