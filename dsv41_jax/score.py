"""Teacher-forced scoring through the decode path: logits of every position, drafts of every anchor, per-layer arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import dspark
from dsv41_jax.cache import CacheGeometry, PageTables, State, init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.model import Network
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Transformer
from dsv41_jax.plan import Chunk
from dsv41_jax.precision import precision as by_name
from dsv41_jax.score_dump import Dump
from dsv41_jax.step import Steps, compiled
from dsv41_jax.tokenizer import reserved_ids


def score(
    params: Transformer,
    config: ModelConfig,
    ids,  # int[B, L]
    *,
    prefill: int = 0,
    chunk: int = 1,
    precision: str = "released",
    drafts: bool = False,
    dump: bool = False,
    options: DecodeOptions | None = None,
    page_tokens: int = 128,
    on_progress=None,
) -> dict[str, np.ndarray]:
    """Run `ids` through the caches: the first `prefill` tokens as one chunk, then `chunk` tokens a step.

    Returns logits f32[B, L, V]. With `drafts`, for every anchor position P = prefill..L-1: anchor_pos i32[B, A], draft_ids
    i32[B, A, 1+G] (anchor first), draft_logits f32[B, A, G, V], draft_confidence f32[B, A, G]. With `dump`, the per-layer
    arrays of score_dump.Dump. on_progress(done, total) is called with token positions after every chunk.
    Raises ValueError (field, expected, got) for ids, prefill, chunk or page_tokens that do not fit.
    """
    ids = _check(config, ids, prefill, chunk, drafts)
    b, length = ids.shape
    chunk = min(chunk, max(1, length - prefill))  # a step is never wider than what is left to score
    starts = ([(0, prefill)] if prefill else []) + [
        (s, min(chunk, length - s)) for s in range(prefill, length, chunk)
    ]
    geometry = CacheGeometry(
        slots=b,
        pages=1 + b * -(-length // page_tokens),
        page_tokens=page_tokens,
        span=max(prefill, chunk, config.dspark_block_size + 1),
    )
    net = Network(config, geometry, by_name(precision), options or DecodeOptions())
    steps = Steps(net, params, gamma=0)
    columns = geometry.columns(length)
    table = jnp.arange(1, 1 + b * columns, dtype=jnp.int32).reshape(b, columns)
    tables, slots = PageTables.shared(table, config), jnp.arange(b, dtype=jnp.int32)
    state = init_state(config, geometry, net.precision)
    leaves, treedef = jax.tree.flatten(params)
    arrays = Dump(config, b, length) if dump else None
    logits = np.zeros((b, length, config.vocab_size), np.float32)
    proposals = []
    for start, count in starts:
        rows = prefill if start < prefill else chunk
        tokens = np.zeros((b, rows), np.int32)
        tokens[:, :count] = ids[:, start : start + count]
        fill = lambda v: jnp.full((b,), v, jnp.int32)
        piece = Chunk(jnp.asarray(tokens), fill(start), fill(count), slots, tables)
        state, out, features = steps.forward(state, piece, dump)
        logits[:, start : start + count] = np.asarray(out)[:, :count]
        if dump:
            arrays.add(start, count, rows, features)
        if drafts:
            run = compiled(_draft_rows, treedef, net=net, propose=start >= prefill)
            state, made = run(leaves, state, features.target, piece)
            if made is not None:
                proposals.append([np.moveaxis(np.asarray(x), 0, 1)[:, :count] for x in made])
        if on_progress:
            on_progress(start + count, length)
    result = {"logits": logits}
    if drafts:
        result |= _join(proposals, ids, prefill)
    if dump:
        result |= arrays.finish(state, table)
    return result


def check_ids(ids: np.ndarray, c: ModelConfig, where: str = "ids") -> None:
    """Raises ValueError (where, expected, got) unless `ids` is a non-empty int [B, L] array of text tokens."""
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or 0 in ids.shape:
        raise ValueError(f"{where}: expected a non-empty int [B, L] array, got {ids.dtype} {list(ids.shape)}")
    reserved = reserved_ids(c)
    for bad, rule in (
        ((ids < 0) | (ids >= c.vocab_size), f"ids 0..{c.vocab_size - 1}"),
        ((ids >= reserved.start) & (ids < reserved.stop), "no reserved image id; only text is decoded"),
    ):
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{where}: expected {rule}, got {int(ids[at])} at {list(at)}")


def _check(c: ModelConfig, ids, prefill: int, chunk: int, drafts: bool) -> np.ndarray:
    ids = np.asarray(ids)
    check_ids(ids, c)
    length = ids.shape[1]
    if length > c.max_position_embeddings:
        raise ValueError(f"ids: expected at most {c.max_position_embeddings} positions, got {length}")
    if not 0 <= prefill <= length:
        raise ValueError(f"prefill: expected 0..{length}, got {prefill}")
    if chunk < 1:
        raise ValueError(f"chunk: expected >= 1, got {chunk}")
    if drafts and not c.has_draft:
        raise ValueError("drafts: expected a checkpoint with draft stages, this one has none")
    if drafts and prefill == length:
        raise ValueError(f"drafts: expected prefill < {length}, so that an anchor is left, got {prefill}")
    return ids.astype(np.int32)


def _draft_rows(params, state: State, features, chunk: Chunk, *, net: Network, propose: bool):
    """Greedy proposals for every row of a chunk: row r drafts from the features of the rows before it, then commits.

    Returns (state, None or (tokens [S, B, G], logits [S, B, G, V], confidence [S, B, G]))."""
    b, s = chunk.tokens.shape
    offset = jnp.arange(s, dtype=jnp.int32)
    slots = jnp.where(offset < chunk.count[:, None], chunk.slots[:, None], -1)
    positions = chunk.start[:, None] + offset
    if not propose:
        state = dspark.commit(params, state, features, slots.reshape(-1), positions.reshape(-1), net)
        return state, None

    def row(state, inputs):
        token, slot, position, feature = inputs
        greedy = lambda logits, i: jnp.argmax(logits, -1).astype(jnp.int32)
        state, proposal = dspark.propose(params, state, token, position, slot, net, greedy)
        state = dspark.commit(params, state, feature, slot, position, net)
        return state, (proposal.tokens, proposal.logits, proposal.confidence)

    by_row = (chunk.tokens.T, slots.T, positions.T, jnp.moveaxis(features.reshape(b, s, -1), 1, 0))
    return jax.lax.scan(row, state, by_row)


def _join(proposals, ids, prefill: int) -> dict[str, np.ndarray]:
    tokens, logits, confidence = (np.concatenate(parts, 1) for parts in zip(*proposals, strict=True))
    anchors = np.arange(prefill, ids.shape[1], dtype=np.int32)
    return {
        "anchor_pos": np.broadcast_to(anchors, (ids.shape[0], anchors.size)).copy(),
        "draft_ids": np.concatenate([ids[:, anchors, None], tokens], -1),
        "draft_logits": logits,
        "draft_confidence": confidence,
    }
