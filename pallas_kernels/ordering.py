"""Total order on float bits, exact top-k by threshold, and compaction: what the three selection operators share.

Selection never compares floats. The order is the signed order of the remapped bits (negative patterns have their
magnitude bits inverted), so it is total, the same on every device, and -0 sorts below +0. The k-th largest key is
found first and every element is then kept or dropped by comparing with it, ties by index: no sort's stability matters.
"""

import jax
import jax.numpy as jnp
import numpy as np

KEY_MIN = -(2**31)


def order_keys(x):
    """bf16[...] or f32[...] -> i32[...], increasing in x; -0 just below +0, NaNs outside the infinities by sign."""
    bits16 = x.dtype == jnp.bfloat16
    b = jax.lax.bitcast_convert_type(x, jnp.int16 if bits16 else jnp.int32).astype(jnp.int32)
    return b ^ ((b >> 31) & (0x7FFF if bits16 else 0x7FFFFFFF))


def is_nan(x):
    """bf16[...] or f32[...] -> bool[...], from the bits."""
    bits16 = x.dtype == jnp.bfloat16
    b = jax.lax.bitcast_convert_type(x, jnp.int16 if bits16 else jnp.int32).astype(jnp.int32)
    return (b & (0x7FFF if bits16 else 0x7FFFFFFF)) > (0x7F80 if bits16 else 0x7F800000)


def is_infinite(x):
    """bf16[...] or f32[...] -> bool[...], from the bits."""
    bits16 = x.dtype == jnp.bfloat16
    b = jax.lax.bitcast_convert_type(x, jnp.int16 if bits16 else jnp.int32).astype(jnp.int32)
    return (b & (0x7FFF if bits16 else 0x7FFFFFFF)) == (0x7F80 if bits16 else 0x7F800000)


def largest(keys, k: int):
    """i32[T, N], 1 <= k <= N -> bool[T, N], true at the k largest keys of each row; lowest index first among equals."""
    cut = jnp.sort(keys, axis=-1)[:, keys.shape[-1] - k, None]
    above, level = keys > cut, keys == cut
    places = k - jnp.sum(above, -1, keepdims=True, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, -1, dtype=jnp.int32) <= places))


def argmax(x, holds=True):
    """(i32[...], bool[...]) of f32[..., N]: the lowest index of the largest value, -0 equal to 0, or of the first NaN where
    there is one; and whether `holds`, bool[..., N], is true all along. One pass, the same result in any order of it: of two
    NaN `jnp.argmax` takes the one that its reduction meets first, on a GPU not the lower index."""
    axis = x.ndim - 1

    def pick(a, b):
        (x, i, f), (y, j, g) = a, b
        larger = (x > y) | (is_nan(x) & ~is_nan(y))
        same = (x == y) | (is_nan(x) & is_nan(y))
        return jnp.where(larger | same, x, y), jnp.where(larger | (same & (i < j)), i, j), f & g

    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    start = jnp.float32(-jnp.inf), jnp.int32(0), jnp.bool_(True)
    return jax.lax.reduce((x, index, jnp.broadcast_to(holds, x.shape)), start, pick, (axis,))[1:]


def compact(kept, k: int):
    """bool[T, N] -> (i32[T, k] indices of the first k true columns, ascending, -1 at the tail, i32[T] their number)."""
    running = jnp.cumsum(kept, -1, dtype=jnp.int32)
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)
    column = jax.vmap(lambda r: jnp.searchsorted(r, wanted))(running).astype(jnp.int32)
    total = jnp.minimum(running[:, -1], k)
    return jnp.where(wanted <= total[:, None], column, -1), total


def sample_scores(rng: np.random.Generator, rows: int, width: int, kind: str) -> np.ndarray:
    """f32[rows, width] scores for tests and benchmarks: "random" normal ones, or "near_equal": three neighbouring bf16
    values, so that any cut is a huge tie."""
    if kind == "random":
        return rng.standard_normal((rows, width), np.float32)
    return 1 + rng.integers(0, 3, (rows, width)).astype(np.float32) / 128
