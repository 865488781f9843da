"""Per-step metadata, computed once and passed down as an immutable value (spec/decode.md sections 2 and 3).

Nothing here depends on a layer's weights: positions, RoPE rows, visible lengths, store targets. No cache, no identity.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import rope
from dsv41_jax.cache import CacheGeometry, PageTables, State, entry_slots
from dsv41_jax.config import ModelConfig
from pallas_kernels.select_tokens.api import SlotMap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """The rows of one step. tokens i32[B, S]; start i32[B] position of the first row; count i32[B] valid rows (0..S);
    slots i32[B] cache slot, < 0 = padding request."""

    tokens: jax.Array
    start: jax.Array
    count: jax.Array
    slots: jax.Array
    tables: PageTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RatioPlan:
    """Metadata shared by all layers of one ratio.

    cos, sin f32[T, R/2]: rotation of a row's own position (YaRN). entry_cos, entry_sin: of its entry's first token.
    visible i32[T]: entries the row sees. global_store, index_store i32[T]: where its completed entry goes, -1 = nowhere.
    slot_map: where the entries a row selects lie in the pool. index_table i32[B, C].
    """

    cos: jax.Array
    sin: jax.Array
    entry_cos: jax.Array
    entry_sin: jax.Array
    visible: jax.Array
    global_store: jax.Array
    index_store: jax.Array
    slot_map: SlotMap
    index_table: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """positions i32[B, S] (-1 = padding row); slots i32[B]; row_slots i32[T] (-1 = padding row); cos, sin f32[T, R/2] of
    plain layers; pending_store bool[T]: rows kept in the pending ring; ratios {ratio: RatioPlan}."""

    positions: jax.Array
    start: jax.Array
    slots: jax.Array
    row_slots: jax.Array
    cos: jax.Array
    sin: jax.Array
    pending_store: jax.Array
    ratios: dict

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.shape


def plan_step(c: ModelConfig, g: CacheGeometry, state: State, chunk: Chunk) -> StepPlan:
    """All metadata of one step. A row is valid if its request has a slot inside the state and it lies below `count`."""
    s = chunk.tokens.shape[1]
    slots_held = state.length.shape[0]
    valid_request = (chunk.slots >= 0) & (chunk.slots < slots_held)
    slots = jnp.where(valid_request, chunk.slots, -1)
    offset = jnp.arange(s, dtype=jnp.int32)
    valid = valid_request[:, None] & (offset < chunk.count[:, None])
    positions = jnp.where(valid, chunk.start[:, None] + offset, -1)
    flat = positions.reshape(-1)
    pending_ring = g.pending_ring(c)
    return StepPlan(
        positions=positions,
        start=chunk.start,
        slots=slots,
        row_slots=jnp.where(valid, slots[:, None], -1).reshape(-1),
        **_named_tables(rope.frequencies(c, False), flat),
        # only the newest `ring` rows of a long chunk are kept: older ones would share a ring row with them
        pending_store=(valid & (offset >= chunk.count[:, None] - pending_ring)).reshape(-1),
        ratios={r: _plan_ratio(c, g, state, chunk.tables, positions, r) for r in sorted(chunk.tables.global_kv)},
    )


def _named_tables(freqs, positions, prefix=""):
    cos, sin = rope.tables(freqs, jnp.maximum(positions, 0))
    return {f"{prefix}cos": cos, f"{prefix}sin": sin}


def _plan_ratio(c, g: CacheGeometry, state: State, tables: PageTables, positions, ratio: int) -> RatioPlan:
    freqs = rope.frequencies(c, True)
    flat = positions.reshape(-1)
    per_page = g.page_tokens // ratio
    # a padding row has position -1, so it completes no entry and sees none
    entry = jnp.where((positions >= 0) & ((positions + 1) % ratio == 0), positions // ratio, -1)
    owner = next(s.index for s in c.layers if s.owns_kv and s.ratio == ratio)
    pages = state.global_kv[owner].shape[0]
    table, (b, s) = tables.global_kv[ratio], positions.shape
    return RatioPlan(
        **_named_tables(freqs, flat),
        **_named_tables(freqs, flat // ratio * ratio, "entry_"),
        visible=(flat + 1) // ratio,
        global_store=entry_slots(tables.global_kv[ratio], entry, per_page, pages).reshape(-1),
        index_store=entry_slots(tables.index[ratio], entry, per_page, pages).reshape(-1),
        slot_map=SlotMap(jnp.where(table < pages, table, 0), np.repeat(np.arange(b, dtype=np.int32), s), per_page),
        index_table=tables.index[ratio],
    )
