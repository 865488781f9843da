"""Shapes of the FP8 round trip that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RoundTripSpec:
    name: str
    rows: int
    channels: int

    @property
    def bytes(self) -> int:
        """Every value read once and written once."""
        return 4 * self.rows * self.channels

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.channels

    @property
    def options(self) -> dict:
        """No static arguments."""
        return {}

    def make_inputs(self, seed: int):
        """(x bf16[T, I],): groups 12 octaves apart, ties, subnormal codes, zeros of both signs."""
        rng = np.random.default_rng(seed)
        scale = np.repeat(2.0 ** rng.integers(-9, 4, (self.rows, self.channels // 32)), 32, axis=1)
        x = rng.standard_normal((self.rows, self.channels)) * scale
        x[0, :32], x[0, 32:64] = np.arange(32) / 32 - 0.5, np.where(np.arange(32) % 2, 0.0, -0.0)
        x[-1, -32:] = np.resize([448.0, -448.0, 464.0, 1.0, 2.0**-6, 2.0**-9, 2.0**-10, -(2.0**-10)], 32)
        return (jnp.asarray(x, jnp.bfloat16),)


@dataclasses.dataclass(frozen=True)
class QuantiseSpec(RoundTripSpec):
    @property
    def bytes(self) -> int:
        """Every value read once; a code written for each and a scale for 32 of them."""
        return self.rows * (3 * self.channels + self.channels // 32)


SPECS = (
    RoundTripSpec("tiny", 3, 96),
    RoundTripSpec("front", 384, 5120),
    RoundTripSpec("qb", 384, 1280),
    RoundTripSpec("wo_b", 384, 8192),
)
QUANTISE_SPECS = (
    QuantiseSpec("quantise_tiny", 3, 96),
    QuantiseSpec("quantise_front", 384, 5120),
    QuantiseSpec("quantise_wo_b", 384, 8192),
    QuantiseSpec("quantise_experts_down", 2720, 2304),  # 384 rows on six of 96 experts each, gaps, a tile
)
BY_NAME = {s.name: s for s in SPECS + QUANTISE_SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_pass

    s = BY_NAME[name]
    shapes = jax.eval_shape(lambda: s.make_inputs(0))
    return one_pass.quantise if isinstance(s, QuantiseSpec) else one_pass.fp8_round_trip, shapes
