"""What the coefficients of a site are, in plain jnp (spec/model.md section 3)."""

import jax

from ..row_tiles import in_row_tiles
from ..sinkhorn.reference import normalised


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
    return pre, post, normalised(comb, static.iterations, static.eps)
