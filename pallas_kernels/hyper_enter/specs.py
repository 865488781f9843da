"""Shapes of a site's entry that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class HyperEnterSpec:
    """`rows` rows of `streams` streams of `hidden` channels; eps as released."""

    name: str
    rows: int
    hidden: int = 5120
    streams: int = 4
    eps: float = 1e-6

    @property
    def bytes(self) -> int:
        """The streams read once, the row written once."""
        return self.rows * (2 * self.streams * self.hidden + 4 * self.streams + 2 * self.hidden + 4) + 2 * self.hidden

    @property
    def flops(self) -> int:
        return self.rows * self.hidden * (4 * self.streams + 4)

    @property
    def options(self) -> dict:
        """The static keyword arguments of `hyper_enter`."""
        return {"eps": self.eps}

    def make_inputs(self, seed: int):
        """(streams bf16[T, M, H], pre f32[T, M], weight bf16[H])"""
        rng = np.random.default_rng(seed)
        streams = rng.standard_normal((self.rows, self.streams, self.hidden), np.float32) * 3
        pre = rng.uniform(0, 1, (self.rows, self.streams)).astype(np.float32)
        weight = rng.uniform(0.5, 1.5, self.hidden).astype(np.float32)
        return jnp.asarray(streams, jnp.bfloat16), jnp.asarray(pre), jnp.asarray(weight, jnp.bfloat16)


SPECS = (
    HyperEnterSpec("tiny", 5, hidden=96, streams=2),
    HyperEnterSpec("one_row", 1),
    HyperEnterSpec("verify", 384),
    HyperEnterSpec("draft", 320),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_pass

    s = BY_NAME[name]
    shape = jax.ShapeDtypeStruct
    arguments = (shape((s.rows, s.streams, s.hidden), jnp.bfloat16), shape((s.rows, s.streams), jnp.float32),
                 shape((s.hidden,), jnp.bfloat16))  # fmt: skip
    return (lambda *a: one_pass.hyper_enter(*a, **s.options)), arguments
