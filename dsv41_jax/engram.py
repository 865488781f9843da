"""Engram: hashed n-gram embeddings gated into the streams (spec/model.md section 10).

The hash needs 62-bit integers. JAX without x64 has none, so products are kept as two 32-bit limbs and reduced modulo a
prime below 2^24 byte by byte; the result is exact on every device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.linear import fp8_linear
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Engram
from dsv41_jax.precision import Precision
from dsv41_jax.schedule import ConfigError
from pallas_kernels import codecs
from pallas_kernels.row_tiles import in_row_tiles

ABSENT = -1  # history id of a position before the start of the text
_MULTIPLIER_SEED = 10007


@dataclasses.dataclass(frozen=True)
class EngramConstants:
    """Per engram layer. multipliers: python ints [ngram]; primes: [ngram-1][heads]; offsets: same, row offsets."""

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return sum(map(sum, self.primes))


def _is_prime(n: int) -> bool:
    if n < 2 or n % 2 == 0:
        return n == 2
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))


@functools.cache
def engram_primes(c: ModelConfig) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[engram layer][ngram-1][heads]: the primes from engram_vocab_size upwards, none taken twice. Those of a layer sum to
    the rows of its table."""
    taken: set[int] = set()
    out = []
    for _ in c.engram_layer_ids:
        primes = []
        for _ in range(c.engram_max_ngram_size - 1):
            candidate, heads = c.engram_vocab_size - 1, []
            while len(heads) < c.engram_n_heads:
                candidate += 1
                if candidate not in taken and _is_prime(candidate):
                    heads.append(candidate)
                    taken.add(candidate)
            primes.append(tuple(heads))
        out.append(tuple(primes))
    return tuple(out)


@functools.cache
def engram_constants(c: ModelConfig) -> tuple[EngramConstants, ...]:
    """Multipliers, primes and row offsets of every engram layer. Raises ConfigError if they disagree with
    engram_num_embeddings or a prime does not fit the device's hash."""
    bound = (2**63 - 1) // c.engram_compressed_vocab_size // 2
    out = []
    for i, (layer, primes) in enumerate(zip(c.engram_layer_ids, engram_primes(c), strict=True)):
        rng = np.random.default_rng(_MULTIPLIER_SEED * layer)
        multipliers = tuple(2 * int(r) + 1 for r in rng.integers(0, bound, c.engram_max_ngram_size, np.int64))
        starts = np.cumsum([0, *(p for row in primes for p in row)])[:-1].reshape(len(primes), -1)
        out.append(EngramConstants(multipliers, primes, tuple(tuple(map(int, r)) for r in starts)))
        if out[-1].rows != c.engram_num_embeddings[i]:
            raise ConfigError("engram_num_embeddings", c.engram_num_embeddings,
                              f"the primes of layer {layer} sum to {out[-1].rows}")  # fmt: skip
        if max(map(max, primes)) >= 2**24:
            raise ConfigError("engram_vocab_size", c.engram_vocab_size, "primes must stay below 2^24")
    return tuple(out)


def _multiply_limbs(t, m: int):
    """u32[...] times a python int below 2^63 -> (hi, lo) u32 limbs of the low 64 bits."""
    m_lo, m_hi = jnp.uint32(m & 0xFFFFFFFF), jnp.uint32(m >> 32)
    t0, t1 = t & 0xFFFF, t >> 16
    m0, m1 = m_lo & 0xFFFF, m_lo >> 16
    low, mid_a, mid_b = t0 * m0, t1 * m0, t0 * m1
    mid = (low >> 16) + (mid_a & 0xFFFF) + (mid_b & 0xFFFF)
    hi = t1 * m1 + (mid_a >> 16) + (mid_b >> 16) + (mid >> 16) + t * m_hi
    return hi, (low & 0xFFFF) | (mid << 16)


def _mod(hi, lo, prime):
    """(hi * 2^32 + lo) mod prime, for primes below 2^24: the remainder shifted by a byte still fits in 32 bits."""
    r = jnp.zeros_like(hi)
    for limb in (hi, lo):
        for shift in (24, 16, 8, 0):
            r = ((r << 8) | ((limb >> shift) & 0xFF)) % prime
    return r


def hash_rows(
    ids,  # i32[T, G] engram ids of positions p, p-1, ..., p-G+1; pad already in place
    constants: EngramConstants,
):
    """i32[T, (G-1)*heads]: table rows, n-gram size major, head minor."""
    primes = jnp.asarray(constants.primes, jnp.uint32)
    offsets = jnp.asarray(constants.offsets, jnp.int32)
    hi = lo = None
    rows = []
    for s, multiplier in enumerate(constants.multipliers):
        h, low = _multiply_limbs(ids[:, s].astype(jnp.uint32), multiplier)
        hi, lo = (h, low) if s == 0 else (hi ^ h, lo ^ low)
        if s:
            rows.append(_mod(hi[:, None], lo[:, None], primes[s - 1]).astype(jnp.int32) + offsets[s - 1])
    return jnp.concatenate(rows, -1)


def ngram_ids(
    tokens,  # i32[B, S] raw ids of the chunk
    history,  # i32[B, G-1] raw ids before it, oldest first; ABSENT before the start
    token_map,  # i32[V]
    pad: int,  # engram id of the pad token, token_map[pad_token]
    ngram: int,
):
    """i32[B*S, G]: engram ids of each position and its predecessors; absent ones are the mapped pad."""
    raw = jnp.concatenate([history, tokens], 1)
    mapped = jnp.where(raw < 0, pad, token_map[jnp.clip(raw, 0, token_map.shape[0] - 1)])
    s = tokens.shape[1]
    columns = [mapped[:, ngram - 1 - back : ngram - 1 - back + s] for back in range(ngram)]
    return jnp.stack(columns, -1).reshape(-1, ngram)


def gate(
    streams,  # dtype[T, M, H]
    embedding,  # dtype[T, rows*D], dequantised table rows
    params: Engram,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, M, H]: streams plus the gated value."""
    return in_row_tiles(lambda s, e: _gate(s, e, params, c, p, options), streams, embedding)


def _gate(streams, embedding, params: Engram, c: ModelConfig, p: Precision, options: DecodeOptions):
    t, m, h = streams.shape
    kv = fp8_linear(embedding, params.wkv, p, options)
    key = kv[:, : m * h].reshape(t, m, h).astype(jnp.float32)
    value = kv[:, m * h :].astype(jnp.float32)
    x = streams.astype(jnp.float32)
    weight = params.q_weight[...].astype(jnp.float32) * params.k_weight[...].astype(jnp.float32)
    d = jnp.sum(x * weight * key, -1)
    d *= jax.lax.rsqrt(jnp.mean(x * x, -1) + c.rms_norm_eps) * jax.lax.rsqrt(jnp.mean(key * key, -1) + c.rms_norm_eps)
    d *= h**-0.5
    g = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(d), 1e-6)), d))
    return codecs.rounded(x + g[..., None] * value[:, None], streams.dtype)


def split_records(
    records,  # u8[N, D + D/32]: rows of a table, payload and then scales
):
    """(f8[N, D], u8[N, D/32])"""
    d = records.shape[1] - records.shape[1] // 33
    return jax.lax.bitcast_convert_type(records[:, :d], jnp.float8_e4m3fn), records[:, d:]


def lookup(
    table,  # f8[rows, D]
    scale,  # u8[rows, D/32]
    rows,  # i32[T, n]; outside the table: zeros
    dtype,
):
    """dtype[T, n*D]: dequantised rows, concatenated."""
    known = (rows >= 0) & (rows < table.shape[0])
    at = jnp.where(known, rows, 0)
    x = codecs.dequantize_fp8(table[at], scale[at])
    return jnp.where(known[..., None], x, 0).astype(dtype).reshape(rows.shape[0], -1)
