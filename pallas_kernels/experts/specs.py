"""Shapes of the routed experts that tests and benchmarks share."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ..codecs import cdiv


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """routing: "uniform" (k distinct random experts), "balanced" (equal rows per expert), "one" (every row's first
    choice is expert 0, the others share the rest), "skewed" (a few experts take most rows)."""

    name: str
    rows: int
    hidden: int
    width: int
    local: int
    k: int
    routing: str = "uniform"
    total: int = 0  # experts that ids range over; 0 = local
    first: int = 0

    @property
    def weight_bytes(self) -> int:
        """Packed weights and scales of all local experts."""
        return self.local * 3 * self.hidden * self.width * 17 // 32

    @property
    def bytes(self) -> int:
        """Every weight once, x in, f32 result out; intermediates are not counted."""
        return self.weight_bytes + self.rows * (6 * self.hidden + 8 * self.k)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * 3 * self.hidden * self.width * self.local // (self.total or self.local)

    def make_routing(self, rng):
        """ids i32[T, K] distinct in a row, weights f32[T, K] that sum to 1.5."""
        total = self.total or self.local
        if self.routing == "balanced":
            ids = (np.arange(self.rows * self.k) % total).reshape(self.rows, self.k)
            ids = rng.permutation(total)[ids]
        else:
            p = np.ones(total)
            if self.routing == "skewed":
                p[: cdiv(total, 16)] = 16.0
            ids = np.argsort(-(np.log(p) + rng.gumbel(size=(self.rows, total))), axis=1)[:, : self.k]
            if self.routing == "one":
                ids = np.where((ids == 0).any(1, keepdims=True), ids, np.c_[np.zeros(self.rows, int), ids[:, 1:]])
        w = rng.uniform(0.2, 1.0, ids.shape)
        return ids.astype(np.int32), (1.5 * w / w.sum(1, keepdims=True)).astype(np.float32)

    def make_inputs(self, seed: int):
        """The seven array arguments of `experts`, random; scales spread over five octaves, g and v reach the clamp."""
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal((self.rows, self.hidden), np.float32), jnp.bfloat16)
        ids, weights = self.make_routing(rng)

        def packed(out, inner):
            return jnp.asarray(rng.integers(0, 256, (self.local, out, inner // 2), np.uint8))

        def scales(out, inner):
            top = 127 - round(np.log2(inner) / 2) + 1  # rows of unit-scale x give values of a few units
            return jnp.asarray(rng.integers(top - 4, top + 1, (self.local, out, inner // 32)).astype(np.uint8))

        h, f = self.hidden, self.width
        return x, jnp.asarray(ids), jnp.asarray(weights), packed(2 * f, h), scales(2 * f, h), packed(h, f), scales(h, f)


TINY = (
    ExpertsSpec("tiny", 6, 128, 64, 16, 3),
    ExpertsSpec("tiny_one_row", 1, 128, 64, 16, 3),
    ExpertsSpec("tiny_one_expert", 24, 128, 64, 4, 1, "one"),
    ExpertsSpec("tiny_slice", 40, 128, 64, 8, 3, "uniform", total=32, first=8),
    ExpertsSpec("tiny_wide", 70, 256, 128, 5, 3, "skewed"),
)
FULL = (
    ExpertsSpec("verify_balanced", 384, 5120, 2304, 96, 6, "balanced"),
    ExpertsSpec("verify_uniform", 384, 5120, 2304, 96, 6, "uniform"),
    ExpertsSpec("verify_skewed", 384, 5120, 2304, 96, 6, "skewed"),
    ExpertsSpec("draft", 320, 5120, 2304, 32, 3, "uniform"),
    ExpertsSpec("one_row", 1, 5120, 2304, 96, 6, "uniform"),
    ExpertsSpec("prefill", 1536, 5120, 2304, 96, 6, "uniform"),
)
SPECS = TINY + FULL


def deviceless_case(name: str):
    """"<FULL spec>:hopper[:parts]" or "<FULL spec>:blackwell[:parts]" -> (function, abstract arguments) for a deviceless
    compile."""
    import functools
    import os

    import jax

    from . import blackwell, hopper, layout

    name, impl, *parts = name.split(":")
    spec = next(s for s in FULL if s.name == name)
    e, h, f, t, k = spec.local, spec.hidden, spec.width, spec.rows, spec.k
    shape = jax.ShapeDtypeStruct
    shapes = (e, 2 * f, h // 2), (e, 2 * f, h // 32), (e, h, f // 2), (e, h, f // 32)
    tensors = tuple(shape(s, jnp.uint8) for s in shapes)
    run = functools.partial(blackwell.experts_parts, capability=int(os.environ["DEVICELESS_CAPABILITY"]))
    if impl == "hopper":
        tensors, run = jax.eval_shape(layout.shuffle_weights, *tensors), hopper.experts_parts
    run = functools.partial(run, parts=int(*parts) or 1, spare_sms=8)
    return run, (shape((t, h), jnp.bfloat16), shape((t, k), jnp.int32), shape((t, k), jnp.float32), *tensors)
