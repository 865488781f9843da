"""The way back from sorted rows (expert_plan) to tokens."""

import jax
import jax.numpy as jnp

from ..expert_plan import Plan


def combine(y, plan: Plan):
    """y [R, H] sorted rows' outputs -> f32[T, H]: fp32 sum of each token's local rows in ascending expert id."""
    out = jnp.zeros((plan.position.shape[0], y.shape[1]), jnp.float32)
    for k in range(plan.position.shape[1]):
        p = plan.position[:, k]
        out += jnp.where((p < plan.count)[:, None], y[p].astype(jnp.float32), 0.0)
    return out


def in_turn(part, parts: int, *operands):
    """(part(0, *operands), part(1, *operands), ...), each computed after the one before: XLA would compute all the
    products first, then the sums as one fusion, and no part could travel while another is computed."""
    results = [part(0, *operands)]
    for i in range(1, parts):
        results[-1], *operands = jax.lax.optimization_barrier((results[-1], *operands))
        results.append(part(i, *operands))
    return tuple(results)
