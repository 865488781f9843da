"""bf16 bit patterns for the selection tests: hypothesis strategies and the numpy side of the order."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

# What selection gets wrong first: zeros, subnormals, extremes, infinities, NaNs of both signs, neighbours.
SPECIAL = (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFC0, 0xFFFF)
FINITE = tuple(p for p in SPECIAL if p & 0x7FFF < 0x7F80) + (0x3F80, 0x3F81, 0x3F7F, 0xBF80, 0xBF81)


def bf16(patterns):
    """u16[...] patterns -> jax bf16[...]."""
    return jnp.asarray(np.asarray(patterns, np.uint16).view(ml_dtypes.bfloat16))


def patterns(array):
    """jax bf16[...] -> u16[...]."""
    return np.asarray(array).view(np.uint16)


def key(pattern: int) -> int:
    """Increasing in the score: signed magnitude with -0 below +0."""
    return -(pattern & 0x7FFF) - 1 if pattern & 0x8000 else pattern


def is_nan(pattern: int) -> bool:
    return pattern & 0x7FFF > 0x7F80


def rows(width: int, count: int):
    """u16[count, width]: each row from few values (ties), from the special ones, or from all 65536 patterns."""
    few = st.lists(st.sampled_from(FINITE), min_size=1, max_size=3)
    pools = st.one_of(few, st.just(SPECIAL), st.just(FINITE), st.just(tuple(range(65536))))

    def draw(pool_and_seed):
        pool, seed = pool_and_seed
        return np.random.default_rng(seed).choice(np.asarray(pool, np.uint16), width)

    return st.lists(st.tuples(pools, st.integers(0, 2**32 - 1)).map(draw), min_size=count, max_size=count).map(np.stack)


LENGTHS = (-(2**31), -1, 0, 1, 2**31 - 1)
