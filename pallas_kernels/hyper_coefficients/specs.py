"""Shapes of a site's coefficients that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .api import Static


@dataclasses.dataclass(frozen=True)
class HyperCoefficientsSpec:
    """`rows` rows of `parts` partial products of a deviation for `streams` streams; iterations and eps as released."""

    name: str
    rows: int
    parts: int = 3
    streams: int = 4
    iterations: int = 20
    eps: float = 1e-6
    deviation: float = 4.0

    @property
    def static(self) -> Static:
        return Static(self.streams, self.iterations, self.eps)

    @property
    def bytes(self) -> int:
        """Every product read once, every coefficient written once."""
        return 4 * (self.rows * (self.static.width * (self.parts + 1) + 1) + self.static.width + 3)

    @property
    def flops(self) -> int:
        return self.rows * (4 * self.iterations * self.streams**2 + self.static.width * (self.parts + 6))

    @property
    def options(self) -> dict:
        """The static keyword arguments of `hyper_coefficients`."""
        return dataclasses.asdict(self.static)

    def make_inputs(self, seed: int):
        """(products f32[T, parts * N], r f32[T], scale f32[3], base f32[N])"""
        rng, n = np.random.default_rng(seed), self.static.width
        products = rng.standard_normal((self.rows, self.parts, n)) * self.deviation * 2.0 ** (-8.0 * np.arange(self.parts)[:, None])
        made = (products.reshape(self.rows, -1), rng.uniform(0.1, 0.6, self.rows), rng.uniform(0.5, 1.5, 3),
                rng.standard_normal(n))  # fmt: skip
        return tuple(jnp.asarray(x, jnp.float32) for x in made)


SPECS = (
    HyperCoefficientsSpec("tiny", 32, streams=2),
    HyperCoefficientsSpec("one_part", 32, parts=1, iterations=1),
    HyperCoefficientsSpec("steep", 32, deviation=80.0),
    HyperCoefficientsSpec("verify", 384),
    HyperCoefficientsSpec("draft", 320),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_kernel

    s = BY_NAME[name]
    shape = lambda *d: jax.ShapeDtypeStruct(d, jnp.float32)
    arguments = (shape(s.rows, s.parts * s.static.width), shape(s.rows), shape(3), shape(s.static.width))
    return (lambda *a: one_kernel.hyper_coefficients(*a, static=s.static)), arguments
