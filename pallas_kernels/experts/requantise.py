"""FP8 activations of the Hopper kernel, in its order and with one scale for 128 channels: the definitions in plain jnp,
and each in one launch, Pallas on Triton.

XLA needs four launches for a group's maximum, its scale, the chunk's largest scale and the codes, and one to gather.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import FP8_FLOOR, FP8_MAX, ceil_e8m0, e8m0_to_f32, round_e4m3
from ..triton_e4m3 import bits_of, ceil_exponent, code_of, float_of, value_of

MOST_ROWS = 16  # of one program


def _re_express(g, group_axis: int, inner_axes: tuple[int, ...]):
    """Quantise each group to FP8 as the model does, then express a chunk's four groups with their largest scale.

    g: bf16, one axis of four groups, the other axes of a group in `inner_axes`.
    Returns (e4m3 bytes u8 like g, f32 scales with kept dims of size 1).
    """
    g = g.astype(jnp.float32)
    amax = jnp.maximum(jnp.max(jnp.abs(g), axis=inner_axes, keepdims=True), jnp.float32(FP8_FLOOR))
    s = ceil_e8m0(amax * jnp.float32(1 / FP8_MAX))
    top = jnp.max(s, axis=group_axis, keepdims=True)
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


def _body(x_ref, *refs, rows: int, gathered: bool):
    """One chunk of 128 channels of `rows` rows; lane l of group q is word l // 4, byte l % 4 of that group's words.

    x_ref bf16[T, H] and token i32[rows] if gathered, else bf16[1, rows, 128] in layout.CHANNEL order;
    words i32[1, rows, 32], scale f32[1, rows]."""
    token, words, scale = refs if gathered else (None, *refs)
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, 32), 1)
    if gathered:
        row = jnp.broadcast_to(token[:][:, None], (rows, 32))
        load = lambda q: x_ref[row, pl.program_id(0) * 128 + 32 * q + lane]
    else:
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, 32), 0)
        load = lambda q: x_ref[0, row, (lane >> 2) * 16 + 4 * q + (lane & 3)]
    groups = [load(q).astype(jnp.float32) for q in range(4)]
    largest = [jnp.maximum(jnp.max(jnp.abs(g), 1), jnp.float32(FP8_FLOOR)) * jnp.float32(1 / FP8_MAX) for g in groups]
    exponent = [ceil_exponent(a) for a in largest]
    top = functools.reduce(jnp.maximum, exponent)
    scale[0, :] = float_of(top << 23)
    for q, (g, s) in enumerate(zip(groups, exponent, strict=True)):
        inverse, ratio = float_of((254 - s) << 23), float_of(jnp.maximum(127 + s - top, 0) << 23)
        code = code_of(value_of(code_of(jnp.abs(g) * inverse[:, None])) * ratio[:, None])
        code = code | jnp.where(bits_of(g) < 0, 128, 0)
        word = jnp.sum((code << (8 * (lane & 3))).reshape(rows, 8, 4), 2)
        at = jax.lax.broadcasted_iota(jnp.int32, (rows, 8), 1) * 4 + q
        words[0, jax.lax.broadcasted_iota(jnp.int32, (rows, 8), 0), at] = word


def _call(x, token, chunks: int, total: int, interpret: bool):
    from jax.experimental.pallas import triton as plt

    gathered = token is not None
    rows = min(MOST_ROWS, total & -total)
    by_chunk = lambda width: pl.BlockSpec((1, rows, width), lambda c, r: (c, r, 0))
    x_spec = pl.BlockSpec(x.shape, lambda c, r: (0, 0)) if gathered else by_chunk(128)
    words, scale = pl.pallas_call(
        functools.partial(_body, rows=rows, gathered=gathered),
        out_shape=(jax.ShapeDtypeStruct((chunks, total, 32), jnp.int32), jax.ShapeDtypeStruct((chunks, total), jnp.float32)),
        grid=(chunks, total // rows),
        in_specs=[x_spec, *([pl.BlockSpec((rows,), lambda c, r: (r,))] if gathered else [])],
        out_specs=(by_chunk(32), pl.BlockSpec((1, rows), lambda c, r: (c, r))),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="experts_quantise_rows" if gathered else "experts_requantise",
    )(x, *([token] if gathered else []))
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(chunks, total, 128), scale


def gathered_rows(x, token, *, interpret: bool = False):
    """bf16[T, H], i32[R] -> (u8[H/128, R, 128], f32[H/128, R]): `quantize_rows` of x[token]; tokens must exist."""
    return _call(x, token, x.shape[1] // 128, token.shape[0], interpret)


def sorted_rows(t, *, interpret: bool = False):
    """bf16[F/128, R, 128] in layout.CHANNEL order -> (u8 alike, f32[F/128, R]): `quantize_sorted`."""
    return _call(t, None, t.shape[0], t.shape[1], interpret)
