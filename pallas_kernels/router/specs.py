"""Shapes of the router that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    name: str
    rows: int
    hidden: int
    experts: int
    k: int
    scale: float = 1.5

    @property
    def bytes(self) -> int:
        """Each input read once, each output written once (bf16 x and gate)."""
        return 2 * self.hidden * (self.rows + self.experts) + 4 * self.experts + 8 * self.rows * self.k

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.hidden * self.experts

    def make_inputs(self, seed: int):
        """(x bf16[T, H], gate bf16[E, H], bias f32[E]), random; scores spread over softplus's bend."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.rows, self.hidden), np.float32)
        gate = rng.standard_normal((self.experts, self.hidden), np.float32) * (3 / self.hidden**0.5)
        bias = rng.uniform(-0.2, 0.2, self.experts).astype(np.float32)
        return jnp.asarray(x, jnp.bfloat16), jnp.asarray(gate, jnp.bfloat16), jnp.asarray(bias)


SPECS = (
    RouterSpec("tiny", 6, 128, 16, 3),
    RouterSpec("one_row", 1, 128, 16, 3),
    RouterSpec("verify", 384, 5120, 384, 6),
    RouterSpec("verify_96", 384, 5120, 96, 6),
    RouterSpec("draft", 320, 5120, 128, 3),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name, or that and a kernel's module after a colon -> (function, abstract arguments) for a compile without a GPU."""
    from . import one_kernel, two_kernels

    name, _, module = name.partition(":")
    run = (two_kernels if module == "two_kernels" else one_kernel).router
    s = BY_NAME[name]
    shape = jax.ShapeDtypeStruct
    arguments = (shape((s.rows, s.hidden), jnp.bfloat16), shape((s.experts, s.hidden), jnp.bfloat16),
                 shape((s.experts,), jnp.float32))  # fmt: skip
    return (lambda *a: run(*a, k=s.k, scale=s.scale, precision="released")), arguments
