"""Prompts in, tokens out: the plain loop around the jitted steps, and what a serving engine is compared with.

Prompts run in groups of one batch: every group is prefilled in chunks, then decoded until its last request has ended.
A request's tokens do not depend on its group: rows are independent and random numbers belong to (seed, position). On a
CPU that holds bit for bit in every precision, for any chunk and any number of drafts, so greedy output with drafts is the
output without (pallas_kernels/row_tiles.py). On a GPU a step of other rows may sum in another order: where that flips a
bf16 or FP8 rounding, `released` texts may part.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import CacheGeometry, PageTables, init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.model import Network
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Transformer
from dsv41_jax.plan import Chunk
from dsv41_jax.precision import precision as by_name
from dsv41_jax.sampling import SamplingBatch, SamplingParams, pack_sampling
from dsv41_jax.step import DecodeBatch, PrefillBatch, Steps
from dsv41_jax.tokenizer import check_prompt

GROUP = 8  # prompts decoded together
CHUNK = 64  # default prompt tokens of one request in a prefill step
PAGE_TOKENS = 128
END_IDS = 4


@dataclasses.dataclass
class GenerationResult:
    """token_ids: the output, an ending id included. finish_reason: "stop" (eos or a stop id), "length" (max_new_tokens),
    "context" (no position left) or "error" (a logit that decided a token was not finite). drafted, accepted: drafts
    verified and accepted."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0


def stop_ids(sampling: SamplingParams, c: ModelConfig) -> set[int]:
    """Ids that end a request's output."""
    return set(sampling.stop_ids) | (set() if sampling.ignore_eos else {c.eos_token_id})


def generate(
    params: Transformer,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    gamma: int | None = None,
    precision: str = "released",
    options: DecodeOptions | None = None,
    chunk: int | None = None,
    max_context: int | None = None,
    on_token: Callable[[int, list[int]], None] | None = None,
) -> list[GenerationResult]:
    """Continue every prompt.

    gamma: drafts verified per step; None = the block size, 0 = plain decoding. chunk: prompt tokens per prefill step.
    max_context: positions reserved per request (default: what the prompts need). on_token(request, ids) is called with
    every request's new ids as they are known.
    Raises ValueError (where, expected, got) before anything runs.
    """
    per_request = _check(config, prompts, max_new_tokens, sampling, chunk, max_context)
    need = max(len(p) for p in prompts) + max_new_tokens
    context = max_context or min(need, config.max_position_embeddings)
    size = min(GROUP, len(prompts))
    rows = min(chunk or CHUNK, max(len(p) for p in prompts))
    geometry = CacheGeometry(
        slots=size,
        # a verify chunk may reach past the last position it keeps
        pages=1 + size * -(-(context + config.dspark_block_size + 1) // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        span=max(rows, config.dspark_block_size + 1),
    )
    net = Network(config, geometry, by_name(precision), options or DecodeOptions())
    steps = Steps(net, params, gamma)
    results = [GenerationResult() for _ in prompts]
    # at least END_IDS columns, so that a stop id more or less compiles nothing again
    widths = max(END_IDS, *(len(s.stop_ids) + 1 for s in per_request)), max(len(s.logit_bias) for s in per_request)
    for first in range(0, len(prompts), size):
        group = range(first, min(first + size, len(prompts)))
        _Group(steps, prompts, per_request, results, group, max_new_tokens, context, widths, on_token).run(rows)
    return results


def _check(c: ModelConfig, prompts, max_new_tokens, sampling, chunk, max_context) -> list[SamplingParams]:
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected >= 1, got {max_new_tokens}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected >= 1, got {chunk}")
    limit = c.max_position_embeddings
    if max_context is not None and not 1 <= max_context <= limit:
        raise ValueError(f"max_context: expected 1..{limit}, got {max_context}")
    for i, p in enumerate(prompts):
        check_prompt(p, c, f"prompt {i}")
        if len(p) >= (max_context or limit):
            raise ValueError(f"prompt {i}: expected fewer tokens than the context of {max_context or limit}, got {len(p)}")
    if isinstance(sampling, SamplingParams):
        return [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise ValueError(f"sampling: expected one per prompt ({len(prompts)}), got {len(sampling)}")
    return list(sampling)


class _Group:
    """One batch of requests from prefill to the end of its last request; slot = row."""

    def __init__(self, steps, prompts, sampling, results, group, max_new_tokens, context, widths, on_token):
        self.steps, self.results, self.on_token = steps, results, on_token
        self.max_new_tokens, self.context = max_new_tokens, context
        net = steps.net
        self.size = net.geometry.slots
        self.requests = [*group, *[None] * (self.size - len(group))]
        self.prompts = [list(prompts[r]) if r is not None else [] for r in self.requests]
        chosen = [sampling[r] if r is not None else None for r in self.requests]
        self.ends = [stop_ids(s, net.config) if s else set() for s in chosen]
        self.sampling: SamplingBatch = pack_sampling(
            chosen, [len(p) for p in self.prompts], net.config.eos_token_id, *widths
        )
        columns = (net.geometry.pages - 1) // self.size
        table = 1 + np.arange(self.size * columns, dtype=np.int32).reshape(self.size, columns)
        self.tables = PageTables.shared(jnp.asarray(table), net.config)
        self.live = np.array([r is not None for r in self.requests])

    def run(self, rows: int) -> None:
        net = self.steps.net
        state = self._prefill(init_state(net.config, net.geometry, net.precision), rows)
        while self.live.any():
            slots = np.where(self.live, np.arange(self.size), -1).astype(np.int32)
            state, out = self.steps.decode(state, DecodeBatch(jnp.asarray(slots), self.tables, self.sampling))
            self._take(out, self.steps.gamma)

    def _prefill(self, state, rows: int):
        longest = max(len(p) for p in self.prompts)
        for start in range(0, longest, rows):
            tokens = np.zeros((self.size, rows), np.int32)
            count = np.zeros(self.size, np.int32)
            for i, p in enumerate(self.prompts):
                piece = p[start : start + rows]
                tokens[i, : len(piece)], count[i] = piece, len(piece)
            last = np.array([0 < len(p) <= start + rows and n > 0 for p, n in zip(self.prompts, count, strict=True)])
            slots = np.where(count > 0, np.arange(self.size), -1).astype(np.int32)
            chunk = Chunk(jnp.asarray(tokens), jnp.full(self.size, start, jnp.int32), jnp.asarray(count),
                          jnp.asarray(slots), self.tables)  # fmt: skip
            unknown = jnp.full(self.size, -1, jnp.int32)
            state, out = self.steps.prefill(state, PrefillBatch(chunk, self.sampling, jnp.asarray(last), unknown))
            self._take(out, 0)
        return state

    def _take(self, out, drafted: int) -> None:
        """Walk each request's new tokens in order and cut at the first reason to end."""
        tokens, counts, accepted, finite = (np.asarray(x) for x in (out.tokens, out.count, out.accepted, out.finite))
        for row, request in enumerate(self.requests):
            if request is None or not self.live[row] or counts[row] == 0:
                continue
            result = self.results[request]
            result.drafted += drafted
            result.accepted += int(accepted[row])
            new = self._cut(row, result, tokens[row, : counts[row]], bool(finite[row]))
            self.live[row] = result.finish_reason is None
            if new and self.on_token:
                self.on_token(request, new)

    def _cut(self, row: int, result: GenerationResult, tokens, finite: bool) -> list[int]:
        if not finite:
            result.finish_reason = "error"
            return []
        new = []
        for token in map(int, tokens):
            result.token_ids.append(token)
            new.append(token)
            if token in self.ends[row]:
                result.finish_reason = "stop"
            elif len(result.token_ids) >= self.max_new_tokens:
                result.finish_reason = "length"
            elif len(self.prompts[row]) + len(result.token_ids) >= self.context:
                result.finish_reason = "context"
            if result.finish_reason:
                break
        return new
