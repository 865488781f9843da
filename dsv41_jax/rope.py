"""Rotary positions: two tables (plain and YaRN), adjacent pairs, last channels (spec/model.md section 5)."""

import math

import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from pallas_kernels.row_ops import rotate as rotate
from pallas_kernels.row_tiles import in_row_tiles


def frequencies(c: ModelConfig, compressed: bool) -> np.ndarray:
    """f32[R/2] angles per position. compressed: layers of ratio 1 and 2 (theta 160000 with YaRN); else theta 10000."""
    r = c.qk_rope_head_dim
    theta = c.compress_rope_theta if compressed else c.rope_theta
    t = np.float32(1.0) / np.power(np.float32(theta), np.arange(0, r, 2, dtype=np.float32) / np.float32(r))
    if not compressed:
        return t

    def correction(rotations: float) -> float:
        return r * math.log(c.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(c.beta_fast)), 0)
    high = min(math.ceil(correction(c.beta_slow)), r - 1)
    ramp = np.clip((np.arange(r // 2, dtype=np.float32) - low) / np.float32(max(high - low, 0.001)), 0, 1)
    keep = np.float32(1) - ramp
    return (t / np.float32(c.rope_factor) * (np.float32(1) - keep) + t * keep).astype(np.float32)


def tables(
    freqs,  # f32[R/2]
    positions,  # i32[...]
):
    """(cos, sin) f32[..., R/2]. Angles are fp32 products of the integer position, as in the reference."""

    def turn(positions):
        angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(freqs)
        return jnp.cos(angle), jnp.sin(angle)

    shape = (*positions.shape, len(freqs))
    return tuple(x.reshape(shape) for x in in_row_tiles(turn, positions.reshape(-1)))
