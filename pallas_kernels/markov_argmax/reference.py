"""What the choice is, in plain jnp (spec/model.md section 11)."""

import jax.numpy as jnp

from ..ordering import argmax
from ..row_ops import matmul


def markov_argmax(base, embedded, weight, *, first: int):
    """See `api.markov_argmax`."""
    base = base[first : first + embedded.shape[0]]
    return argmax(base + matmul(embedded, weight, jnp.float32))[0]
