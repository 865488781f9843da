"""Shapes of candidate_blocks that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..ordering import sample_scores


@dataclasses.dataclass(frozen=True)
class CandidateSpec:
    """kind: "random" normal scores, or "near_equal" (three neighbouring bf16 values)."""

    name: str
    rows: int
    width: int
    k_blocks: int = 2048
    kind: str = "random"
    flags: bool = False
    visible: int | None = None  # None = all
    goal_us: float | None = None
    reference_us: float | None = None

    @property
    def bytes(self) -> int:
        """Each visible score read once, each output written once."""
        live = self.width if self.visible is None else self.visible
        flags = self.width // 8 if self.flags else 0
        return self.rows * (2 * live + 4 + 4 * self.k_blocks + 4 + flags)

    @property
    def flops(self) -> int:
        return 0

    def make_inputs(self, seed: int):
        """(positional, keyword) arguments of `candidate_blocks` except k_blocks and flags."""
        rng = np.random.default_rng(seed)
        live = self.width if self.visible is None else self.visible
        scores = jnp.asarray(sample_scores(rng, self.rows, live, self.kind), jnp.bfloat16)
        scores = jnp.pad(scores, [(0, 0), (0, self.width - live)], constant_values=jnp.nan)  # nobody may see those
        return (scores, jnp.full((self.rows,), live, jnp.int32)), {}


SPECS = (
    CandidateSpec("tiny", 3, 256, 16, flags=True),
    CandidateSpec("verify_full1", 384, 33792),
    CandidateSpec("verify_full1_near_equal", 384, 33792, kind="near_equal"),
    CandidateSpec("verify_full1_flags", 384, 33792, flags=True),
    CandidateSpec("verify_full1_half_full", 384, 33792, visible=20000),
    CandidateSpec("verify_1m", 384, 1 << 20, visible=32768),
    CandidateSpec("long_1m", 64, 1 << 20),
)
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """"spec/implementation" for the deviceless compile -> (function, arguments)."""
    from .api import candidate_blocks

    name, _, impl = name.partition("/")
    spec = BY_NAME[name]
    args, kwargs = jax.eval_shape(lambda: spec.make_inputs(0))
    static = {"k_blocks": spec.k_blocks, "flags": spec.flags, "impl": impl}
    return (lambda a, kw: candidate_blocks(*a, **kw, **static)), (args, kwargs)
