"""FP8 activations of the Hopper kernel, in its order and with one scale for 128 channels: the definitions in plain jnp,
and each in one launch, Pallas on Triton.

XLA needs four launches for a group's maximum, its scale, the chunk's largest scale and the codes, and one to gather.
A token is quantised once and written to each of its sorted rows; rows that no slot has stay unwritten, as every row of
the product depends on its own row alone. Eight lanes own a chunk of a row: each has the channels of 16 neighbouring
bytes, four of every group, so a group's maximum is three shuffles and nothing changes lanes. Rows in order already are
read 16 bytes a lane, so they have sixteen.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import FP8_FLOOR, FP8_MAX, ceil_e8m0, e8m0_to_f32, round_e4m3
from ..triton_e4m3 import ceil_exponent, float_of

FP8_FITS = 464.0  # the largest magnitude that rounds to FP8_MAX: a tie, to even
MOST_ROWS = 16  # of one program
LANES = 8  # of one chunk of a row


def _re_express(g, group_axis: int, inner_axes: tuple[int, ...]):
    """Quantise each group to FP8 as the model does, then express a chunk's four groups with one scale: the smallest that
    holds all their quantised values.

    Not the largest of the groups' scales: a group whose largest value rounds down to half of its range has a smaller
    scale when its quantised values are quantised again, as those that came from another rank are. Either way the codes
    and the scale are the same here.
    g: bf16, one axis of four groups, the other axes of a group in `inner_axes`.
    Returns (e4m3 bytes u8 like g, f32 scales with kept dims of size 1).
    """
    g = g.astype(jnp.float32)
    amax = jnp.maximum(jnp.max(jnp.abs(g), axis=inner_axes, keepdims=True), jnp.float32(FP8_FLOOR))
    s = ceil_e8m0(amax * jnp.float32(1 / FP8_MAX))
    top = jnp.max(ceil_e8m0(amax * jnp.float32(1 / FP8_FITS)), axis=group_axis, keepdims=True)
    q = round_e4m3(jnp.clip(g / e8m0_to_f32(s), -FP8_MAX, FP8_MAX))
    # 127 + s - top is the e8m0 byte of the ratio of the two scales; below byte 0 the group has vanished anyway.
    ratio = jnp.maximum(127 + s.astype(jnp.int32) - top.astype(jnp.int32), 0).astype(jnp.uint8)
    q = round_e4m3(q * e8m0_to_f32(ratio)).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(q, jnp.uint8), e8m0_to_f32(top)


def quantize_rows(x):
    """bf16[T, H] -> (u8[H/128, T, 128] e4m3 in layout.CHANNEL order, f32[H/128, T])."""
    t, h = x.shape
    g = x.reshape(t, h // 128, 4, 4, 2, 4)  # q, i, h, j: channel = 32 q + 8 i + 4 h + j
    q, s = _re_express(g, 2, (3, 4, 5))
    return q.transpose(1, 0, 3, 4, 2, 5).reshape(h // 128, t, 128), s.reshape(t, h // 128).T


def quantize_sorted(t):
    """bf16[F/128, R, 128] already in layout.CHANNEL order -> (u8 alike, f32[F/128, R])."""
    c, r, _ = t.shape
    q, s = _re_express(t.reshape(c, r, 4, 2, 4, 4), 4, (2, 3, 5))
    return q.reshape(t.shape), s.reshape(c, r)


def _exponents(largest, most: float = FP8_MAX):
    """f32 the largest magnitude of a group -> i32 the byte of its scale, which is at least a `most`-th of it."""
    return ceil_exponent(jnp.maximum(largest, jnp.float32(FP8_FLOOR)) * jnp.float32(1 / most))


def _words(g, s, top):
    """f32[..., 4] -> i32[...]: four codes of a group with scale byte `s`, re-expressed with scale byte `top`."""
    inverse, ratio = float_of((254 - s) << 23), float_of(jnp.maximum(127 + s - top, 0) << 23)
    q = (g * inverse).astype(jnp.float8_e4m3fn).astype(jnp.float32) * ratio
    code = jax.lax.bitcast_convert_type(q.astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.int32)
    return jnp.sum(code << (8 * jax.lax.broadcasted_iota(jnp.int32, g.shape, g.ndim - 1)), g.ndim - 1)


def _spread(x, position, count, words, scale, *, rows: int):
    """One chunk of `rows` tokens. x bf16[T, H], position i32[T, K] and count i32[1], whole; words i32[H/128, R, 32] and
    scale f32[H/128, R], whole."""
    from jax.experimental.pallas import triton as plt

    chunk, first, size = pl.program_id(0), pl.program_id(1) * rows, scale.shape[1]
    row, lane, j = (jax.lax.broadcasted_iota(jnp.int32, (rows, LANES, 4), axis) for axis in range(3))
    groups = [x[first + row, chunk * 128 + 32 * q + 4 * lane + j].astype(jnp.float32) for q in range(4)]
    # not one maximum over both axes, which Pallas lowers to two and a way through shared memory between them
    largest = [jnp.max(jnp.max(jnp.abs(g), 2), 1) for g in groups]
    exponents = [_exponents(a) for a in largest]
    top = _exponents(functools.reduce(jnp.maximum, largest), FP8_FITS)
    each = lambda a: a[:, None, None]
    code = [_words(g, each(s), each(top)) for g, s in zip(groups, exponents, strict=True)]
    even, odd = jnp.stack(code[::2], -1), jnp.stack(code[1::2], -1)
    code = jnp.stack([even, odd], -1).reshape(rows, LANES, 4)
    token, here = first + jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0), count[0]
    for k in range(position.shape[1]):
        to = position[token, jnp.full(token.shape, k, jnp.int32)]
        local = to < here
        # Interpreted, a masked store writes the old value back: not to a row that another token has.
        to = jnp.where(local, to, size)
        whole = lambda a: jnp.broadcast_to(a[:, :, None], code.shape)
        plt.store(words.at[chunk, whole(to), 4 * lane + j], code, mask=whole(local))
        plt.store(scale.at[chunk, to], jnp.broadcast_to(float_of(top << 23)[:, None], to.shape), mask=local)


def _sorted(t, count, words, scale, *, rows: int):
    """One chunk of `rows` rows. t bf16[1, rows, 128] in layout.CHANNEL order, count i32[1]; words i32[1, rows, 32], scale
    f32[1, rows]."""

    @pl.when(pl.program_id(1) * rows < count[0])
    def _():
        g = t[0].astype(jnp.float32).reshape(rows, LANES, 4, 4)
        largest = jnp.max(jnp.max(jnp.abs(g), 3), 1)
        s, top = _exponents(largest), _exponents(jnp.max(largest, 1), FP8_FITS)
        each = lambda a: a[:, None, None, None]
        words[0] = _words(g, s[:, None, :, None], each(top)).reshape(rows, 32)
        row, _ = (jax.lax.broadcasted_iota(jnp.int32, (rows, 2 * LANES), axis) for axis in range(2))
        scale[0, row] = jnp.broadcast_to(float_of(top << 23)[:, None], row.shape)


def _launch(body, arrays, in_specs, out_specs, chunks: int, size: int, tiles: int, threads: int, interpret, name: str):
    """One launch over chunks and tiles of rows -> (u8[chunks, size, 128], f32[chunks, size])."""
    from jax.experimental.pallas import triton as plt

    shape = jax.ShapeDtypeStruct
    words, scale = pl.pallas_call(
        body,
        out_shape=(shape((chunks, size, 32), jnp.int32), shape((chunks, size), jnp.float32)),
        grid=(chunks, tiles),
        in_specs=in_specs,
        out_specs=out_specs,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=max(1, threads // 32)),
        name=name,
    )(*arrays)
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(chunks, size, 128), scale


def _tile(rows: int) -> int:
    """Rows of a program, of `rows` in all."""
    return min(MOST_ROWS, rows & -rows)


def spread_rows(x, position, count, size: int, *, interpret: bool = False):
    """`quantize_rows` of every token at each of its sorted rows; all other rows are left unwritten.

    x,         # bf16[T, H]
    position,  # i32[T, K] sorted rows, distinct below `count`; a slot at `count` or behind it has none here
    count,     # i32[], at most size
    Returns (u8[H/128, size, 128], f32[H/128, size]).
    """
    tokens, chunks = x.shape[0], x.shape[1] // 128
    rows = _tile(tokens)
    whole = lambda *shape: pl.BlockSpec(shape, lambda c, r: (0,) * len(shape))
    return _launch(
        functools.partial(_spread, rows=rows), (x, position, count.reshape(1)),
        [whole(*x.shape), whole(*position.shape), whole(1)], (whole(chunks, size, 32), whole(chunks, size)),
        chunks, size, tokens // rows, rows * LANES, interpret, "experts_quantise_rows",
    )  # fmt: skip


def sorted_rows(t, count, *, interpret: bool = False):
    """bf16[F/128, R, 128] in layout.CHANNEL order -> (u8 alike, f32[F/128, R]): `quantize_sorted` of the first `count`
    rows, i32[]; later rows may be left unwritten."""
    chunks, size, _ = t.shape
    rows = _tile(size)
    own = lambda *shape: pl.BlockSpec(shape, lambda c, r: (c, r, 0)[: len(shape)])
    return _launch(
        functools.partial(_sorted, rows=rows), (t, count.reshape(1)),
        [own(1, rows, 128), pl.BlockSpec((1,), lambda c, r: (0,))], (own(1, rows, 32), own(1, rows)),
        chunks, size, size // rows, rows * 2 * LANES, interpret, "experts_requantise",
    )  # fmt: skip
