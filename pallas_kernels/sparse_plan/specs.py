"""Shapes of sparse_plan that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class PlanSpec:
    """Candidates are k random blocks of the row's visible ones; "ids" come shuffled, a fraction of them repeated."""

    name: str
    rows: int
    key_count: int
    k: int = 2048
    kind: str = "prefix"
    goal_us: float | None = None
    reference_us: float | None = None

    @property
    def blocks(self) -> int:
        return -(-self.key_count // 8)

    @property
    def bytes(self) -> int:
        """Candidates read once, outputs written once."""
        source = self.blocks if self.kind == "flags" else 4 * self.k + (4 if self.kind == "prefix" else 0)
        return self.rows * (source + 4 + 4 * self.k + 12)

    @property
    def flops(self) -> int:
        return 0

    def make_inputs(self, seed: int):
        """(positional, keyword) arguments of `sparse_plan` except key_count, k and kind."""
        rng = np.random.default_rng(seed)
        visible = rng.integers(self.key_count // 2, self.key_count + 1, self.rows).astype(np.int32)
        ids = np.full((self.rows, self.k), -1, np.int32)
        flags = np.zeros((self.rows, self.blocks), np.uint8)
        count = np.zeros(self.rows, np.int32)
        for r in range(self.rows):
            live = -(-int(visible[r]) // 8)
            count[r] = min(self.k, live)
            kept = np.sort(rng.choice(live, count[r], replace=False, shuffle=False))
            ids[r, : count[r]], flags[r, kept] = kept, 1
        if self.kind == "flags":
            return (jnp.asarray(flags), jnp.asarray(visible)), {}
        if self.kind == "prefix":
            return (jnp.asarray(ids), jnp.asarray(visible)), {"count": jnp.asarray(count)}
        repeated = rng.random(ids.shape) < 0.02
        ids = np.where(repeated, np.roll(ids, 1, axis=1), ids)
        return (jnp.asarray(rng.permuted(ids, axis=1)), jnp.asarray(visible)), {}


SPECS = (
    PlanSpec("tiny_prefix", 3, 250, 16),
    PlanSpec("tiny_flags", 3, 250, 16, "flags"),
    PlanSpec("tiny_ids", 3, 250, 16, "ids"),
    PlanSpec("verify_prefix", 384, 33792, goal_us=12, reference_us=12.17),
    PlanSpec("verify_flags", 384, 33792, kind="flags", goal_us=12, reference_us=12.17),
    PlanSpec("verify_ids", 384, 33792, kind="ids", goal_us=12, reference_us=12.17),
    PlanSpec("long_ids", 384, 2**20, kind="ids"),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """A spec's kernel for the deviceless compile: (function, arguments)."""
    from .api import sparse_plan

    spec = BY_NAME[name]
    args, kwargs = jax.eval_shape(lambda: spec.make_inputs(0))
    static = {"key_count": spec.key_count, "k": spec.k, "kind": spec.kind, "impl": "bitmap_plan"}
    return (lambda a, kw: sparse_plan(*a, **kw, **static)), (args, kwargs)
