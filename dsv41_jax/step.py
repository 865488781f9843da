"""The jitted steps: prefill one chunk, or propose + verify + accept + commit + sample in one function.

Pure: `(params, state, batch) -> (state, output)`, state donated. Everything the next step needs stays on the device, so a
serving loop may dispatch step n+1 before it has read the tokens of step n.

On a CPU a request's tokens and caches have the same bits for any batch, chunk and gamma, in every precision; on a GPU up to
the order of sums (generate.py).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv41_jax import checks, dspark, model, speculative
from dsv41_jax.cache import PageTables, State
from dsv41_jax.model import Network
from dsv41_jax.params import Transformer
from dsv41_jax.plan import Chunk
from dsv41_jax.sampling import SamplingBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """slots i32[B] cache slot per request, < 0 = padding; tables; sampling."""

    slots: jax.Array
    tables: PageTables
    sampling: SamplingBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """chunk; sampling; last bool[B]: the chunk ends the prompt, so a token follows; next_token i32[B]: that token if it is
    already known (a recomputed request), < 0 = sample it."""

    chunk: Chunk
    sampling: SamplingBatch
    last: jax.Array
    next_token: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """tokens i32[B, G+1], count i32[B] tokens that are real (0 for padding rows); accepted i32[B] drafts accepted;
    finite bool[B]: no logit that decided a token was NaN or infinite; confidence f32[B, G] raw."""

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    finite: jax.Array
    confidence: jax.Array


def _registers(state: State, slots, **values) -> State:
    """State with per-request registers written; padding rows write nothing."""
    size = state.length.shape[0]
    at = jnp.where((slots < 0) | (slots >= size), size, slots)
    return dataclasses.replace(state, **{k: getattr(state, k).at[at].set(v, mode="drop") for k, v in values.items()})


def _history(before, tokens, count):
    """i32[B, n]: the n ids before the new anchor: `before` ++ tokens[:count], its last n."""
    n = before.shape[1]
    joined = jnp.concatenate([before, tokens], 1)
    return jnp.take_along_axis(joined, count[:, None] + jnp.arange(n), 1)


def mtp_step(params: Transformer, state: State, batch: DecodeBatch, net: Network, gamma: int):
    """One decode step: draft `gamma` tokens (0 = plain decoding), verify them, accept, commit, sample.

    Returns (State, StepOutput). A padding row leaves the state as it is and outputs zeros.
    """
    held = state.length.shape[0]
    slots = jnp.where((batch.slots >= 0) & (batch.slots < held), batch.slots, -1)
    live = slots >= 0
    position = jnp.where(live, state.length[jnp.maximum(slots, 0)], 0)
    anchor = jnp.where(live, state.anchor[jnp.maximum(slots, 0)], 0)
    proposal = choose = None
    tokens = anchor[:, None]
    if gamma:
        choose = speculative.draft_choice(position + 1, batch.sampling)
        state, proposal = dspark.propose(params, state, anchor, position, slots, net, choose)
        tokens = jnp.concatenate([tokens, proposal.tokens[:, :gamma]], 1)
    chunk = Chunk(tokens, position, jnp.where(live, gamma + 1, 0), slots, batch.tables)
    before = model.request_history(state, slots, position)
    state, features = model.forward(params, state, chunk, net)
    logits = model.head(params, features.hidden).reshape(slots.shape[0], gamma + 1, -1)
    with jax.named_scope("verify"):
        verdict = speculative.verify(
            logits, tokens[:, 1:], proposal.logits[:, :gamma] if choose else None, position + 1, batch.sampling
        )
    count = verdict.accepted + 1
    state = _commit_features(params, state, features, chunk, count, net)
    following = jnp.take_along_axis(verdict.tokens, verdict.accepted[:, None], 1)[:, 0]
    state = _registers(state, slots, length=position + count, anchor=following, history=_history(before, tokens, count))
    zero = lambda x: jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
    confidence = proposal.confidence[:, :gamma] if gamma else jnp.zeros((slots.shape[0], 0), jnp.float32)
    return state, StepOutput(zero(verdict.tokens), zero(count), zero(verdict.accepted), verdict.finite | ~live,
                             zero(confidence))  # fmt: skip


def prefill_step(params: Transformer, state: State, batch: PrefillBatch, net: Network):
    """Run one prompt chunk: caches, draft features, registers; sample the first token where the chunk is the last.

    A chunk with start 0 begins a fresh request in its slot, whatever the slot held. Returns (State, StepOutput with G = 0).
    """
    chunk = batch.chunk
    held = state.length.shape[0]
    slots = jnp.where((chunk.slots >= 0) & (chunk.slots < held), chunk.slots, -1)
    live = (slots >= 0) & (chunk.count > 0)
    slots = jnp.where(live, slots, -1)
    chunk = dataclasses.replace(chunk, slots=slots)
    before = model.request_history(state, slots, chunk.start)
    first = jnp.where(chunk.start == 0, 0, state.draft_from[jnp.maximum(slots, 0)])
    state = _registers(state, slots, draft_from=first)
    state, features = model.forward(params, state, chunk, net)
    state = _commit_features(params, state, features, chunk, chunk.count, net)
    b, s = chunk.tokens.shape
    newest = jnp.maximum(chunk.count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(features.hidden.reshape(b, s, -1), newest, 1)[:, 0]
    end = chunk.start + chunk.count
    verdict = speculative.verify(model.head(params, hidden)[:, None], jnp.zeros((b, 0), jnp.int32), None, end,
                                 batch.sampling)  # fmt: skip
    token = jnp.where(batch.next_token >= 0, batch.next_token, verdict.tokens[:, 0])
    state = _registers(state, slots, length=end, anchor=token, history=_history(before, chunk.tokens, chunk.count))
    out = live & batch.last
    return state, StepOutput(
        tokens=jnp.where(out, token, 0)[:, None],
        count=out.astype(jnp.int32),
        accepted=jnp.zeros((b,), jnp.int32),
        finite=verdict.finite | ~out,
        confidence=jnp.zeros((b, 0), jnp.float32),
    )


def _commit_features(params, state: State, features, chunk: Chunk, count, net: Network) -> State:
    """Draft windows get the target features of the first `count` rows of the chunk, of long chunks only those that the
    ring can hold."""
    if not net.config.has_draft:
        return state
    s = chunk.tokens.shape[1]
    offset = jnp.arange(s, dtype=jnp.int32)
    kept = (offset < count[:, None]) & (chunk.slots >= 0)[:, None]
    rows = jnp.where(kept, chunk.slots[:, None], -1).reshape(-1)
    positions = (chunk.start[:, None] + offset).reshape(-1)
    return dspark.commit(params, state, features.target, rows, positions, net)


@functools.lru_cache(maxsize=64)
def compiled(step, treedef, **static):
    """`step` jitted over flat parameter leaves. Networks are compared by value, so another `Steps` of an equal network
    compiles nothing again."""

    def bound(leaves, state, *args):
        return step(jax.tree.unflatten(treedef, leaves), state, *args, **static)

    return jax.jit(bound, donate_argnums=1)


class Steps:
    """The compiled steps of one network, bound to one set of parameters.

    Flattening a Flax module of a thousand parameters in python costs milliseconds a call, so the leaves are kept flat.
    Raises ValueError for a gamma outside 0..block size, or a network without a drafter and gamma > 0.
    """

    def __init__(self, net: Network, params: Transformer, gamma: int | None = None):
        c = net.config
        most = c.dspark_block_size if c.has_draft else 0
        self.gamma = most if gamma is None else gamma
        if not 0 <= self.gamma <= most:
            raise ValueError(f"gamma: expected 0..{most} (the draft block), got {gamma}")
        if self.gamma + 1 > net.geometry.span:
            raise ValueError(f"gamma: expected gamma + 1 <= span = {net.geometry.span} rows a step, got {gamma}")
        self.net = net
        self._leaves, self._treedef = jax.tree.flatten(params)
        self._engram = params.engram_place
        self._mtp = compiled(mtp_step, self._treedef, net=net, gamma=self.gamma)
        self._prefill = compiled(prefill_step, self._treedef, net=net)
        self._forward = compiled(_forward_logits, self._treedef, net=net, dump=False)
        self._forward_dump = compiled(_forward_logits, self._treedef, net=net, dump=True)

    @property
    def leaves(self) -> list[jax.Array]:
        """The parameters as `lower_decode`'s executable takes them."""
        return self._leaves

    def reload(self, params: Transformer) -> None:
        """Replace the parameters; shapes and dtypes must match, so nothing is compiled again. Raises ValueError."""
        if params.engram_place != self._engram:
            raise ValueError(f"reload: expected engram tables on the {self._engram}, got them on the {params.engram_place}")
        leaves, treedef = jax.tree.flatten(params)
        same = treedef == self._treedef and all(a.shape == b.shape and a.dtype == b.dtype
                                                for a, b in zip(leaves, self._leaves, strict=True))  # fmt: skip
        if not same:
            raise ValueError("reload: expected parameters of the same structure, shapes and dtypes")
        self._leaves = leaves

    def decode(self, state: State, batch: DecodeBatch) -> tuple[State, StepOutput]:
        """`mtp_step`, compiled; `state` is donated. Raises ValueError for shapes that do not fit, before anything runs."""
        self._check_decode(batch)
        return self._mtp(self._leaves, state, batch)

    def lower_decode(self, state: State, batch: DecodeBatch):
        """The `jax.stages.Lowered` decode step of these shapes: for its HLO, memory and compile time."""
        return self._mtp.lower(self._leaves, state, batch)

    def prefill(self, state: State, batch: PrefillBatch) -> tuple[State, StepOutput]:
        """`prefill_step`, compiled; `state` is donated. Raises ValueError for shapes that do not fit, before anything runs."""
        checks.check_chunk(batch.chunk, self.net.config, self.net.geometry)
        rows = batch.chunk.tokens.shape[0]
        checks.check_sampling(batch.sampling, rows)
        checks.check_array(batch.last, "last", (rows,), bool)
        checks.check_array(batch.next_token, "next_token", (rows,), jnp.int32)
        return self._prefill(self._leaves, state, batch)

    def forward(self, state: State, chunk: Chunk, dump: bool = False):
        """Teacher-forced chunk: (State, logits f32[B, S, V], Features), registers advanced; `state` is donated. Raises
        ValueError for shapes that do not fit, before anything runs."""
        checks.check_chunk(chunk, self.net.config, self.net.geometry)
        return (self._forward_dump if dump else self._forward)(self._leaves, state, chunk)

    def _check_decode(self, batch: DecodeBatch) -> None:
        rows = batch.slots.shape[0] if getattr(batch.slots, "ndim", None) == 1 else 0
        checks.check_array(batch.slots, "slots", (rows,), jnp.int32)
        checks.check_tables(batch.tables, self.net.config, self.net.geometry, rows)
        checks.check_sampling(batch.sampling, rows)


def _forward_logits(params, state, chunk: Chunk, net: Network, dump: bool):
    before = model.request_history(state, chunk.slots, chunk.start)
    state, features = model.forward(params, state, chunk, net, dump)
    logits = model.head(params, features.hidden).reshape(*chunk.tokens.shape, -1)
    state = _registers(state, chunk.slots, length=chunk.start + chunk.count,
                       history=_history(before, chunk.tokens, chunk.count))  # fmt: skip
    return state, logits, features
