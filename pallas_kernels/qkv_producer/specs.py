"""Shapes of the merged producer that tests and benchmarks share: those of the window store, with queries ahead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..window_store import specs as window_store


@dataclasses.dataclass(frozen=True)
class QkvProducerSpec(window_store.WindowStoreSpec):
    """`first` columns are query latents; round_trip: they leave as QB multiplies them."""

    round_trip: bool = True

    @property
    def bytes(self) -> int:
        """As the window store; query latents read once and written once, their norm read once."""
        return super().bytes + 4 * self.rows * self.first + 2 * self.first

    @property
    def flops(self) -> int:
        return super().flops + 8 * self.rows * self.first

    @property
    def options(self) -> dict:
        """The static keyword arguments of `qkv_producer`."""
        return {"eps": self.eps, "round_trip": self.round_trip}

    def make_inputs(self, seed: int):
        """(pool u8, front bf16, query_norm bf16, norm bf16, cos f32, sin f32, slots i32, positions i32). Query latents are
        sixteenths, so that the sum of their squares is exact in any order; no two rows have the same."""
        pool, front, *rest = super().make_inputs(seed)
        rng = np.random.default_rng(seed + 1000)
        latents = rng.integers(-64, 65, (self.rows, self.first)) / 16
        latents[-1] = 0
        query_norm = jnp.asarray(rng.uniform(0.5, 1.5, self.first), jnp.bfloat16)
        return pool, front.at[:, : self.first].set(jnp.asarray(latents, front.dtype)), query_norm, *rest


SPECS = (
    QkvProducerSpec("tiny", 3, 5, dim=64, rotary=16, first=96, ring=24, skips=True),
    QkvProducerSpec("tiny_exact", 1, 3, dim=64, rotary=16, first=64, ring=24, round_trip=False),
    QkvProducerSpec("verify", 64, 6),
    QkvProducerSpec("draft", 64, 5),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function with a donated pool, abstract arguments) for a compile without a GPU."""
    from . import one_launch

    s = BY_NAME[name]
    _, (pool, front, norm, *rest) = window_store.deviceless_case(name)
    query_norm = jax.ShapeDtypeStruct((s.first,), jnp.bfloat16)
    return jax.jit(lambda *a: one_launch.qkv_producer(*a, **s.options), donate_argnums=0), (pool, front, query_norm, norm, *rest)
