"""Block-scaled FP8 product in plain jnp: the definition (spec/model.md section 4).

Products of e4m3 values and powers of two are exact in bf16, so a bf16 product with fp32 accumulation is the
block-scaled product up to the order of summation. XLA writes the bf16 weights to memory first.
"""

import jax
import jax.numpy as jnp

from ..codecs import dequantize_weight_fp8, rounded
from ..row_tiles import in_row_tiles


def _product(x, w):
    """[M, I] x [R, I] -> f32[M, R], or [M, G, I] x [G, O, I] -> f32[M, G, O]. fp32 operands never run as TF32."""
    grouped = (((2,), (2,)), ((1,), (0,)))
    y = jax.lax.dot_general(
        x, w, grouped if x.ndim == 3 else (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return y if x.ndim == 2 else y.transpose(1, 0, 2)


def block_scaled_matmul(x, w, s, *, groups=1, quantised=False, out_dtype=None):
    """See `api.block_scaled_matmul`."""
    del quantised
    m, dense = x.shape[0], dequantize_weight_fp8(w, s, x.dtype)
    if groups > 1:
        x, dense = x.reshape(m, groups, -1), dense.reshape(groups, w.shape[0] // groups, -1)
    y = in_row_tiles(lambda x: _product(x, dense), x)
    return rounded(y.reshape(m, -1), out_dtype or x.dtype)
