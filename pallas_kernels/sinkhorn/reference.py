"""What the Sinkhorn normalisation is, in plain jnp (spec/model.md section 3)."""

import jax

from ..row_tiles import in_row_tiles


def sinkhorn(logits, *, iterations: int, eps: float):
    """See `api.sinkhorn`."""
    return in_row_tiles(lambda x: normalised(x, iterations, eps), logits)


def normalised(logits, iterations: int, eps: float):
    """f32[T, M, M] -> the same, doubly normalised; not tiled."""
    x = jax.nn.softmax(logits, -1) + eps
    x = x / (x.sum(-2, keepdims=True) + eps)

    def once(_, x):
        x = x / (x.sum(-1, keepdims=True) + eps)
        return x / (x.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, once, x)
