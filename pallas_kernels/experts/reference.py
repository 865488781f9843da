"""Routed experts in plain jnp: the definition (spec/model.md sections 4 and 9).

One expert's weights are dequantised at a time inside a scan, so the same code serves as the XLA baseline at full size
without a dequantised copy of the weights.
"""

import jax
import jax.numpy as jnp

from ..codecs import dequantize_fp8, dequantize_weight_mxfp4, quantize_fp8, round_values, rounded
from ..row_tiles import in_row_tiles


def qdq_fp8(x):
    """bf16[..., D] -> bf16[..., D]: FP8 e4m3 with one e8m0 scale per 32 channels, back to bf16 (exact)."""
    return dequantize_fp8(*quantize_fp8(x)).astype(jnp.bfloat16)


def swiglu(g, v, w, limit: float):
    """Clamped SwiGLU times the routing weight, in fp32: w * (silu(min(g, limit)) * clamp(v, +-limit)).

    g, v,  # f32[..., F]
    w,     # f32[..., 1] or 1.0
    """
    g = jnp.minimum(g, limit)
    v = jnp.clip(v, -limit, limit)
    return w * (g * jax.nn.sigmoid(g) * v)


def _matmul(x, w, full_precision: bool):
    """[T, I] x [O, I] -> f32[T, O]; bf16 operands are exact dequantised values, so their products are exact."""
    precision = jax.lax.Precision.HIGHEST if full_precision else None
    product = lambda x: jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
    return in_row_tiles(product, x)


def expert_mlp(x, w, w13, s13, w2, s2, *, limit: float, full_precision: bool):
    """One expert on every row.

    x,    # bf16[T, H], already quantised and dequantised; f32[T, H] if full_precision
    w,    # f32[T, 1] routing weights
    w13,  # u8[2F, H/2];  s13,  # u8[2F, H/32]
    w2,   # u8[H, F/2];   s2,   # u8[H, F/32]
    Returns f32[T, H] (values exact in bf16 unless full_precision).
    """
    dtype = jnp.float32 if full_precision else jnp.bfloat16
    f = w2.shape[-1] * 2
    h = _matmul(x, dequantize_weight_mxfp4(w13, s13, dtype), full_precision)
    h = round_values(h, dtype)
    t = rounded(swiglu(h[:, :f], h[:, f:], w, limit), dtype)
    if not full_precision:
        t = qdq_fp8(t)
    y = _matmul(t, dequantize_weight_mxfp4(w2, s2, dtype), full_precision)
    return round_values(y, dtype)


def experts(x, ids, weights, w13, s13, w2, s2, *, swiglu_limit=10.0, first_expert=0, precision="released"):
    """See `api.experts`."""
    full_precision = precision != "released"
    x = x.astype(jnp.float32) if full_precision else qdq_fp8(x)

    def step(y, expert):
        e, *tensors = expert
        chosen = ids == first_expert + e
        w = jnp.sum(jnp.where(chosen, weights, 0.0), axis=-1, keepdims=True)
        y_e = expert_mlp(x, w, *tensors, limit=swiglu_limit, full_precision=full_precision)
        # where, not a product: a row of another expert must not see this one's infinities.
        return y + jnp.where(jnp.any(chosen, axis=-1, keepdims=True), y_e, 0.0), None

    local = w13.shape[0]
    y0 = jnp.zeros(x.shape, jnp.float32)
    y, _ = jax.lax.scan(step, y0, (jnp.arange(local, dtype=jnp.int32), w13, s13, w2, s2))
    return y
