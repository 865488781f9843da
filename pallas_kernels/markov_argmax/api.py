"""markov_argmax: the largest logit of a draft column, Markov bias included, without writing logits (spec/model.md section 11)."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import one_read, reference

IMPLEMENTATIONS = (
    Implementation("one_read", one_read.markov_argmax, one_read.ARCHES, one_read.refuses),
    Implementation("reference", reference.markov_argmax),
)


def _validate(base, embedded, weight, first):
    where = "markov_argmax: expected"
    if embedded.ndim != 2 or embedded.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{where} embedded bf16 or f32 [B, R], got {embedded.dtype} {embedded.shape}")
    rows, rank = embedded.shape
    if base.ndim != 2 or base.dtype != jnp.float32 or not 0 <= first <= base.shape[0] - rows:
        raise ValueError(f"{where} base f32[first + {rows} or more, V], got {base.dtype} {base.shape} and first = {first}")
    if weight.shape != (base.shape[1], rank):
        raise ValueError(f"{where} weight [{base.shape[1]}, {rank}], got {weight.shape}")


def markov_argmax(
    base,  # f32[N, V], logits without the bias; rows first .. first + B are the column's
    embedded,  # dtype[B, R], embedding of the token before
    weight,  # bf16[V, R] or f32[V, R]
    *,
    first: int = 0,
    impl: str = "auto",
    arch: str | None = None,
):
    """i32[B]: argmax over v of base[first + b, v] + sum_r embedded[b, r] * weight[v, r], summed in fp32.

    The lowest index of equals, -0 and 0 being equal; where there are NaN the first of them (`ordering.argmax`). The other rows
    of `base` are not read, and a row's result does not depend on other rows.
    Raises ValueError for shapes or dtypes that do not fit. Source: spec/model.md section 11, spec/decode.md B2."""
    _validate(base, embedded, weight, first)
    chosen, _ = resolve("markov_argmax", IMPLEMENTATIONS, impl, arch, base, embedded, weight, first=first)
    return chosen.run(base, embedded, weight, first=first)


def explain(base, embedded, weight, *, first: int = 0, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(base, embedded, weight, first)
    chosen, against = resolve("markov_argmax", IMPLEMENTATIONS, "auto", arch, base, embedded, weight, first=first)
    return {**against, "chosen": chosen.name}
