"""Shapes of the index query that tests and benchmarks share."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ..codecs import index_record_bytes


@dataclasses.dataclass(frozen=True)
class IndexQuerySpec:
    """`rows` rows of `heads` index heads with `dim` channels each, `behind` columns of main queries behind them."""

    name: str
    rows: int
    form: str = "packed"
    heads: int = 32
    dim: int = 128
    rotary: int = 64
    behind: int = 32768
    goal_us: float | None = None

    @property
    def bytes(self) -> int:
        """Index columns, head product and angles of every row read once, queries and weights written once."""
        channels = self.heads * self.dim
        out = self.heads * index_record_bytes(self.dim) if self.form == "packed" else 2 * channels
        return self.rows * (2 * channels + out + 6 * self.heads + 4 * self.rotary)

    @property
    def flops(self) -> int:
        return self.rows * self.heads * self.dim * 8

    @property
    def options(self) -> dict:
        """The static keyword arguments of `index_query`."""
        return {"heads": self.heads, "dim": self.dim, "form": self.form}

    def make_inputs(self, seed: int):
        """(projected bf16, product f32, cos f32, sin f32): rows and groups of different magnitudes, a zero row."""
        rng = np.random.default_rng(seed)
        projected = rng.standard_normal((self.rows, self.heads * self.dim + self.behind), np.float32)
        groups = projected[:, : self.heads * self.dim].reshape(self.rows, -1, 32)
        groups *= np.exp2(rng.integers(-6, 7, groups.shape[:2])[..., None], dtype=np.float32)
        projected[-1] = 0
        angle = rng.uniform(-np.pi, np.pi, (self.rows, self.rotary // 2))
        as_f32 = lambda x: jnp.asarray(x, jnp.float32)
        return (jnp.asarray(projected, jnp.bfloat16), as_f32(rng.standard_normal((self.rows, self.heads))),
                as_f32(np.cos(angle)), as_f32(np.sin(angle)))  # fmt: skip


SPECS = (
    IndexQuerySpec("tiny", 5, heads=4, dim=64, rotary=16, behind=96),
    IndexQuerySpec("tiny_values", 5, "values", heads=4, dim=64, rotary=16, behind=96),
    IndexQuerySpec("verify", 384, goal_us=4),
    IndexQuerySpec("verify_values", 384, "values", goal_us=4),
    IndexQuerySpec("one_request", 6),
)
BY_NAME = {s.name: s for s in SPECS}
