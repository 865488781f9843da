"""Shapes of the Sinkhorn normalisation that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class SinkhornSpec:
    """`rows` matrices of `streams` x `streams`; deviation of the logits; eps as released."""

    name: str
    rows: int
    streams: int = 4
    iterations: int = 20
    deviation: float = 1.5
    eps: float = 1e-6

    @property
    def bytes(self) -> int:
        """Every entry read once and written once."""
        return 8 * self.rows * self.streams**2

    @property
    def flops(self) -> int:
        return 4 * self.iterations * self.rows * self.streams**2

    @property
    def options(self) -> dict:
        """The static keyword arguments of `sinkhorn`."""
        return {"iterations": self.iterations, "eps": self.eps}

    def make_inputs(self, seed: int):
        """(logits f32[T, M, M],)"""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.rows, self.streams, self.streams), np.float32) * self.deviation
        return (jnp.asarray(x),)


SPECS = (
    SinkhornSpec("tiny", 32),
    SinkhornSpec("one_iteration", 64, iterations=1),
    SinkhornSpec("steep", 64, deviation=30.0),
    SinkhornSpec("verify", 384),
    SinkhornSpec("draft", 320),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_kernel

    spec = BY_NAME[name]
    x = jax.ShapeDtypeStruct((spec.rows, spec.streams, spec.streams), jnp.float32)
    return (lambda x: one_kernel.sinkhorn(x, **spec.options)), (x,)
