"""The decode state: window rings, paged compressed KV and index keys, pending compressor rows, per-request registers.

Everything a request owns outside the pages is keyed by its *cache slot* (a row of the rings), never by its row in the
batch. Pages hold `page_tokens` tokens; a page id <= 0 is unallocated: reads give a masked entry, writes are skipped.
Record formats: spec/decode.md section 1 and pallas_kernels.codecs. In precision `float32` pools hold float32 values.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import ABSENT
from dsv41_jax.precision import Precision
from pallas_kernels import codecs


@dataclasses.dataclass(frozen=True)
class CacheGeometry:
    """Sizes of the state.

    slots: requests held at once. pages: pages per pool; page 0 is never used. page_tokens: tokens per page.
    span: most rows of one request in one step, verify and prefill chunks alike.
    """

    slots: int
    pages: int
    page_tokens: int = 128
    span: int = 128

    def __post_init__(self):
        for name, low in (("slots", 1), ("pages", 2), ("page_tokens", 2), ("span", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"cache: {name} expected >= {low}, got {getattr(self, name)}")
        if self.page_tokens % 2:
            raise ValueError(f"cache: page_tokens expected even (a ratio-2 group never straddles pages), got {self.page_tokens}")

    def ring(self, c: ModelConfig) -> int:
        """Window rows per slot: the window, the rows of a step, and a draft block beside them."""
        return codecs.round_up(c.sliding_window + max(self.span, c.dspark_block_size + 1), 8)

    def pending_ring(self, c: ModelConfig) -> int:
        """Pending compressor rows per slot: a power of two >= drafts + 2, at least 8 (spec/model.md section 12)."""
        return max(8, 1 << (c.dspark_block_size + 1).bit_length())

    def columns(self, context: int) -> int:
        """Page-table columns for `context` tokens."""
        return codecs.cdiv(context, self.page_tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The donated decode state of one rank.

    window: per layer u8[slots, ring, D + D/32]; draft_window: the same per draft stage.
    global_kv: {source layer: u8[pages, E, D/2 + D/16]}; index: {source layer: u8[pages, E * (J/2 + J/32)]}.
    pending: {ratio-2 source layer: f32[slots, pending_ring, 2, D]}, value then gate.
    length i32[slots]: position of the anchor, the newest token not yet run. anchor i32[slots]: that token.
    history i32[slots, ngram-1]: raw ids before the anchor, oldest first.
    draft_from i32[slots]: first position with a row in the draft window.
    """

    window: tuple
    draft_window: tuple
    global_kv: dict
    index: dict
    pending: dict
    length: jax.Array
    anchor: jax.Array
    history: jax.Array
    draft_from: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTables:
    """One table per pool tag, keyed by ratio: i32[B, columns]; physical ids of different tags are independent."""

    global_kv: dict
    index: dict

    @classmethod
    def shared(cls, table, c: ModelConfig) -> "PageTables":
        """The same table i32[B, columns] for every tag: what an allocator that hands out whole pages uses."""
        ratios = {s.ratio for s in c.layers if s.owns_kv}
        return cls({r: table for r in ratios}, {r: table for r in ratios})


def init_state(c: ModelConfig, g: CacheGeometry, p: Precision) -> State:
    """A zeroed state: every slot empty, every page blank."""
    d, j = c.head_dim, c.index_head_dim

    def ring():
        if p.quantise_cache:
            return jnp.zeros((g.slots, g.ring(c), codecs.window_record_bytes(d)), jnp.uint8)
        return jnp.zeros((g.slots, g.ring(c), d), jnp.float32)

    def pool(ratio):
        entries = g.page_tokens // ratio
        if p.quantise_cache:
            return jnp.zeros((g.pages, entries, codecs.global_record_bytes(d)), jnp.uint8)
        return jnp.zeros((g.pages, entries, d), jnp.float32)

    def keys(ratio):
        entries = g.page_tokens // ratio
        if p.quantise_cache:
            return jnp.zeros((g.pages, entries * codecs.index_record_bytes(j)), jnp.uint8)
        return jnp.zeros((g.pages, entries, j), jnp.float32)

    owners = [s for s in c.layers if s.owns_kv]
    pending = (g.slots, g.pending_ring(c), 2, d)
    return State(
        window=tuple(ring() for _ in c.layers),
        draft_window=tuple(ring() for _ in c.draft_layers),
        global_kv={s.index: pool(s.ratio) for s in owners},
        index={s.index: keys(s.ratio) for s in owners},
        pending={s.index: jnp.zeros(pending, jnp.float32) for s in owners if s.ratio == 2},
        length=jnp.zeros((g.slots,), jnp.int32),
        anchor=jnp.zeros((g.slots,), jnp.int32),
        history=jnp.full((g.slots, c.engram_max_ngram_size - 1), ABSENT, jnp.int32),
        draft_from=jnp.zeros((g.slots,), jnp.int32),
    )


def entry_slots(
    table,  # i32[B, C]
    entries,  # i32[B, n], logical entry of each request; negative = none
    per_page: int,
    pages: int,
):
    """i32[B, n]: page * per_page + entry within the page; -1 where the entry is negative, its column lies outside the
    table, or its page is unallocated (<= 0) or outside the pool (spec/decode.md, A8)."""
    column = entries // per_page
    inside = (entries >= 0) & (column < table.shape[1])
    page = jnp.take_along_axis(table, jnp.where(inside, column, 0), axis=1)
    ok = inside & (page > 0) & (page < pages)
    return jnp.where(ok, page * per_page + entries % per_page, -1)
