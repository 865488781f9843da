"""Shapes of the greedy draft choice that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class MarkovArgmaxSpec:
    """`rows` requests, the second of `columns` draft columns."""

    name: str
    rows: int
    vocabulary: int = 129280
    rank: int = 256
    columns: int = 2

    @property
    def first(self) -> int:
        return self.rows

    @property
    def bytes(self) -> int:
        """The column's logits, embeddings and weights read once, a token written for each row."""
        return 4 * self.rows * self.vocabulary + 2 * self.rank * (self.rows + self.vocabulary) + 4 * self.rows

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.vocabulary * self.rank

    @property
    def options(self) -> dict:
        """The static keyword arguments of `markov_argmax`."""
        return {"first": self.first}

    def make_inputs(self, seed: int):
        """(base f32[columns * B, V], embedded bf16[B, R], weight bf16[V, R]), small integers: every sum is exact. Of
        the column's rows 0 has NaN behind an infinity, 1 nothing but -0, 0 and no bias; every second one from 2 on has its
        largest logit three times."""
        rng = np.random.default_rng(seed)
        base = rng.integers(-40, 41, (self.columns * self.rows, self.vocabulary)).astype(np.float32)
        embedded = rng.integers(-2, 3, (self.rows, self.rank))
        own = base[self.first :]
        own[0, self.vocabulary // 5], own[0, self.vocabulary // 3 :: 7] = np.inf, np.nan
        own[1], embedded[1] = -0.0, 0
        own[1, self.vocabulary // 2] = 0.0
        for row in range(2, self.rows, 2):
            own[row, rng.integers(0, self.vocabulary, 3)], embedded[row] = 50, 0
        weight = rng.integers(-2, 3, (self.vocabulary, self.rank))
        return jnp.asarray(base), jnp.asarray(embedded, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


SPECS = (
    MarkovArgmaxSpec("tiny", 16, 1000, 32),
    MarkovArgmaxSpec("draft", 64),
    MarkovArgmaxSpec("few", 5, 1000, 32),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_read

    s = BY_NAME[name]
    shape = jax.ShapeDtypeStruct
    run = lambda *a: one_read.markov_argmax(*a, **s.options)
    return run, (shape((s.columns * s.rows, s.vocabulary), jnp.float32), shape((s.rows, s.rank), jnp.bfloat16),
                 shape((s.vocabulary, s.rank), jnp.bfloat16))  # fmt: skip
