"""What the coefficients of a site are, in plain jnp (spec/model.md section 3)."""

import jax

from ..row_tiles import in_row_tiles


def hyper_coefficients(products, r, scale, base, *, static):
    """See `api.hyper_coefficients`."""
    return in_row_tiles(lambda p, r: _coefficients(p, r, scale, base, static), products, r)


def _coefficients(products, r, scale, base, static):
    m, n = static.streams, static.width
    y = products[:, -n:]
    for part in reversed(range(products.shape[1] // n - 1)):
        y = y + products[:, part * n : (part + 1) * n]
    y = y * r[:, None]
    pre = jax.nn.sigmoid(y[:, :m] * scale[0] + base[:m]) + static.eps
    post = 2 * jax.nn.sigmoid(y[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (y[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(-1, m, m)
    return pre, post, sinkhorn(comb, static.iterations, static.eps)


def sinkhorn(logits, iterations: int, eps: float):
    """f32[T, M, M] -> row softmax plus eps, a column normalisation, then iterations - 1 times rows and columns. A
    normalisation divides by the sum plus eps."""
    x = jax.nn.softmax(logits, -1) + eps
    x = x / (x.sum(-2, keepdims=True) + eps)

    def once(_, x):
        x = x / (x.sum(-1, keepdims=True) + eps)
        return x / (x.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, once, x)
