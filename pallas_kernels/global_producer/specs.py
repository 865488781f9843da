"""Shapes of the global producer that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..codecs import global_record_bytes, index_record_bytes

_HOLES = (0, -1, -7, -99)  # page ids that mean "unallocated"


@dataclasses.dataclass(frozen=True)
class GlobalProducerSpec:
    """`requests` of `span` consecutive rows each, `context` tokens before them at most, pages of `page_tokens`.

    skips: the first of several requests is padding, and some of the others' pages are unallocated.
    """

    name: str
    ratio: int
    requests: int
    span: int
    dim: int = 512
    keys: int = 128
    rotary: int = 64
    ring: int = 8
    page_tokens: int = 128
    context: int = 2048
    skips: bool = False
    eps: float = 1e-20

    @property
    def rows(self) -> int:
        return self.requests * self.span

    @property
    def entries(self) -> int:
        """Entries per page."""
        return self.page_tokens // self.ratio

    @property
    def pages(self) -> int:
        """Of either pool; page 0 is never used."""
        return 1 + self.requests * -(-(self.context + self.span) // self.page_tokens)

    @property
    def bytes(self) -> int:
        """Products, angles and targets of every row read once, weights read once, every record written once; for pairs the
        rows before the chunks read and the pending rows written."""
        pairs = self.ratio == 2
        row = (8 if pairs else 2) * self.dim + 4 * self.rotary + 17
        stored = self.rows // self.ratio * (global_record_bytes(self.dim) + index_record_bytes(self.keys))
        pending = 8 * self.dim * (self.rows + self.requests) if pairs else 0
        return self.rows * row + stored + pending + 2 * (self.keys * self.dim + self.dim + self.keys)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.dim * self.keys

    @property
    def options(self) -> dict:
        """The static keyword arguments of `global_producer`."""
        return {"eps": self.eps, "dtype": jnp.dtype(jnp.bfloat16)}

    def targets(self, starts, slots, tables, counts=None):
        """What a step's plan gives the operator, in numpy: (global_slots, index_slots, row_slots, positions, kept).

        starts, slots: int[B], slot < 0 = padding. tables: two of int[B, columns], page ids; <= 0 = unallocated.
        counts: int[B] rows that are real, the first ones; None = all.
        """
        offset = np.arange(self.span)
        counts = np.full(self.requests, self.span) if counts is None else np.asarray(counts)
        live = (np.asarray(slots) >= 0)[:, None] & (offset < counts[:, None])
        positions = np.where(live, np.asarray(starts)[:, None] + offset, -1)
        entry = np.where((positions >= 0) & ((positions + 1) % self.ratio == 0), positions // self.ratio, -1)
        column = entry // self.entries
        where = []
        for table in tables:
            page = np.take_along_axis(table, np.where(column < table.shape[1], np.maximum(column, 0), 0), 1)
            ok = (entry >= 0) & (column < table.shape[1]) & (page > 0)
            where.append(np.where(ok, page * self.entries + entry % self.entries, -1).reshape(-1))
        row_slots = np.where(live, np.asarray(slots)[:, None], -1).reshape(-1)
        kept = (live & (offset >= counts[:, None] - self.ring)).reshape(-1)
        return *(x.astype(np.int32) for x in (*where, row_slots, positions.reshape(-1))), kept

    def make_inputs(self, seed: int):
        """The arguments of `global_producer`: random pools, products over 12 octaves with a zero row, starts anywhere in the
        context, pages in another order in every pool."""
        rng = np.random.default_rng(seed)
        starts, slots = rng.integers(0, self.context, self.requests), rng.permutation(self.requests + 2)[: self.requests]
        columns = (self.pages - 1) // self.requests
        tables = [1 + rng.permutation(self.pages - 1)[: self.requests * columns].reshape(self.requests, -1) for _ in range(2)]
        if self.skips:
            slots[0] = -1
            for table in tables:
                table[1, rng.integers(0, columns, 4)] = _HOLES
                table[2, starts[2] // self.page_tokens] = rng.choice(_HOLES)
        angle = rng.uniform(-np.pi, np.pi, (self.rows, self.rotary // 2))
        value, gate = (
            rng.standard_normal((self.rows, self.dim)) * 2.0 ** rng.integers(-6, 7, (self.rows, 1)) for _ in range(2)
        )
        value[-1] = 0
        weight = lambda n: jnp.asarray(rng.uniform(0.5, 1.5, n), jnp.bfloat16)
        f32, pairs = (lambda x: jnp.asarray(x, jnp.float32)), self.ratio == 2
        octets = lambda *shape: jnp.asarray(rng.integers(0, 256, shape, np.uint8))
        wk = jnp.asarray(rng.standard_normal((self.keys, self.dim)) * self.dim**-0.5, jnp.bfloat16)
        at = [jnp.asarray(x) for x in self.targets(starts, slots, tables)]
        as_i32 = lambda x: jnp.asarray(x, jnp.int32)
        return (
            octets(self.pages, self.entries, global_record_bytes(self.dim)),
            octets(self.pages, self.entries * index_record_bytes(self.keys)),
            f32(rng.standard_normal((self.requests + 2, self.ring, 2, self.dim))) if pairs else None,
            f32(value) if pairs else jnp.asarray(value, jnp.bfloat16), f32(gate) if pairs else None,
            weight(self.dim), wk, weight(self.keys), f32(np.cos(angle)), f32(np.sin(angle)),
            *at[:2], as_i32(slots), as_i32(starts), *at[2:],
        )  # fmt: skip


SPECS = (
    GlobalProducerSpec("tiny_r1", 1, 3, 5, dim=64, keys=32, rotary=16, page_tokens=8, context=40, skips=True),
    GlobalProducerSpec("tiny_r2", 2, 3, 6, dim=64, keys=32, rotary=16, page_tokens=8, context=40, skips=True),
    GlobalProducerSpec("tiny_prefill", 2, 3, 21, dim=64, keys=32, rotary=16, page_tokens=8, context=40, skips=True),
    GlobalProducerSpec("one_row", 2, 1, 1),
    GlobalProducerSpec("verify_r2", 2, 64, 6),
    GlobalProducerSpec("verify_r1", 1, 64, 6),
)
# Shapes only, of requests of a million tokens: up to 24 GB of pools that no test fills. Between 2 and 4 GiB lie the last
# one's global pool and the index pool of the one before.
MILLION = tuple(
    GlobalProducerSpec(name, ratio, requests, 6, context=1 << 20)
    for name, ratio, requests in (("verify_r1_1m", 1, 64), ("verify_r2_1m", 2, 64), ("eight_r1_1m", 1, 8))
)
BY_NAME = {s.name: s for s in (*SPECS, *MILLION)}


def deviceless_case(name: str):
    """Spec name -> (function with donated pools, abstract arguments) for a compile without a GPU."""
    from . import two_launches

    s = BY_NAME[name]
    shape, b = jax.ShapeDtypeStruct, jnp.bfloat16
    rows, request = shape((s.rows,), jnp.int32), shape((s.requests,), jnp.int32)
    angles, wide = shape((s.rows, s.rotary // 2), jnp.float32), shape((s.rows, s.dim), jnp.float32)
    pairs = (shape((s.requests + 2, s.ring, 2, s.dim), jnp.float32), wide, wide)
    arguments = (shape((s.pages, s.entries, global_record_bytes(s.dim)), jnp.uint8),
                 shape((s.pages, s.entries * index_record_bytes(s.keys)), jnp.uint8),
                 *(pairs if s.ratio == 2 else (None, shape((s.rows, s.dim), b), None)),
                 shape((s.dim,), b), shape((s.keys, s.dim), b), shape((s.keys,), b), angles, angles, rows, rows, request,
                 request, rows, rows, shape((s.rows,), jnp.bool_))  # fmt: skip
    return jax.jit(lambda *a: two_launches.global_producer(*a, **s.options), donate_argnums=(0, 1, 2)), arguments
