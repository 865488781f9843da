"""Sampling: parameters, the target distribution, and random numbers that belong to a request, not to a batch row.

Order (spec/serving.md, "Sampling"): logit bias, banned ids, temperature, min-p, top-k, top-p, softmax. A random number is
a pure function of (request seed, absolute position, purpose).
"""

import dataclasses
import functools
import math
import numbers
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.json_files import read_json_object
from pallas_kernels.row_tiles import in_row_tiles

DRAFT, ACCEPT, TARGET = 0, 1, 2  # purposes of a random number; TARGET serves first tokens, residuals and bonuses
_F32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    temperature 0 or top_k 1 = greedy; top_k 0, top_p 1 and min_p 0 = off. logit_bias: ((token, value), ...); -inf bans a
    token. stop_ids end the output, as eos does unless ignore_eos. min_tokens: eos and stop ids stay banned until that many
    tokens are out. forced: accept every draft (benchmarks only).
    Raises ValueError (field, expected, got).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    forced: bool = False

    def __post_init__(self):
        for names, kind, rule in (
            (("temperature", "top_p", "min_p"), numbers.Real, "a number"),
            (("top_k", "seed", "min_tokens"), numbers.Integral, "an integer"),
        ):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, kind):
                    raise ValueError(f"sampling: {name} expected {rule}, got {value!r}")
        whole = lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool)
        if not isinstance(self.stop_ids, tuple | list) or not all(map(whole, self.stop_ids)):
            raise ValueError(f"sampling: stop_ids expected a tuple of integers, got {self.stop_ids!r}")
        pair = lambda x: isinstance(x, tuple | list) and len(x) == 2 and whole(x[0]) and isinstance(x[1], numbers.Real)
        if not isinstance(self.logit_bias, tuple | list) or not all(map(pair, self.logit_bias)):
            raise ValueError(f"sampling: logit_bias expected a tuple of (id, value), got {self.logit_bias!r}")
        for name in ("ignore_eos", "forced"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"sampling: {name} expected True or False, got {getattr(self, name)!r}")
        checks = (
            ("temperature", 0 <= self.temperature <= _F32_MAX, "a finite float32 >= 0"),
            ("top_k", 0 <= self.top_k < 2**31, "in [0, 2^31)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", 0 <= self.seed < 2**32, "in [0, 2^32)"),
            ("min_tokens", 0 <= self.min_tokens < 2**30, "in [0, 2^30)"),
            ("logit_bias", all(v < math.inf for _, v in self.logit_bias), "values that are not NaN or +inf"),
        )
        for name, ok, rule in checks:
            if not ok:
                raise ValueError(f"sampling: {name} expected {rule}, got {getattr(self, name)!r}")

    @classmethod
    def from_folder(cls, folder, **overrides) -> "SamplingParams":
        """Defaults from the checkpoint's generation_config.json where there is one, `overrides` that are not None on top.
        Raises ValueError (file, field, expected, got) for a file that is no JSON object or a default that is in use and
        out of range."""
        path = pathlib.Path(folder) / "generation_config.json"
        raw = read_json_object(path) if path.exists() else {}
        values = {k: raw[k] for k in ("temperature", "top_k", "top_p", "min_p") if raw.get(k) is not None}
        if raw.get("do_sample") is False:
            values["temperature"] = 0.0
        overrides = {k: v for k, v in overrides.items() if v is not None}
        values = {k: v for k, v in values.items() if k not in overrides}
        try:
            cls(**values)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None
        return cls(**values, **overrides)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """One row per request of the batch: temperature, top_p, min_p f32[B]; top_k i32[B]; seed u32[B]; forced bool[B];
    banned_before i32[B]: positions below it may not be an end id; end_ids i32[B, E], bias_ids i32[B, N] (-1 = none);
    bias f32[B, N].

    draws: static; False if no row is stochastic. A step is compiled once for each value: a greedy batch then carries no
    sampling code at all, where a branch on the device would make the dispatching host wait for the condition.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    forced: jax.Array
    banned_before: jax.Array
    end_ids: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    draws: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def stochastic(self):
        """bool[B]: rows that draw; the others take the largest logit."""
        return (self.temperature > 0) & (self.top_k != 1)


def pack_sampling(
    requests: Sequence[SamplingParams | None],
    prompt_lengths: Sequence[int],
    eos: int,
    end_width: int = 4,
    bias_width: int = 0,
) -> SamplingBatch:
    """Host numpy arrays for a batch; None rows (padding) are greedy. Widths are minimal table widths: constant ones keep
    one executable. Raises ValueError if a request needs wider tables."""
    n = len(requests)
    rows = [r or SamplingParams() for r in requests]
    ends = [() if r.ignore_eos and not r.stop_ids else (*(() if r.ignore_eos else (eos,)), *r.stop_ids) for r in rows]
    end_ids, bias_ids = np.full((n, end_width), -1, np.int32), np.full((n, bias_width), -1, np.int32)
    bias = np.zeros((n, bias_width), np.float32)
    for i, (r, e) in enumerate(zip(rows, ends, strict=True)):
        if len(e) > end_width or len(r.logit_bias) > bias_width:
            raise ValueError(f"sampling: row {i} expected <= {end_width} end ids and <= {bias_width} biases, "
                             f"got {len(e)} and {len(r.logit_bias)}")  # fmt: skip
        end_ids[i, : len(e)] = e
        for j, (token, value) in enumerate(r.logit_bias):
            bias_ids[i, j], bias[i, j] = token, value
    return SamplingBatch(
        temperature=np.array([r.temperature for r in rows], np.float32),
        top_k=np.array([r.top_k for r in rows], np.int32),
        top_p=np.array([r.top_p for r in rows], np.float32),
        min_p=np.array([r.min_p for r in rows], np.float32),
        seed=np.array([r.seed for r in rows], np.uint32),
        forced=np.array([r.forced for r in rows], bool),
        banned_before=np.array([p + r.min_tokens for r, p in zip(rows, prompt_lengths, strict=True)], np.int32),
        end_ids=end_ids,
        bias_ids=bias_ids,
        bias=bias,
        draws=not all(r.greedy for r in rows),
    )


def _key(seed, position, purpose: int):
    key = jax.random.key(seed)
    return jax.random.fold_in(jax.random.fold_in(key, position), purpose)


def uniforms(
    seed,  # u32[B]
    positions,  # i32[B, S]
    purpose: int,
):
    """f32[B, S] in (0, 1): one draw per (seed, position, purpose)."""
    draw = lambda s, p: jax.random.uniform(_key(s, p, purpose), (), jnp.float32, 2.0**-24, 1.0)
    return jax.vmap(lambda s, ps: jax.vmap(lambda p: draw(s, p))(ps))(seed, positions)


def categorical(
    log_weights,  # f32[B, V], unnormalised; -inf = never
    seed,  # u32[B]
    positions,  # i32[B]
    purpose: int,
):
    """i32[B]: a draw proportional to exp(log_weights), by the Gumbel maximum."""
    v = log_weights.shape[-1]
    noise = jax.vmap(lambda s, p: jax.random.gumbel(_key(s, p, purpose), (v,)))(seed, positions)
    return jnp.argmax(log_weights + noise, -1).astype(jnp.int32)


def adjust_logits(
    logits,  # f32[B, S, V]
    positions,  # i32[B, S] position each row predicts
    batch: SamplingBatch,
):
    """f32[B, S, V]: logit bias added, end ids banned below `banned_before`. Applies to greedy rows too."""
    v = logits.shape[-1]
    row = jnp.arange(logits.shape[0])[:, None]
    if batch.bias_ids.shape[1]:
        at = jnp.where(batch.bias_ids < 0, v, batch.bias_ids)
        dense = jnp.zeros((logits.shape[0], v), jnp.float32).at[row, at].add(batch.bias, mode="drop")
        logits = logits + dense[:, None]
    # compared, not scattered: XLA makes the comparisons where the logits are read, and writes no mask of the vocabulary
    ids = jnp.arange(v, dtype=jnp.int32)
    ends = functools.reduce(jnp.logical_or, (ids == end for end in batch.end_ids.T[..., None]), jnp.zeros((1, v), bool))
    banned = ends[:, None] & (positions < batch.banned_before[:, None])[..., None]
    return jnp.where(banned, -jnp.inf, logits)


def target_log_probs(
    logits,  # f32[B, S, V] from adjust_logits
    batch: SamplingBatch,
):
    """f32[B, S, V]: log of the target distribution of stochastic rows: /temperature, min-p, top-k, top-p, normalised."""
    b, s, v = logits.shape
    temperature = jnp.where(batch.stochastic, batch.temperature, 1.0)
    per_row = [jnp.repeat(x, s)[:, None] for x in (temperature, batch.min_p, batch.top_k, batch.top_p)]
    return in_row_tiles(_log_probs, logits.reshape(b * s, v), *per_row).reshape(b, s, v)


def _log_probs(
    logits,  # f32[R, V]
    temperature,  # f32[R, 1] > 0
    min_p,  # f32[R, 1]
    top_k,  # i32[R, 1]
    top_p,  # f32[R, 1]
):
    # the largest becomes 0, so that no temperature makes two of them infinite
    x = (logits - jnp.max(logits, -1, keepdims=True)) / temperature
    x = jnp.where(x >= jnp.log(min_p), x, -jnp.inf)
    # stable: among equals the lowest id ranks first
    order = jnp.argsort(-x, -1, stable=True)
    ranked = jnp.take_along_axis(x, order, -1)
    rank = jnp.arange(x.shape[-1])
    k = jnp.where(top_k > 0, top_k, x.shape[-1])
    ranked = jnp.where(rank < k, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, -1)
    before = jnp.cumsum(probs, -1) - probs
    keep = (before < top_p) | (rank == 0)
    keep = jnp.take_along_axis(keep & (rank < k), jnp.argsort(order, -1), -1)
    return jax.nn.log_softmax(jnp.where(keep, x, -jnp.inf), -1)
