"""Synthetic long-context retrieval prompts: facts scattered through filler, one asked for at the end.

Everything follows from a seed. Four kinds:

* needle: one fact, somewhere in the filler;
* one of many: eight facts about eight things, one asked for;
* latest: the same thing gets a value four times, the last one counts;
* verbatim: a sentence of the filler is begun again, to be continued as it stood.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable

import numpy as np

from dsv41_jax.cli_run import prompt_ids, prompt_lines
from dsv41_jax.config import ModelConfig
from dsv41_jax.json_files import parse_json
from dsv41_jax.tokenizer import Tokenizer, check_prompt, reserved_ids

KINDS = ("needle", "one of many", "latest", "verbatim")
_NOUNS, _ADJECTIVES, _VERBS, _PLACES = (line.split() for line in """\
river stone lantern garden window bridge orchard harbour valley kettle ladder mirror meadow tunnel carpet basket
old quiet narrow silver distant heavy early crooked gentle hollow bitter northern painted empty warm broken
leans rests waits turns shines sinks drifts opens settles fades gathers moves stands breaks sleeps begins
beside above behind below near beyond along against""".splitlines())


@dataclasses.dataclass(frozen=True)
class Prompt:
    """task: its kind. ids: the prompt. found(output ids): whether the output holds the answer; None where a prompt has none."""

    task: str
    ids: list[int]
    found: Callable[[list[int]], bool] | None = None


class WordIds:
    """A stand-in where there is no tokenizer: every word and mark has one id, spread over the plain vocabulary by a hash.

    Different words may share an id."""

    def __init__(self, c: ModelConfig):
        special = {c.bos_token_id, c.eos_token_id, c.pad_token_id, *reserved_ids(c)}
        if c.has_draft:
            special.add(c.dspark_noise_token_id)
        self._plain = [i for i in range(c.vocab_size) if i not in special]
        self._bos = c.bos_token_id

    def encode(self, text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text)
        return [self._bos, *(self._plain[zlib.crc32(w.encode()) % len(self._plain)] for w in words)]

    def holds(self, output: list[int], answer: str) -> bool:
        wanted = self.encode(answer)[1:]
        return any(output[i : i + len(wanted)] == wanted for i in range(len(output)))


class Text:
    """Ids and answers by the checkpoint's tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def holds(self, output: list[int], answer: str) -> bool:
        return answer in self._tokenizer.decode(output)


def _sentence(rng) -> str:
    pick = lambda words: words[rng.integers(len(words))]
    return f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} {pick(_PLACES)} the {pick(_ADJECTIVES)} {pick(_NOUNS)}."


def _facts(kind: str, rng) -> tuple[list[str], str, str]:
    """(facts in order, question, answer); `verbatim` has none."""
    nouns = [_NOUNS[i] for i in rng.permutation(len(_NOUNS))]
    value = lambda: str(rng.integers(10000, 100000))
    say = lambda noun, code: f"Remember: the code of the {noun} is {code}."
    if kind == "needle":
        pairs, asked = [(nouns[0], value())], 0
    elif kind == "one of many":
        pairs, asked = [(n, value()) for n in nouns[:8]], int(rng.integers(8))
    else:
        pairs, asked = [(nouns[0], value()) for _ in range(4)], 3
    noun, code = pairs[asked]
    return [say(*p) for p in pairs], f"Question: what is the code of the {noun}? Answer: the code of the {noun} is", code


def _text(kind: str, sentences: int, seed) -> tuple[str, str]:
    """(prompt, answer) with `sentences` of filler; the same seed gives the same facts for any number."""
    rng = np.random.default_rng(seed)
    facts, question, answer = ([], "", "") if kind == "verbatim" else _facts(kind, rng)
    places = np.sort(rng.random(len(facts)))
    chosen = rng.random()
    filler = [_sentence(rng) for _ in range(sentences)]
    if kind == "verbatim":
        words = filler[int(chosen * sentences)].split()
        question, answer = "Once more: " + " ".join(words[:4]), " ".join(words[4:])
    for fact, place in reversed(list(zip(facts, places, strict=True))):
        filler.insert(int(place * (sentences + 1)), fact)
    return " ".join([*filler, question]), answer


def prompts(encoder, count: int, context: int, seed: int = 0, kinds=KINDS) -> list[Prompt]:
    """`count` prompts of just under `context` tokens, the kinds in turn.

    encoder: WordIds or Text. Raises ValueError for unknown kinds, or a context too short for a prompt of a kind."""
    if unknown := [k for k in kinds if k not in KINDS]:
        raise ValueError(f"tasks: expected some of {list(KINDS)}, got {unknown}")
    out = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        at = lambda sentences, kind=kind, i=i: _text(kind, sentences, [seed, i])
        size = lambda sentences, at=at: len(encoder.encode(at(sentences)[0]))
        if size(1) > context:
            raise ValueError(f"context: expected at least {size(1)} tokens for a {kind!r} prompt, got {context}")
        low, high = 1, 2  # low fits
        while size(high) <= context:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(middle) <= context else (low, middle)
        text, answer = at(low)
        found = lambda output, answer=answer: encoder.holds(output, answer)
        out.append(Prompt(kind, encoder.encode(text), found))
    return out


def from_file(path, folder, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Prompts of a JSONL file: lines of `dsv41 generate`, "task" and "answer" optional. Raises ValueError, OSError."""
    out = []
    for label, line in prompt_lines(path):
        ids, raw, found = prompt_ids(label, line, folder, tokenizer, ("task", "answer")), parse_json(line), None
        for key in ("task", "answer"):
            if not isinstance(raw.get(key, ""), str):
                raise ValueError(f"{label}: {key} expected a string, got {raw[key]!r}")
        if answer := raw.get("answer"):
            if tokenizer is None:
                raise ValueError(f"{label}: an answer needs the checkpoint's tokenizer.json, there is none")
            found = lambda output, answer=answer: Text(tokenizer).holds(output, answer)
        out.append(Prompt(raw.get("task", "prompt"), ids, found))
    return out


def check_prompts(prompts: list[Prompt], config: ModelConfig, new: int) -> None:
    """Raises ValueError (prompt, expected, got) for prompts that cannot be continued by `new` tokens."""
    most = config.max_position_embeddings - new - config.dspark_block_size - 1
    for i, p in enumerate(prompts):
        try:
            check_prompt(p.ids, config)
        except ValueError as e:
            raise ValueError(f"prompt {i}: {e}") from None
        if not 2 <= len(p.ids) <= most:
            raise ValueError(f"prompt {i}: expected 2..{most} tokens, got {len(p.ids)}")
