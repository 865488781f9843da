"""What the index query is, in plain jnp (spec/model.md section 7; MXFP4: section 4)."""

from .. import codecs
from ..row_ops import rotate


def index_query(projected, product, cos, sin, *, heads: int, dim: int, form: str):
    """See `api.index_query`."""
    dtype = projected.dtype
    q = projected[:, : heads * dim].reshape(-1, heads, dim)
    q = rotate(q, cos[:, None], sin[:, None])
    if form != "exact":
        packed = codecs.quantize_mxfp4(q)
        q = packed if form == "packed" else codecs.dequantize_mxfp4(*packed).astype(dtype)
    weights = codecs.round_values(product, dtype) * (dim**-0.5 * heads**-0.5)
    return q, codecs.rounded(weights, dtype)
