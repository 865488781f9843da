"""The load-time weight order of the Hopper kernel, and the same order for activations.

A warpgroup multiplies a block of 64 weight rows with 128 input channels by four tensor-core instructions of 32
channels. Lane l of a warp feeds channels 4q..4q+3 and 16+4q..+3 of each (q = l mod 4) for rows l // 4 and l // 4 + 8.
Since the order of a sum's terms is free, position p of a 128-channel chunk holds channel `CHANNEL[p]`, chosen so that
lane q meets only scale block q: one scale byte per lane, row and chunk. Activations are stored in the same order.

One 32-bit word keeps the plain format's eight neighbouring channels (nibble n = channel n), only the sign bits move:
bit 8j+7 = sign of channel j, bit 8j+3 = sign of channel 4+j, so that signs merge into four e4m3 bytes with one AND-OR.

Weights: i32[E, rows/64, inner/128, 8, 128], the last two axes = 2 halves x 128 lanes x 4 words (16-byte loads).
Scales: i32[E, rows/64, inner/256 + 2, 128]; per lane one word of four bytes t (chunk 0 row l//4, row l//4+8, chunk 1
the same); t = exponent - the row's base, 1..12, so that every code * 2**(t-6) is an exact e4m3 number; the two last
rows hold the base factors of the lane's two rows as f32 bits.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..codecs import e8m0_to_f32

ROWS = 64  # weight rows of a block
CHUNK = 128  # channels of a chunk
STAGE = 2  # chunks of a pipeline stage
LEVELS = 12  # exponents the e4m3 table spans

# Position p = 32 i + 16 h + 4 q + j holds channel 32 q + 8 i + 4 h + j.
CHANNEL = np.arange(CHUNK).reshape(4, 4, 2, 4).transpose(1, 2, 0, 3).ravel()


def is_shuffled(w) -> bool:
    """Whether a weight array is in the order of this module (else it is in the checkpoint's)."""
    return w.ndim == 5


def shuffled_shapes(experts: int, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """{"w13", "s13", "w2", "s2": shape} in the order of this module, all i32. Raises ValueError for sizes it is not for."""
    _check("w13", hidden, width)
    _check("w2", width, hidden)
    return {
        "w13": (experts, width // 32, hidden // CHUNK, 8, 128),
        "s13": (experts, width // 32, hidden // (STAGE * CHUNK) + 2, 128),
        "w2": (experts, hidden // ROWS, width // CHUNK, 8, 128),
        "s2": (experts, hidden // ROWS, width // (STAGE * CHUNK) + 2, 128),
    }


def _swiglu_rows(f: int):
    """Row order of w1|w3: i32[2F]. Block b, warp w, r: gate of position p = 32b + 8w + r, and its up row 8 further."""
    p = np.arange(f)
    channel = p // CHUNK * CHUNK + CHANNEL[p % CHUNK]
    return np.stack([channel.reshape(-1, 8), f + channel.reshape(-1, 8)], 1).reshape(-1)


def _down_rows(h: int):
    """Row order of w2: i32[H]. Rows r and r + 8 of a 16-row slab are neighbouring outputs (one 4-byte store)."""
    return np.arange(h).reshape(-1, 8, 2).transpose(0, 2, 1).reshape(-1)


def _move_signs(word):
    """u32 -> u32: bits 4n+3 (sign of channel n) to 8n+7 for n < 4 and 8(n-4)+3 for n >= 4."""
    out = word & jnp.uint32(0x77777777)
    for n in range(8):
        out |= ((word >> (4 * n + 3)) & 1) << (8 * n + 7 if n < 4 else 8 * (n - 4) + 3)
    return out


def _restore_signs(word):
    out = word & jnp.uint32(0x77777777)
    for n in range(8):
        out |= ((word >> (8 * n + 7 if n < 4 else 8 * (n - 4) + 3)) & 1) << (4 * n + 3)
    return out


def _to_lanes(a):
    """[E, rows, chunks, q, ...] -> [E, blocks, chunks, warp, r, q, half, ...]: rows split into warp, half, r."""
    e, rows, chunks, q, *rest = a.shape
    a = a.reshape(e, rows // ROWS, 4, 2, 8, chunks, q, *rest)
    return jnp.moveaxis(a, (5, 2, 4, 6, 3), (2, 3, 4, 5, 6))


def _from_lanes(a):
    """Inverse of `_to_lanes`."""
    e, blocks, chunks, _, _, q, _, *rest = a.shape
    return jnp.moveaxis(a, (2, 3, 4, 5, 6), (5, 2, 4, 6, 3)).reshape(e, blocks * ROWS, chunks, q, *rest)


def scales_fit(scale):
    """u8[..., O, I/32] -> bool[]: whether every row's exponents span at most LEVELS octaves, so the order is exact."""
    s = scale.astype(jnp.int32)
    return jnp.all((jnp.max(s, -1) - jnp.min(s, -1) < LEVELS) & (jnp.min(s, -1) > 0))


def _shuffle(packed, scale, order):
    e, rows, half_inner = packed.shape
    chunks = half_inner * 2 // CHUNK
    packed, scale = packed[:, order], scale[:, order]
    words = jax.lax.bitcast_convert_type(packed.reshape(e, rows, chunks, 4, 4, 4), jnp.uint32)
    # [E, rows, chunks, q, i] -> ... warp, r, q, half, i -> lane-major words (i, half), two halves of 4 words
    w = _to_lanes(_move_signs(words))
    w = jnp.swapaxes(w, 6, 7).reshape(e, rows // ROWS, chunks, 128, 2, 4)
    w = jnp.moveaxis(w, 4, 3).reshape(e, rows // ROWS, chunks, 8, 128)
    w = jax.lax.bitcast_convert_type(w, jnp.int32)
    low = jnp.min(scale, -1)
    t = jnp.minimum(scale - low[..., None], LEVELS - 1) + 1
    t = _to_lanes(t.reshape(e, rows, chunks, 4)).reshape(e, rows // ROWS, chunks // STAGE, STAGE, 128, 2)
    t = jnp.moveaxis(t, 3, 4).reshape(e, rows // ROWS, chunks // STAGE, 128, 4)
    t = jax.lax.bitcast_convert_type(t.astype(jnp.uint8), jnp.int32)
    # The table holds code * 2**(t-6) with t = s - low + 1: the row's factor is 2**(low - 127 + 5).
    base = e8m0_to_f32(low) * jnp.float32(32.0)
    base = _to_lanes(base.reshape(e, rows, 1, 1)).reshape(e, rows // ROWS, 1, 4, 8, 1, 2)
    base = jnp.broadcast_to(base, (e, rows // ROWS, 1, 4, 8, 4, 2)).reshape(e, rows // ROWS, 2, 128)
    return w, jnp.concatenate([t, jax.lax.bitcast_convert_type(base, jnp.int32)], 2)


def _unshuffle(w, s, order):
    e, blocks, chunks = w.shape[:3]
    rows = blocks * ROWS
    inverse = np.argsort(order)
    words = jax.lax.bitcast_convert_type(w, jnp.uint32).reshape(e, blocks, chunks, 2, 128, 4)
    words = jnp.moveaxis(words, 3, 4).reshape(e, blocks, chunks, 4, 8, 4, 4, 2)
    words = _restore_signs(_from_lanes(jnp.swapaxes(words, 6, 7)))
    packed = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(e, rows, -1)
    t = jax.lax.bitcast_convert_type(s[:, :, :-2], jnp.uint8).reshape(e, blocks, chunks // STAGE, 128, STAGE, 2)
    t = jnp.moveaxis(t, 4, 3).reshape(e, blocks, chunks, 4, 8, 4, 2)
    base = jax.lax.bitcast_convert_type(s[:, :, -2:], jnp.uint32).reshape(e, blocks, 1, 4, 8, 4, 2)
    low = ((base >> 23) - 5).astype(jnp.uint8)
    scale = _from_lanes(t + low - 1).reshape(e, rows, -1)
    return packed[:, inverse], scale[:, inverse]


def shuffle_w13(w13, s13):
    """(u8[E, 2F, H/2], u8[E, 2F, H/32]) -> (i32[E, F/32, H/128, 8, 128], i32[E, F/32, H/256 + 2, 128]).

    A pure function for load time; lossless if `scales_fit(s13)`, else the small scales of a row are raised.
    Raises ValueError unless H is a multiple of 256 and F of 128.
    """
    _check("w13", w13.shape[-1] * 2, w13.shape[-2] // 2)
    return _shuffle(w13, s13, _swiglu_rows(w13.shape[-2] // 2))


def shuffle_w2(w2, s2):
    """(u8[E, H, F/2], u8[E, H, F/32]) -> (i32[E, H/64, F/128, 8, 128], i32[E, H/64, F/256 + 2, 128])."""
    _check("w2", w2.shape[-1] * 2, w2.shape[-2])
    return _shuffle(w2, s2, _down_rows(w2.shape[-2]))


def shuffle_weights(w13, s13, w2, s2):
    """All four expert tensors in the order of the Hopper kernel; see shuffle_w13 and shuffle_w2."""
    return (*shuffle_w13(w13, s13), *shuffle_w2(w2, s2))


def unshuffle_weights(w13, s13, w2, s2):
    """Inverse of shuffle_weights."""
    f, h = w13.shape[1] * ROWS // 2, w2.shape[1] * ROWS
    return (*_unshuffle(w13, s13, _swiglu_rows(f)), *_unshuffle(w2, s2, _down_rows(h)))


def _check(name, inner, outer):
    if inner % (STAGE * CHUNK) or outer % CHUNK:
        raise ValueError(
            f"shuffle {name}: expected the input dim a multiple of {STAGE * CHUNK} and the output dim of {CHUNK}, "
            f"got {inner} and {outer}"
        )
