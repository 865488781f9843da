"""Shapes of the experts' plan that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .reference import max_tiles, sorted_size


@dataclasses.dataclass(frozen=True)
class ExpertPlanSpec:
    """`rows` rows of k of `total` experts (0 = local), of which `local` from `first` on are here.

    routing: "uniform" (distinct random experts), "one" (every row's first choice is expert `first`), "few" (only a
    quarter of the experts, so that most are empty).
    """

    name: str
    rows: int
    k: int
    local: int
    tile_rows: int
    routing: str = "uniform"
    total: int = 0
    first: int = 0

    @property
    def bytes(self) -> int:
        """Ids and weights read once; positions, sorted tokens and weights, tiles and the count written once."""
        slots = self.rows * self.k
        size, most = (f(slots, self.local, self.tile_rows) for f in (sorted_size, max_tiles))
        return 4 * (3 * slots + 2 * size + 4 * most + 1)

    @property
    def flops(self) -> int:
        return 0

    @property
    def options(self) -> dict:
        """The static keyword arguments of `expert_plan`."""
        return {"local": self.local, "tile_rows": self.tile_rows}

    def make_inputs(self, seed: int):
        """(ids i32[T, K], weights f32[T, K], first i32[])"""
        rng, total = np.random.default_rng(seed), self.total or self.local
        score = rng.uniform(size=(self.rows, total))
        if self.routing == "one":
            score[:, self.first] = 2.0
        if self.routing == "few":
            score[:, np.arange(total) % 4 != 1] -= 1.0
        ids = np.argsort(-score, axis=1)[:, : self.k]
        weights = rng.uniform(0.1, 1.0, ids.shape)
        return jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32), jnp.int32(self.first)


SPECS = (
    # one shape, so that tests compile it once
    ExpertPlanSpec("tiny", 40, 3, 5, 8),
    ExpertPlanSpec("tiny_empty", 40, 3, 5, 8, "few", total=20),
    ExpertPlanSpec("tiny_foreign", 40, 3, 5, 8, total=32, first=9),
    ExpertPlanSpec("tiny_none_here", 40, 3, 5, 8, total=5, first=5),
    ExpertPlanSpec("tiny_one_row", 1, 3, 12, 8),
    ExpertPlanSpec("tiny_all_on_one", 2304, 1, 4, 8, "one", total=1),
    ExpertPlanSpec("verify", 384, 6, 96, 32),
    ExpertPlanSpec("verify_on_one", 384, 6, 96, 32, "one"),
    ExpertPlanSpec("draft", 320, 3, 32, 64),
    ExpertPlanSpec("verify_2_ranks", 768, 6, 192, 32, total=384, first=192),
    ExpertPlanSpec("verify_4_ranks", 1536, 6, 96, 32, total=384, first=96),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """Spec name -> (function, abstract arguments) for a compile without a GPU."""
    from .counting_sort import expert_plan

    s = BY_NAME[name]
    shape = jax.ShapeDtypeStruct
    arguments = shape((s.rows, s.k), jnp.int32), shape((s.rows, s.k), jnp.float32), shape((), jnp.int32)
    return (lambda *a: expert_plan(*a, **s.options)), arguments
