"""Shapes of the clamped SwiGLU that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class SwigluSpec:
    """`rows` rows of `channels` results."""

    name: str
    rows: int
    channels: int = 2304
    round_trip: bool = True
    limit: float = 10.0

    @property
    def bytes(self) -> int:
        """Gate and up columns read once, a result written for each pair."""
        return 6 * self.rows * self.channels

    @property
    def flops(self) -> int:
        return 12 * self.rows * self.channels

    @property
    def options(self) -> dict:
        """The static keyword arguments of `swiglu`."""
        return {"limit": self.limit, "round_trip": self.round_trip}

    def make_inputs(self, seed: int):
        """(gate_up bf16[T, 2F],): groups of different magnitudes, values on both sides of the limit, zeros of both signs."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.rows, 2 * self.channels))
        x *= np.repeat(2.0 ** rng.integers(-9, 6, (self.rows, 2 * self.channels // 32)), 32, axis=1)
        x[0, :32] = np.where(np.arange(32) % 2, 0.0, -0.0)
        x[-1, 32:64], x[-1, self.channels : self.channels + 32] = self.limit, -2 * self.limit
        return (jnp.asarray(x, jnp.bfloat16),)


SPECS = (
    SwigluSpec("tiny", 6, 96),
    SwigluSpec("tiny_exact", 3, 64, round_trip=False),
    SwigluSpec("verify", 384),
    SwigluSpec("draft", 320),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_pass

    s = BY_NAME[name]
    return lambda x: one_pass.swiglu(x, **s.options), (jax.ShapeDtypeStruct((s.rows, 2 * s.channels), jnp.bfloat16),)
