"""Checks of a step's arguments at the boundary: shapes, dtypes and page tables, before anything is donated.

They read shapes only, never values, so they cost microseconds and never wait for the device.
"""

import jax.numpy as jnp

from dsv41_jax.cache import CacheGeometry, PageTables
from dsv41_jax.config import ModelConfig


def _expect(ok, where: str, expected, got) -> None:
    if not ok:
        raise ValueError(f"{where}: expected {expected}, got {got}")


def check_array(x, where: str, shape: tuple, dtype) -> None:
    """A host or device array of exactly this shape and dtype. Raises ValueError (where, expected, got)."""
    got = (getattr(x, "dtype", type(x).__name__), getattr(x, "shape", None))
    _expect(got == (jnp.dtype(dtype), shape), where, f"{jnp.dtype(dtype).name}{list(shape)}", f"{got[0]}{list(got[1] or ())}")


def check_tables(
    tables: PageTables,
    c: ModelConfig,
    g: CacheGeometry,
    batch: int,
    context: int | None = None,
) -> None:
    """Every ratio of the model has a table i32[batch, C] for each pool; with `context`, C covers that many tokens.

    Raises ValueError (where, expected, got).
    """
    ratios = sorted({s.ratio for s in c.layers if s.owns_kv})
    for tag, by_ratio in (("global_kv", tables.global_kv), ("index", tables.index)):
        _expect(sorted(by_ratio) == ratios, f"tables.{tag}", f"ratios {ratios}", sorted(by_ratio))
        for ratio, table in by_ratio.items():
            where = f"tables.{tag}[{ratio}]"
            _expect(getattr(table, "ndim", None) == 2, where, "i32[B, columns]", getattr(table, "shape", table))
            check_array(table, where, (batch, table.shape[1]), jnp.int32)
            held = table.shape[1] * g.page_tokens
            _expect(context is None or held >= context, where, f"columns for {context} tokens",
                    f"{table.shape[1]} columns of {g.page_tokens} tokens = {held}")  # fmt: skip


def check_chunk(chunk, c: ModelConfig, g: CacheGeometry) -> None:
    """A `plan.Chunk`: tokens i32[B, S] with S <= span; start, count, slots i32[B]; tables. Raises ValueError."""
    _expect(getattr(chunk.tokens, "ndim", None) == 2, "chunk.tokens", "i32[B, S]", getattr(chunk.tokens, "shape", None))
    b, s = chunk.tokens.shape
    check_array(chunk.tokens, "chunk.tokens", (b, s), jnp.int32)
    _expect(1 <= s <= g.span, "chunk.tokens", f"1..span = {g.span} rows a request", s)
    for name in ("start", "count", "slots"):
        check_array(getattr(chunk, name), f"chunk.{name}", (b,), jnp.int32)
    check_tables(chunk.tables, c, g, b)


def check_sampling(sampling, batch: int) -> None:
    """A `sampling.SamplingBatch` of `batch` rows. Raises ValueError."""
    for name, dtype in (("temperature", jnp.float32), ("top_k", jnp.int32), ("top_p", jnp.float32), ("min_p", jnp.float32),
                        ("seed", jnp.uint32), ("forced", bool), ("banned_before", jnp.int32)):  # fmt: skip
        check_array(getattr(sampling, name), f"sampling.{name}", (batch,), dtype)
    for name, dtype in (("end_ids", jnp.int32), ("bias_ids", jnp.int32), ("bias", jnp.float32)):
        value = getattr(sampling, name)
        check_array(value, f"sampling.{name}", (batch, *value.shape[1:2]), dtype)
    _expect(sampling.bias.shape == sampling.bias_ids.shape, "sampling.bias", sampling.bias_ids.shape, sampling.bias.shape)
