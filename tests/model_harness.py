"""What the model's tests share: small random models, compiled steps that are made once, requests with their pages.

Use:

    steps = compiled("all_kinds", "float32", gamma=5)
    state = blank_state(steps)
    state, out = steps.decode(state, decode_batch(...))
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from reference.geometries import GEOMETRIES
from reference.random_weights import write_checkpoint

from dsv41_jax import checkpoint
from dsv41_jax.cache import CacheGeometry, PageTables, State, init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.model import Network
from dsv41_jax.plan import Chunk
from dsv41_jax.precision import precision as by_name
from dsv41_jax.sampling import pack_sampling
from dsv41_jax.step import DecodeBatch, PrefillBatch, Steps

GEOMETRY = CacheGeometry(slots=5, pages=48, page_tokens=16, span=13)
COLUMNS = 20  # page-table columns: contexts up to 320 tokens
NO_TOKEN = -1


@functools.cache
def folder(name: str, seed: int = 0) -> Path:
    """A random checkpoint of a geometry, removed when the tests end."""
    root = Path(tempfile.mkdtemp(prefix="dsv41_tests_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return write_checkpoint(root / name, GEOMETRIES[name], seed)


@functools.cache
def checkpoint_pair(c: ModelConfig) -> tuple[Path, Path]:
    """Two random checkpoints of one geometry in the released format, removed when the tests end."""
    root = Path(tempfile.mkdtemp(prefix="dsv41_tests_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_checkpoint(c, root / "1", seed=1), make_checkpoint(c, root / "2", seed=2)


@functools.cache
def config(name: str) -> ModelConfig:
    return ModelConfig.from_file(folder(name) / "config.json")


@functools.cache
def params(name: str, seed: int = 0):
    return checkpoint.load(folder(name, seed), config(name), progress=False)


@functools.cache
def compiled(name: str, precision: str, gamma: int = 0, geometry: CacheGeometry = GEOMETRY) -> Steps:
    """Steps over the weights of seed 0; `reload` them with care: everybody shares them."""
    return Steps(Network(config(name), geometry, by_name(precision)), params(name), gamma)


def blank_state(steps: Steps) -> State:
    return init_state(steps.net.config, steps.net.geometry, steps.net.precision)


def prompt(length: int, seed: int, vocab: int = 318) -> np.ndarray:
    """i32[length] random ids that are not end or padding ids."""
    return np.random.default_rng(seed).integers(3, vocab, length).astype(np.int32)


def page_tables(
    rows, c: ModelConfig, columns: int = COLUMNS, shuffle: int | None = None, rest: int = 0, pages: int = 48
):
    """Tables for requests that own `rows[b]` pages: i32[B, columns] per tag, ids handed out from 1 on, `rest` beyond.

    shuffle: seed of an independent permutation of the physical ids for every pool tag; None = ascending, shared.
    """
    rng = np.random.default_rng(shuffle)

    def table():
        ids = np.arange(1, pages, dtype=np.int32)
        if shuffle is not None:
            ids = rng.permutation(ids)
        out, used = np.full((len(rows), columns), rest, np.int32), 0
        for b, n in enumerate(rows):
            out[b, :n] = ids[used : used + n]
            used += n
        return jnp.asarray(out)

    ratios = sorted({layer.ratio for layer in c.layers if layer.owns_kv})
    return PageTables({r: table() for r in ratios}, {r: table() for r in ratios})


def chunk_of(tokens, starts, counts, slots, tables) -> Chunk:
    """A Chunk of host values. tokens i32[B, S]; the others [B]."""
    as_i32 = lambda x: jnp.asarray(np.asarray(x, np.int32))
    return Chunk(as_i32(tokens), as_i32(starts), as_i32(counts), as_i32(slots), tables)


def greedy_sampling(n: int, bias_width: int = 0):
    """Greedy rows that never end early."""
    return pack_sampling([None] * n, [0] * n, eos=1, bias_width=bias_width)


def prefill(steps: Steps, state: State, prompts, slots, tables, rows: int = 13, sampling=None):
    """Run prompts (None = padding row) in chunks of `rows` -> (state, i32[B] first tokens, 0 for padding rows)."""
    n = len(prompts)
    sampling = greedy_sampling(n) if sampling is None else sampling
    lengths = np.array([0 if p is None else len(p) for p in prompts])
    first = np.zeros(n, np.int32)
    for start in range(0, lengths.max(), rows):
        counts = np.clip(lengths - start, 0, rows)
        tokens = np.full((n, rows), 7, np.int32)
        for b, ids in enumerate(prompts):
            if counts[b]:
                tokens[b, : counts[b]] = ids[start : start + counts[b]]
        last = (counts > 0) & (start + rows >= lengths)
        # a request whose prompt is done sits this chunk out as a padding row
        chunk = chunk_of(tokens, np.full(n, start), counts, np.where(counts > 0, slots, -1), tables)
        batch = PrefillBatch(chunk, sampling, jnp.asarray(last), jnp.full((n,), NO_TOKEN, jnp.int32))
        state, out = steps.prefill(state, batch)
        first = np.where(last, np.asarray(out.tokens)[:, 0], first)
    return state, first


def decode_batch(slots, tables, sampling=None) -> DecodeBatch:
    slots = np.asarray(slots, np.int32)
    return DecodeBatch(jnp.asarray(slots), tables, greedy_sampling(len(slots)) if sampling is None else sampling)


def decode(steps: Steps, state: State, slots, tables, count: int, sampling=None):
    """Step until every live row has `count` tokens -> (state, [list of at least `count` tokens per row])."""
    batch = decode_batch(slots, tables, sampling)
    rows = [[] for _ in slots]
    while min(len(r) for r, s in zip(rows, slots, strict=True) if s >= 0) < count:
        state, out = steps.decode(state, batch)
        assert np.asarray(out.finite).all()
        for row, tokens, n in zip(rows, np.asarray(out.tokens), np.asarray(out.count), strict=True):
            row.extend(tokens[:n].tolist())
    return state, rows


def generate(steps: Steps, prompts, slots, tables, count: int, state: State | None = None, sampling=None):
    """`count` greedy tokens after every prompt -> [lists], empty for padding rows."""
    state, first = prefill(steps, blank_state(steps) if state is None else state, prompts, slots, tables)
    _, more = decode(steps, state, slots, tables, count - 1, sampling)
    return [[int(f), *m][:count] if p is not None else [] for f, m, p in zip(first, more, prompts, strict=True)]


def poisoned(state: State) -> State:
    """A state in which everything that no live request may read is poison: NaN (0xFF in records: NaN scales
    and payload), absurd registers."""

    def poison(x):
        return jnp.full_like(x, 0xFF if x.dtype == jnp.uint8 else jnp.nan if x.dtype == jnp.float32 else 12345)

    return jax.tree.map(poison, state)


def visible(
    state: State, slot: int, length: int, tables: PageTables, row: int, c: ModelConfig
) -> dict[str, np.ndarray]:
    """Everything of a request at `length` committed tokens that a later step can read, by name, in stored form."""
    out = {}
    recent = np.arange(max(0, length - c.sliding_window + 1), length)
    for i, ring in enumerate(state.window):
        out[f"window_{i}"] = np.asarray(ring)[slot, recent % ring.shape[1]]
    recent = np.arange(max(0, length - c.sliding_window), length)
    for i, ring in enumerate(state.draft_window):
        out[f"draft_window_{i}"] = np.asarray(ring)[slot, recent % ring.shape[1]]
    for layer in (s for s in c.layers if s.owns_kv):
        out |= _entries(state, layer, length // layer.ratio, tables, row)
        if layer.ratio == 2 and length % 2:
            pending = np.asarray(state.pending[layer.index])
            out[f"pending_{layer.index}"] = pending[slot, (length - 1) % pending.shape[1]]
    for name in ("length", "anchor", "history", "draft_from"):
        out[name] = np.asarray(getattr(state, name))[slot]
    return out


def _entries(state: State, layer, n: int, tables: PageTables, row: int):
    """Compressed KV and index keys of entries 0..n-1 [n, bytes or dims]."""
    pool, keys = np.asarray(state.global_kv[layer.index]), np.asarray(state.index[layer.index])
    per_page = pool.shape[1]
    column, at = np.divmod(np.arange(n), per_page)
    page = np.asarray(tables.global_kv[layer.ratio])[row, column]
    key_page = keys[np.asarray(tables.index[layer.ratio])[row, column]]
    if keys.dtype == np.uint8:
        width = keys.shape[1] // per_page
        half = width * 16 // 17  # payload : scales = J/2 : J/32
        payload = key_page[:, : per_page * half].reshape(n, per_page, half)[np.arange(n), at]
        scale = key_page[:, per_page * half :].reshape(n, per_page, width - half)[np.arange(n), at]
        picked = np.concatenate([payload, scale], 1)
    else:
        picked = key_page[np.arange(n), at]
    return {f"global_{layer.index}": pool[page, at], f"index_{layer.index}": picked}
