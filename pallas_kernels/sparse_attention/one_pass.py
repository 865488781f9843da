"""Sparse attention in Pallas on Triton, for Blackwell's tensor cores: records are read and decoded once, for both products.

One program owns a query row: its N heads are the rows of the products, its keys come in tiles of TILE, window first. A
tile's words are gathered ahead of time (Triton pipelines the loads), decoded to bf16 in registers and stored to shared
memory once, where it is K of one product and V of the next, under an online softmax. The S rows of a request read the
same ring (70 KB at 512 channels) and do so out of the L2 cache. On Hopper the same code becomes wgmma, for checking.

The query is rotated into the row's place in the output and read back: Hopper's product would keep a computed left operand
in registers, all 128 of them. The epilogue passes through the same place, so that only the rotary channels, not the
accumulators, are taken apart into pairs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.codecs import GROUP, NV_GROUP, cdiv, e8m0_to_f32
from pallas_kernels.sparse_attention.reference import EMPTY_MAX, query_shape, window_bounds

ARCHES = ("sm_100", "sm_103")  # for `auto`; by name it runs on sm_90 too
TILE = 64  # keys: 64 KiB of bf16 beside the query's 64 KiB and two tiles of records
WARPS = 8
STAGES = 3  # a tile's words are requested one tile ahead
LOG2E = 1.4426950408889634
WORD = 4  # bytes
E2M1_IN_E4M3 = 64.0  # an e2m1 code in the bits of an e4m3 one (exponent and mantissa aligned) is this much too small


def refuses(q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, *, first=0, **options):
    """Why the kernel does not take these arguments, or None."""
    del slots, positions, global_slots, sin, options
    heads, dim = query_shape(q, sink, first)[2:]
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}, the kernel is for bfloat16"
    if window_pool.dtype != jnp.uint8 or (global_pool is not None and global_pool.dtype != jnp.uint8):
        return "the pools hold values, the kernel reads packed records"
    if (heads, dim) != (64, 512):
        return f"{heads} heads of {dim} channels, the kernel is for 64 of 512"
    if first % dim:
        return f"queries behind {first} columns, the kernel skips whole heads"
    if (pairs := cos.shape[-1]) & (pairs - 1):
        return f"{pairs} rotary pairs, the kernel wants a power of two"
    return None


def _iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


_shifted = jax.lax.shift_right_logical


def _load(ref, rows, live, first: int, width: int):
    """Words first..first+width-1 of rows i32[TILE] of i32[n, record] -> i32[TILE, width], 0 where not `live`."""
    from jax.experimental.pallas import triton as plt

    shape = rows.shape[0], width
    at = jnp.broadcast_to(rows[:, None], shape), _iota(shape, 1) + first
    return plt.load(ref.at[at], mask=jnp.broadcast_to(live[:, None], shape), other=0)


def _bytes(words):
    """i32[n, m] -> i8[n, 4m] in memory order."""
    b = [_shifted(words, 8 * i).astype(jnp.int8) for i in range(WORD)]
    pairs = jnp.stack([jnp.stack([b[0], b[2]], -1), jnp.stack([b[1], b[3]], -1)], -1)
    return pairs.reshape(words.shape[0], -1)


def _e4m3_words(packed):
    """Words i32[n, m] of eight e2m1 codes -> i32[n, 2m] of four e4m3 codes, their values a factor of 64 too small."""
    sign = jnp.int32(-0x7F7F7F80)  # 0x80808080
    low = ((packed << 2) & 0x1C1C1C1C) | ((packed << 4) & sign)  # the low nibble of each byte, then the high one
    high = (_shifted(packed, 2) & 0x1C1C1C1C) | (packed & sign)
    even = (low & 0x00FF00FF) | ((high & 0x00FF00FF) << 8)  # codes 0 1 4 5, then 2 3 6 7
    odd = (_shifted(low, 8) & 0x00FF00FF) | (high & ~0x00FF00FF)
    first, second = (even & 0xFFFF) | (odd << 16), _shifted(even, 16) | (odd & ~0xFFFF)
    return jnp.stack([first, second], -1).reshape(packed.shape[0], -1)


def _e4m3(code):
    """i8 codes -> f32 of the same shape"""
    return jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32)


def decode_window(payload, scales):
    """Words i32[TILE, D/4] of e4m3, i32[TILE, D/128] of e8m0 -> bf16[TILE, D], exact."""
    scale = e8m0_to_f32(jax.lax.bitcast_convert_type(_bytes(scales), jnp.uint8))
    value = _e4m3(_bytes(payload).reshape(*scale.shape, GROUP)) * scale[:, :, None]
    return value.astype(jnp.bfloat16).reshape(payload.shape[0], -1)


def decode_global(payload, scales):
    """Words i32[TILE, D/8] of e2m1, i32[TILE, D/64] of e4m3 -> bf16[TILE, D], exact."""
    scale = _e4m3(_bytes(scales)) * E2M1_IN_E4M3
    value = _e4m3(_bytes(_e4m3_words(payload)).reshape(*scale.shape, NV_GROUP)) * scale[:, :, None]
    return value.astype(jnp.bfloat16).reshape(payload.shape[0], -1)


def _rotated(x, cos, sin):
    """bf16[N, 2r] rotated in adjacent pairs by f32[r], in fp32 and rounded."""
    re, im = jnp.unstack(x.astype(jnp.float32).reshape(x.shape[0], -1, 2), axis=-1)
    pairs = jnp.stack([re * cos[None, :] - im * sin[None, :], im * cos[None, :] + re * sin[None, :]], -1)
    return pairs.reshape(x.shape).astype(jnp.bfloat16)


def _attend(q, keys, live, scale_log2: float, carry):
    """Online softmax over one tile, keys bf16[TILE, D]; carry: peak f32[N], denominator f32[N], sums f32[N, D]."""
    from jax.experimental.pallas import triton as plt

    peak, total, sums = carry
    s = plt.dot(q, keys, trans_b=True) * scale_log2
    s = jnp.where(live[None, :], s, -jnp.inf)
    new = jnp.maximum(peak, jnp.max(s, 1))
    p, shrink = jnp.exp2(s - new[:, None]), jnp.exp2(peak - new)
    sums = sums * shrink[:, None] + plt.dot(p.astype(jnp.bfloat16), keys)
    return new, total * shrink + jnp.sum(p, 1), sums


def _body(
    q, ring_rows, slots, positions, start, end, entry_rows, chosen, sink, cos, sin, out, *,
    span: int, ring: int, n_slots: int, window: int, entries: int, selected: int, scale: float, rotate: bool,
    bounded: bool, tile: int, compiled: bool,
):  # fmt: skip
    """q bf16[others + N, D], out bf16[N, D] of one row; all else whole: records in words i32[n_slots * R, (D + D/32) / 4]
    and i32[P * E, (D/2 + D/16) / 4], positions and bounds (read if `bounded`) i32[T], chosen i32[T, K], cos and sin
    f32[T, r]."""
    from jax.experimental.pallas import triton as plt

    t = pl.program_id(0)
    heads, dim = out.shape
    own = pl.ds(q.shape[0] - heads, heads)
    rotary = 2 * cos.shape[1]
    tail = pl.ds(dim - rotary, rotary)
    wait = plt.debug_barrier if compiled else lambda: None  # what other threads stored to `out` is read next
    slot = slots[t // span]
    valid = (positions[t] >= 0) & (slot >= 0) & (slot < n_slots)
    last = end[t] if bounded else positions[t] + 1
    first = jnp.maximum(last - window, jnp.maximum(start[t], 0) if bounded else 0)
    base = jnp.where(valid, slot, 0) * ring
    column = _iota((tile,), 0)
    if rotate:
        plt.store(out.at[:, :], q[own, :], mask=_iota((heads, dim), 1) < dim - rotary)
        out[:, tail] = _rotated(q[own, tail], cos[t, :], sin[t, :])
        wait()
        query = out[:, :]
    else:
        query = q[own, :]

    def attend(decode, payload, scales, live, carry):
        # Always true, and gone after XLA's first passes: those move the transposition of K in front of whatever makes K,
        # which would decode and store every tile twice, but not into a conditional.
        keys = jax.lax.cond(jax.lax.eq(t, t), decode, lambda *_: jnp.zeros((tile, dim), jnp.bfloat16), payload, scales)
        return _attend(query, keys, live, scale * LOG2E, carry)

    def window_tile(n, carry):
        position = first + n * tile + column
        live = position < last
        rows = base + jax.lax.rem(position, ring)
        load = lambda *part: _load(ring_rows, rows, live, *part)
        words = dim // WORD
        return attend(decode_window, load(0, words), load(words, words // GROUP), live, carry)

    def indices(n):
        k = n * tile + column
        return plt.load(chosen.at[jnp.full((tile,), t), k], mask=k < selected, other=-1)

    def selected_tile(n, carry):
        *carry, index = carry  # loaded a turn ahead: asynchronous copies of it would be waited for with all the others
        live = (index >= 0) & (index < entries)
        rows = jnp.where(live, index, 0)
        load = lambda *part: _load(entry_rows, rows, live, *part)
        words = dim // 2 // WORD
        carry = attend(decode_global, load(0, words), load(words, dim // NV_GROUP // WORD), live, carry)
        return *carry, indices(n + 1)

    empty = jnp.full((heads,), EMPTY_MAX, jnp.float32), jnp.zeros((heads,), jnp.float32), jnp.zeros((heads, dim), jnp.float32)
    tiles = valid.astype(jnp.int32) * (jnp.maximum(last - first + tile - 1, 0) // tile)
    carry = jax.lax.fori_loop(0, tiles, window_tile, empty)
    if selected:
        tiles = valid.astype(jnp.int32) * cdiv(selected, tile)
        *carry, _ = jax.lax.fori_loop(0, tiles, selected_tile, (*carry, indices(0)))
    peak, total, sums = carry
    inverse = jnp.where(total > 0, 1 / (total + jnp.exp2(sink[:] * LOG2E - peak)), 0.0)
    out[:, :] = (sums * inverse[:, None]).astype(jnp.bfloat16)
    wait()
    rotated = _rotated(out[:, tail], cos[t, :], -sin[t, :])
    out[:, tail] = jnp.where(valid, rotated, jnp.zeros_like(rotated))  # an invalid row's angles may hold anything


@functools.partial(
    jax.jit, static_argnames=("window", "scale", "rotate_query", "first", "interpret", "tile", "warps", "stages")
)  # lowered once for all layers
def sparse_attention(
    q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, *,
    window, scale, window_start=None, window_end=None, rotate_query=False, first=0,
    interpret=False, tile=TILE, warps=WARPS, stages=STAGES,
):  # fmt: skip
    """The operator (api.py has its contract) for bf16 q and packed pools; interpreted, N, D >= 128 and r are any powers of
    two. tile: keys a step, a power of two."""
    from jax.experimental.pallas import triton as plt

    shape = batch, span, heads, dim = query_shape(q, sink, first)
    rows = batch * span
    n_slots, ring, _ = window_pool.shape
    bounded = window_start is not None or window_end is not None
    start, end = window_bounds(positions, window, window_start, window_end) if bounded else (positions, positions)
    entries, selected = 0, 0
    if global_pool is None:  # never read
        global_pool, global_slots = window_pool, positions
    else:
        entries, selected = global_pool.shape[0] * global_pool.shape[1], global_slots.shape[2]
    by_row = lambda x: x.reshape(rows, *x.shape[2:])

    def records(pool):
        """In words, which XLA takes for the same memory: wider loads and four codes to an operation."""
        words = pool.reshape(-1, pool.shape[2] // WORD, WORD)
        return jax.lax.bitcast_convert_type(words, jnp.int32)

    arrays = (
        q.reshape(rows, -1, dim), records(window_pool), slots, by_row(positions), by_row(start), by_row(end),
        records(global_pool), global_slots.reshape(rows, -1), sink, by_row(cos), by_row(sin),
    )  # fmt: skip
    own = lambda heads: pl.BlockSpec((None, heads, dim), lambda t: (t, 0, 0))
    whole = lambda x: pl.BlockSpec(x.shape, lambda t: (0,) * x.ndim)
    body = functools.partial(
        _body, span=span, ring=ring, n_slots=n_slots, window=window, entries=entries, selected=selected, scale=scale,
        rotate=rotate_query, bounded=bounded, tile=tile, compiled=not interpret,
    )  # fmt: skip
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, heads, dim), q.dtype),
        grid=(rows,),
        in_specs=[own(first // dim + heads), *map(whole, arrays[1:])],
        out_specs=own(heads),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        name="sparse_attention_one_pass",
    )(*arrays).reshape(shape)
