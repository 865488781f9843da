"""Shapes of a site's exit that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..hyper_coefficients.api import Static
from . import reference


@dataclasses.dataclass(frozen=True)
class HyperLeaveSpec:
    """`rows` rows of `streams` streams of `hidden` channels; eps and iterations as released. split: fn in its parts;
    round_trip: the entry's rows are wanted through FP8 too."""

    name: str
    rows: int
    hidden: int = 5120
    streams: int = 4
    eps: float = 1e-6
    iterations: int = 20
    mix_eps: float = 1e-6
    split: bool = True
    round_trip: bool = False

    @property
    def coefficients(self) -> int:
        return self.streams * (2 + self.streams)

    @property
    def bytes(self) -> int:
        """From site to site: the streams read and written once, y and fn read, the normalised row written, once more
        where it is wanted through FP8; coefficients read and written."""
        row = 2 * self.hidden * (2 * self.streams + 2 + self.round_trip) + 4 * 2 * self.coefficients
        return self.rows * row + self.hidden * ((6 if self.split else 4) * self.coefficients * self.streams + 2)

    @property
    def flops(self) -> int:
        """Products with the three parts of fn; the rest has no tensor core."""
        return 2 * self.rows * self.hidden * self.streams * 3 * self.coefficients

    @property
    def options(self) -> dict:
        """The static keyword arguments of `site_to_site`."""
        return {"eps": self.eps, "iterations": self.iterations, "mix_eps": self.mix_eps, "round_trip": self.round_trip}

    def make_inputs(self, seed: int):
        """(streams bf16[T, M, H], y bf16[T, H], post f32[T, M], comb f32[T, M, M], pre f32[T, M], fn f32[N, M * H] or
        bf16[3 * N, M * H], weight bf16[H], scale f32[3], base f32[N])"""
        rng, (t, m, h) = np.random.default_rng(seed), (self.rows, self.streams, self.hidden)
        comb = rng.uniform(0, 1, (t, m, m))
        made = (rng.standard_normal((t, m, h)) * 3, rng.standard_normal((t, h)), rng.uniform(0, 2, (t, m)),
                comb / comb.sum(1, keepdims=True), rng.uniform(0, 1, (t, m)),
                rng.standard_normal((self.coefficients, m * h)) / (m * h) ** 0.5, rng.uniform(0.5, 1.5, h),
                rng.uniform(0.5, 1.5, 3), rng.standard_normal(self.coefficients))  # fmt: skip
        bf16 = (0, 1, 6)
        made = [jnp.asarray(x, jnp.bfloat16 if i in bf16 else jnp.float32) for i, x in enumerate(made)]
        if self.split:
            made[5] = reference.split(made[5])
        return tuple(made)


SPECS = (
    HyperLeaveSpec("tiny", 20, hidden=96, streams=2, iterations=2),  # less than a tile of rows
    HyperLeaveSpec("tiny_wide", 128, hidden=512, split=False),
    HyperLeaveSpec("verify", 384),
    HyperLeaveSpec("draft", 320),
    HyperLeaveSpec("verify_round_trip", 384, round_trip=True),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from . import fused

    s = BY_NAME[name]
    t, m, h = s.rows, s.streams, s.hidden
    bf16, f32 = (lambda *d: jax.ShapeDtypeStruct(d, jnp.bfloat16)), (lambda *d: jax.ShapeDtypeStruct(d, jnp.float32))

    def run(*arguments):
        streams, ahead = fused.hyper_leave(*arguments[:6])
        return streams, fused.finish(ahead, *arguments[6:], static=Static(m, s.iterations, s.mix_eps), eps=s.eps,
                                     round_trip=s.round_trip)  # fmt: skip

    return run, (bf16(t, m, h), bf16(t, h), f32(t, m), f32(t, m, m), f32(t, m), bf16(3 * s.coefficients, m * h), bf16(h),
                 f32(3), f32(s.coefficients))  # fmt: skip
