"""What an engine may hold and how it divides its steps."""

import dataclasses
import numbers
from collections.abc import Sequence

from dsv41_jax.cache import CacheGeometry
from dsv41_jax.config import ModelConfig
from pallas_kernels.codecs import cdiv


_OPTIONAL = ("max_context", "pages", "token_budget")  # None = the default


def _powers(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of an engine; with a mesh those of every rank. None = the default in brackets.

    max_requests: requests held at once. max_context: positions of a request, prompt and output together [the model's].
    pages: pages per pool, page 0 (never used) included [enough for every request at max_context].
    page_tokens: tokens per page. chunk: prompt tokens of one request in a step.
    token_budget: rows of a step; decoding takes its rows first, prefill gets the rest, at least one chunk [all decode rows
    and four chunks]. batch_buckets: padded batch sizes of a decode step [powers of two]; prefill_buckets: prompts of one
    prefill step [powers of two up to four]; context_buckets: positions that a step's page tables cover [max_context].
    prefix_bytes: budget of the prefix cache's snapshots, 0 = no prefix cache; prefix_on_host: keep them in host memory.
    greedy_steps: decode programs without sampling code for batches that only take the largest logit, beside the others.
    end_ids, biases: most end ids (eos included) and logit biases of a request.
    Raises ValueError (field, expected, got).
    """

    max_requests: int = 8
    max_context: int | None = None
    pages: int | None = None
    page_tokens: int = 128
    chunk: int = 256
    token_budget: int | None = None
    batch_buckets: Sequence[int] | None = None
    prefill_buckets: Sequence[int] | None = None
    context_buckets: Sequence[int] | None = None
    prefix_bytes: int = 256 << 20
    prefix_on_host: bool = False
    greedy_steps: bool = True
    end_ids: int = 4
    biases: int = 0

    def resolved(self, c: ModelConfig, gamma: int) -> "Limits":
        """Every None replaced, every value checked."""
        for name in ("max_requests", "max_context", "pages", "page_tokens", "chunk", "token_budget", "prefix_bytes", "end_ids",
                     "biases"):  # fmt: skip
            value = getattr(self, name)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            _expect(whole or value is None and name in _OPTIONAL, name, "an integer", repr(value))
        for name, low in (
            ("max_requests", 1),
            ("page_tokens", 2),
            ("chunk", 1),
            ("prefix_bytes", 0),
            ("end_ids", 1),
            ("biases", 0),
        ):
            _expect(getattr(self, name) >= low, name, f">= {low}", getattr(self, name))
        context = c.max_position_embeddings if self.max_context is None else self.max_context
        _expect(2 <= context <= c.max_position_embeddings, "max_context", f"2..{c.max_position_embeddings}", context)
        chunk = min(self.chunk, context)
        columns = cdiv(context, self.page_tokens)
        rows = gamma + 1
        out = dataclasses.replace(
            self,
            max_context=context,
            chunk=chunk,
            pages=1 + self.max_requests * columns if self.pages is None else self.pages,
            token_budget=self.max_requests * rows + 4 * chunk if self.token_budget is None else self.token_budget,
            batch_buckets=_buckets("batch_buckets", self.batch_buckets, _powers(self.max_requests), self.max_requests),
            prefill_buckets=_buckets("prefill_buckets", self.prefill_buckets, _powers(min(4, self.max_requests)), None),
            context_buckets=_buckets("context_buckets", self.context_buckets, (context,), context),
        )
        _expect(out.token_budget >= 1, "token_budget", ">= 1", out.token_budget)
        out.geometry(gamma)  # raises for pages and page_tokens
        return out

    def geometry(self, gamma: int) -> CacheGeometry:
        """The state's sizes."""
        return CacheGeometry(self.max_requests, self.pages, self.page_tokens, span=max(self.chunk, gamma + 1))

    def columns(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return cdiv(tokens, self.page_tokens)

    def context_columns(self) -> tuple[int, ...]:
        """Page-table columns of every context bucket."""
        return tuple(sorted({self.columns(t) for t in self.context_buckets}))


def smallest(buckets: Sequence[int], need: int) -> int:
    """The smallest bucket that holds `need`; the largest one covers every need by construction."""
    return next(b for b in buckets if b >= need)


def _buckets(name: str, given, default, largest: int | None) -> tuple[int, ...]:
    buckets = tuple(sorted(set(default if given is None else given)))
    _expect(all(isinstance(b, numbers.Integral) for b in buckets), name, "integers", list(buckets))
    _expect(buckets and buckets[0] >= 1, name, "sizes >= 1", list(buckets))
    _expect(largest is None or buckets[-1] == largest, name, f"the largest to be {largest}", list(buckets))
    return buckets


def _expect(ok, field: str, expected, got) -> None:
    if not ok:
        raise ValueError(f"engine: {field} expected {expected}, got {got}")
