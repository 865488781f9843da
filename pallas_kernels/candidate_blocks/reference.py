"""Candidate block publication in plain jnp: the definition (spec/decode.md section 3, spec/model.md section 7)."""

import jax.numpy as jnp

from ..ordering import KEY_MIN, compact, is_infinite, is_nan, largest, order_keys

_NEWEST = 2**31 - 1
_NAN = _NEWEST - 1


def block_keys(logits, visible, block_size: int):
    """Rank of every block.

    logits bf16|f32[T, width], visible i32[T] -> (keys i32[T, N], publishable bool[T, N]), N = ceil(width / block_size).
    """
    rows, width = logits.shape
    blocks = -(-width // block_size)
    length = jnp.clip(visible, 0, width)[:, None]
    live = jnp.arange(width) < length
    key = jnp.where(live, order_keys(logits), KEY_MIN)
    low = live & is_infinite(logits) & (key < 0)
    pad = [(0, 0), (0, blocks * block_size - width)]

    def per_block(x, fill):
        return jnp.pad(x, pad, constant_values=fill).reshape(rows, blocks, block_size)

    best = jnp.max(per_block(key, KEY_MIN), -1)
    has_nan = jnp.any(per_block(is_nan(logits) & live, False), -1)
    has_score = jnp.any(per_block(live & ~low, False), -1)
    newest = (jnp.arange(blocks) == (length - 1) // block_size) & (length > 0)
    keys = jnp.where(newest, _NEWEST, jnp.where(has_nan, _NAN, best))
    return keys, newest | (has_score & ~has_nan)


def candidate_blocks(logits, visible, *, k_blocks, block_size=8, flags=False):
    """The operator; see `api.candidate_blocks` for the contract."""
    keys, publishable = block_keys(logits, visible, block_size)
    kept = largest(keys, min(k_blocks, keys.shape[1])) & publishable
    ids, count = compact(kept, k_blocks)
    return (ids, count, kept.astype(jnp.uint8)) if flags else (ids, count)
