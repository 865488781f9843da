"""Shapes of the window store that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..codecs import window_record_bytes


@dataclasses.dataclass(frozen=True)
class WindowStoreSpec:
    """`requests` of `span` rows each; `first` columns of queries before the `dim` of KV in a row; one padding request and
    one row past the pool among several requests where `skips`."""

    name: str
    requests: int
    span: int
    dim: int = 512
    rotary: int = 64
    first: int = 1280
    ring: int = 256
    skips: bool = False
    eps: float = 1e-20

    @property
    def rows(self) -> int:
        return self.requests * self.span

    @property
    def slots(self) -> int:
        return self.requests + 2

    @property
    def bytes(self) -> int:
        """KV columns, angles and targets of every row read once, its record written once."""
        row = 2 * self.dim + 4 * self.rotary + 8 + window_record_bytes(self.dim)
        return self.rows * row + 2 * self.dim

    @property
    def flops(self) -> int:
        return self.rows * self.dim * 8

    @property
    def options(self) -> dict:
        """The static keyword arguments of `window_store`."""
        return {"first": self.first, "eps": self.eps}

    def make_inputs(self, seed: int):
        """(pool u8, front bf16, norm bf16, cos f32, sin f32, slots i32, positions i32); rows of different magnitudes, a
        zero row, requests in permuted slots at positions round the ring."""
        rng = np.random.default_rng(seed)
        pool = rng.integers(0, 256, (self.slots, self.ring, window_record_bytes(self.dim)), np.uint8)
        scale = 2.0 ** rng.integers(-6, 7, (self.rows, 1))
        front = rng.standard_normal((self.rows, self.first + self.dim)) * scale
        front[-1] = 0
        angle = rng.uniform(-np.pi, np.pi, (self.rows, self.rotary // 2))
        slots = np.repeat(rng.permutation(self.slots)[: self.requests], self.span)
        start = rng.integers(0, 4 * self.ring, self.requests)
        positions = (start[:, None] + np.arange(self.span)).reshape(-1)
        if self.skips:
            slots[: self.span], positions[: self.span] = -1, -1
            slots[self.span], slots[self.span + 1] = self.slots, -7
        as_f32, as_i32 = (lambda x: jnp.asarray(x, jnp.float32)), (lambda x: jnp.asarray(x, jnp.int32))
        return (jnp.asarray(pool), jnp.asarray(front, jnp.bfloat16), jnp.asarray(rng.uniform(0.5, 1.5, self.dim), jnp.bfloat16),
                as_f32(np.cos(angle)), as_f32(np.sin(angle)), as_i32(slots), as_i32(positions))  # fmt: skip


SPECS = (
    WindowStoreSpec("tiny", 3, 5, dim=64, rotary=16, first=32, ring=24, skips=True),
    WindowStoreSpec("one_row", 1, 1),
    WindowStoreSpec("verify", 64, 6),
    WindowStoreSpec("draft", 64, 5),
    WindowStoreSpec("commit", 64, 6, first=0),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function with a donated pool, abstract arguments) for a compile without a GPU."""
    from . import one_pass

    s = BY_NAME[name]
    shape = jax.ShapeDtypeStruct
    angles, row = shape((s.rows, s.rotary // 2), jnp.float32), shape((s.rows,), jnp.int32)
    arguments = (shape((s.slots, s.ring, window_record_bytes(s.dim)), jnp.uint8),
                 shape((s.rows, s.first + s.dim), jnp.bfloat16), shape((s.dim,), jnp.bfloat16), angles, angles, row,
                 row)  # fmt: skip
    return jax.jit(lambda *a: one_pass.window_store(*a, **s.options), donate_argnums=0), arguments
