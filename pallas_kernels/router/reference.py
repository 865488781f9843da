"""Router in plain jnp: the definition (spec/model.md section 9, spec/decode.md section 4)."""

import jax
import jax.numpy as jnp

from ..row_tiles import in_row_tiles


def logits(x, gate):
    """x @ gate^T in fp32.

    x,     # bf16[T, H] or f32[T, H]
    gate,  # bf16[E, H] or f32[E, H]
    Returns f32[T, E].
    """
    if x.dtype == gate.dtype == jnp.bfloat16:
        # Products of bf16 numbers are exact in fp32, so this equals the fp32 product the release computes.
        return in_row_tiles(lambda x: jnp.einsum("th,eh->te", x, gate, preferred_element_type=jnp.float32), x)
    gate = gate.astype(jnp.float32)
    product = lambda x: jnp.einsum("th,eh->te", x, gate, precision=jax.lax.Precision.HIGHEST)
    return in_row_tiles(product, x.astype(jnp.float32))


def score(z):
    """f32[...]: sqrt(softplus(z)) in logaddexp form: neither the underflow of log1p(exp(z)) below -16.6 nor its overflow
    above 88."""
    return jnp.sqrt(jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z))))


def select(s, bias, k: int, scale: float):
    """Biased top-k of the scores, weights from the unbiased ones.

    s,     # f32[T, E]
    bias,  # f32[E]
    Returns ids i32[T, k] in descending biased score, the lower id first among equals, and weights f32[T, k].
    """
    _, ids = jax.lax.top_k(s + bias, k)
    w = jnp.take_along_axis(s, ids, axis=-1)
    norm = lambda w: w / (jnp.sum(w, axis=-1, keepdims=True) + jnp.float32(1e-20))
    return ids.astype(jnp.int32), in_row_tiles(norm, w) * jnp.float32(scale)


def router(x, gate, bias, *, k: int, scale: float):
    """See `api.router`."""
    return select(score(logits(x, gate)), bias, k, scale)


def fake_balance(
    rows: int, k: int, *, experts: int, ep_size: int = 1, dp_size: int = 1, dp_rank=0
):
    """See `api.fake_balance`."""
    local = experts // ep_size
    slot = jnp.arange(rows * k, dtype=jnp.int32)
    rank = jnp.asarray(dp_rank, jnp.int32)
    owner = (ep_size * rank // dp_size + slot % ep_size) % ep_size
    # The reference floors d * max(local / dp, 1) with a real quotient; in integers that is max(d * local // dp, d).
    start = jnp.maximum(rank * local // dp_size, rank)
    ids = owner * local + (start + slot // ep_size) % local
    return ids.reshape(rows, k), jnp.ones((rows, k), jnp.float32)
