"""Mixture of experts: router, routed experts behind an exchange object, shared expert (spec/model.md section 9)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import lookup
from dsv41_jax.linear import fp8_linear, values, wants_round_trip
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Experts, MoE
from dsv41_jax.precision import Precision
from pallas_kernels import codecs, registry
from pallas_kernels.experts.api import experts_parts
from pallas_kernels.router.api import fake_balance, router
from pallas_kernels.swiglu.api import fuses, swiglu

NOTHING_BESIDE = (lambda: None, lambda _: None)


@dataclasses.dataclass(frozen=True)
class LocalExchange:
    """Expert exchange of a single rank: it owns every expert and every engram row.

    The sharded exchanges of `sharding` have the same three members and the same results.
    """

    ranks: int = 1

    def run_experts(self, x, ids, weights, params: Experts, run, beside=NOTHING_BESIDE):
        """(f32[T, H], second(first())): `run` over all rows and all ranks, summed in id order; and what is beside it.

        run: (x, ids, weights, params, first_expert, parts=1, spare_sms=0) -> what these experts add to the rows, as
        `parts` arrays f32[T, H/parts] of consecutive columns (`experts_parts`).
        beside: (first, second), work that needs nothing of other ranks: `first()` for the time in which rows travel,
        `second(its result)` for that in which contributions travel.
        """
        first, second = beside
        return run(x, ids, weights, params, 0)[0], second(first())

    def lookup(self, table, scale, rows, dtype):
        """dtype[T, n*D]: dequantised rows of a (possibly sharded) engram table; rows i32[T, n] are global."""
        return lookup(table, scale, rows, dtype)

    def rank(self):
        """i32[]: this rank."""
        return jnp.int32(0)


@functools.partial(jax.jit, static_argnames=("parts", "spare_sms", "limit", "precision", "impl", "plan_impl", "arch"))
def _experts(x, ids, weights, w13, s13, w2, s2, first, *, parts, spare_sms, limit, precision, impl, plan_impl, arch):
    """`experts_parts` traced and lowered once for all layers of one shape: a kernel's lowering takes most of a second."""
    return experts_parts(x, ids, weights, w13, s13, w2, s2, parts=parts, spare_sms=spare_sms, swiglu_limit=limit,
                         first_expert=first, precision=precision, impl=impl, plan_impl=plan_impl, arch=arch)  # fmt: skip


def moe(
    x,  # dtype[T, H] or Rows, the ffn_norm output
    params: MoE,
    k: int,
    exchange,
    c: ModelConfig,
    p: Precision,
    options: DecodeOptions,
    taps: dict | None = None,
    name: str = "",
):
    """dtype[T, H]: routed sum in fp32, then the shared expert, rounded once."""
    rows, x = x, values(x)
    with jax.named_scope("router"):
        ids, weights = router(x, params.gate[...], params.bias[...], k=k, scale=c.routed_scaling_factor,
                              precision=p.name, impl=options.impl("router"))  # fmt: skip
        if options.fake_balance_experts:
            ids, weights = fake_balance(x.shape[0], k, experts=params.gate.shape[0], ep_size=exchange.ranks,
                                        dp_size=exchange.ranks, dp_rank=exchange.rank())  # fmt: skip
    if taps is not None:
        taps[f"gate_indices_{name}"], taps[f"gate_weights_{name}"] = ids, weights

    def run(x, ids, weights, e: Experts, first, parts=1, spare_sms=0):
        return _experts(x, ids, weights, e.w13[...], e.s13[...], e.w2[...], e.s2[...], first, parts=parts,
                        spare_sms=spare_sms, limit=c.swiglu_limit, precision=p.name, impl=options.impl("experts"),
                        plan_impl=options.impl("expert_plan"), arch=registry.current_arch())  # fmt: skip

    activation = dict(limit=c.swiglu_limit, impl=options.impl("swiglu"))
    columns = lambda n: jax.ShapeDtypeStruct((x.shape[0], n), x.dtype)
    width = params.shared_w2.weight.shape[1]
    ready = wants_round_trip(columns(width), params.shared_w2, p, options) and fuses(columns(2 * width), **activation)

    @jax.named_scope("shared_expert")
    def shared_up():
        return swiglu(fp8_linear(rows, params.shared_w13, p, options), **activation, round_trip=ready)

    @jax.named_scope("shared_expert")
    def shared_down(hidden):
        return fp8_linear(hidden, params.shared_w2, p, options, ready=ready)

    with jax.named_scope("experts"):
        routed, shared = exchange.run_experts(x, ids, weights, params.experts, run, (shared_up, shared_down))
    return codecs.rounded(routed + shared.astype(jnp.float32), x.dtype)
