"""A request and its life: new, waiting, prefill, decode, finished; preempted ones wait again.

The engine alone moves a request on. Others read it, iterate over its tokens, and may cancel it from any thread.
"""

import enum
import numbers
import operator
import reprlib
import time
from collections.abc import Callable, Iterator, Sequence

from dsv41_jax.config import ModelConfig
from dsv41_jax.generate import stop_ids
from dsv41_jax.sampling import SamplingParams
from dsv41_jax.tokenizer import StreamDecoder, check_prompt

FINISH_REASONS = ("stop", "length", "context", "cancelled", "error")


class Status(enum.Enum):
    """Where a request is: handed in, in the queue, with prompt chunks to run, producing tokens, or over."""

    NEW = "new"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Request:
    """One prompt on its way through an engine; made by `Engine.submit`.

    token_ids: the output so far, an ending id included. text: its text without an ending id, cut before a stop string; kept
    only for requests with stop strings. finish_reason: None while it runs, then "stop" (eos, a stop id or a stop string), "length", "context"
    (no position left), "cancelled" or "error" (see `error`). drafted, accepted: drafts verified and accepted.
    cached_tokens: prompt tokens that the prefix cache spared, when it was last admitted. preemptions: times it was
    recomputed. Times are seconds of time.perf_counter().

    Iterate over it for its token ids as they come; the iteration raises `error` at its end if there is one.
    """

    def __init__(self, engine, number: int, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int,
                 stop_strings: Sequence[str] = (), on_token: Callable | None = None, on_finish: Callable | None = None):  # fmt: skip
        self.id, self.prompt, self.sampling = number, prompt, sampling
        self.max_new_tokens, self.stop_strings = max_new_tokens, stop_strings
        self.on_token, self.on_finish = on_token, on_finish
        self.status = Status.NEW
        self.token_ids: list[int] = []
        self.text: str | None = None
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.drafted = self.accepted = self.preemptions = self.cached_tokens = 0
        self.submitted_at = time.perf_counter()
        self.first_token_at = self.last_token_at = self.finished_at = None
        self.seat = None  # the engine's: where it sits while it is not waiting
        self.cancelled = False
        self._engine = engine
        self._ends: set[int] = set()
        self._decoder: StreamDecoder | None = None

    def cancel(self) -> None:
        """End the request at the engine's next step; tokens that it has stay. May be called from any thread, repeatedly,
        and after the end."""
        self.cancelled = True
        self._engine._loop.any_cancelled = True

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def result(self) -> list[int]:
        """All token ids, once the request has ended. Raises its error. Where nobody runs the engine, this does."""
        return list(self)

    def __iter__(self) -> Iterator[int]:
        sent = 0
        while True:
            # read before the tokens: tokens arrive first
            over = self.finished
            while sent < len(self.token_ids):
                yield self.token_ids[sent]
                sent += 1
            if over:
                break
            self._engine._advance(self, sent)
        if self.error is not None:
            raise self.error

    # the engine's side --------------------------------------------------------------------------------------------------

    def check(self, c: ModelConfig, max_context: int, end_ids: int, biases: int, tokenizer) -> None:
        """Raises ValueError for whatever this request asks that cannot be served."""
        try:
            self.prompt = [operator.index(t) for t in self.prompt]
        except TypeError:
            raise ValueError(f"request: prompt expected token ids (integers), got {reprlib.repr(self.prompt)}") from None
        check_prompt(self.prompt, c)
        length = len(self.prompt)
        _expect(length < max_context, "prompt", f"fewer tokens than the context of {max_context}", length)
        _expect(isinstance(self.sampling, SamplingParams), "sampling", "a SamplingParams", type(self.sampling).__name__)
        n = self.max_new_tokens
        _expect(isinstance(n, numbers.Integral) and not isinstance(n, bool) and n >= 1, "max_new_tokens", "an integer >= 1", n)
        self.max_new_tokens = int(n)
        self._ends = stop_ids(self.sampling, c)
        _expect(len(self._ends) <= end_ids, "stop_ids", f"at most {end_ids} end ids, eos included", len(self._ends))
        _expect(len(self.sampling.logit_bias) <= biases, "logit_bias", f"at most {biases}", len(self.sampling.logit_bias))
        for name, ids in (("stop_ids", self.sampling.stop_ids), ("logit_bias", [t for t, _ in self.sampling.logit_bias])):
            bad = [t for t in ids if not 0 <= t < c.vocab_size]
            _expect(not bad, name, f"ids 0..{c.vocab_size - 1}", bad)
        strings = self.stop_strings  # a lone string would be taken for its characters
        _expect(isinstance(strings, Sequence) and not isinstance(strings, str), "stop_strings", "a list of strings", strings)
        self.stop_strings = tuple(strings)
        if self.stop_strings:
            _expect(all(isinstance(s, str) and s for s in self.stop_strings), "stop_strings", "strings that are not empty",
                    list(self.stop_strings))  # fmt: skip
            _expect(tokenizer is not None, "stop_strings", "an engine with a tokenizer", "none")
            self._decoder, self.text = tokenizer.stream(), ""

    def ids_to_run(self) -> list[int]:
        """What must be in the caches before the next token can be drafted: all but the newest token of the output."""
        return self.prompt + self.token_ids[:-1]

    def take(self, tokens: Sequence[int], max_context: int) -> list[int]:
        """Append new tokens up to the first reason to end, which becomes `finish_reason`. Returns those appended."""
        new = []
        for token in tokens:
            self.token_ids.append(token)
            new.append(token)
            count = len(self.token_ids)
            if token in self._ends or (self._decoder and self._stopped_by_text(token, count)):
                self.finish_reason = "stop"
            elif count >= self.max_new_tokens:
                self.finish_reason = "length"
            elif len(self.prompt) + count >= max_context:
                self.finish_reason = "context"
            if self.finish_reason:
                break
        return new

    def _stopped_by_text(self, token: int, count: int) -> bool:
        seen = len(self.text)
        self.text += self._decoder.push([token])
        if count <= self.sampling.min_tokens:
            return False
        # a match may begin in what was there before, one character short of a whole stop string
        hits = [(at, s) for s in self.stop_strings if (at := self.text.find(s, max(0, seen - len(s) + 1))) >= 0]
        if hits:
            self.text, self._decoder = self.text[: min(hits)[0]], None
        return bool(hits)

    def close(self) -> None:
        """The last thing that happens to it."""
        if self._decoder:
            self.text += self._decoder.finish()
        self.finished_at = time.perf_counter()
        self.status = Status.FINISHED


def _expect(ok, field: str, expected, got) -> None:
    if not ok:
        raise ValueError(f"request: {field} expected {expected}, got {got}")
