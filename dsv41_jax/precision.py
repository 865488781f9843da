"""The three precisions (spec/design.md, "Rules that are pinned by tests")."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Precision:
    """What is rounded where.

    dtype: activations between operators. quantise_activations: FP8 inputs of FP8/FP4 linears. quantise_cache: the
    record formats of the pools and of the index queries; off, pools hold float32 values.
    """

    name: str
    dtype: jnp.dtype
    quantise_activations: bool
    quantise_cache: bool


RELEASED = Precision("released", jnp.dtype(jnp.bfloat16), True, True)
FLOAT32_CACHE = Precision("float32_cache", jnp.dtype(jnp.float32), False, True)
FLOAT32 = Precision("float32", jnp.dtype(jnp.float32), False, False)
PRECISIONS = {p.name: p for p in (RELEASED, FLOAT32_CACHE, FLOAT32)}


def precision(name: str) -> Precision:
    """By name. Raises ValueError naming the three."""
    if name not in PRECISIONS:
        raise ValueError(f"precision: expected one of {sorted(PRECISIONS)}, got {name!r}")
    return PRECISIONS[name]
