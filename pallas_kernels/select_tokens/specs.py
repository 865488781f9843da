"""Shapes of select_tokens that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..ordering import sample_scores
from .reference import SlotMap


@dataclasses.dataclass(frozen=True)
class SelectSpec:
    """kind: "random" normal scores, or "near_equal" (three neighbouring bf16 values, so the cut is a huge tie).

    sparse: columns are compact candidate columns of width / 8 blocks, chosen from twice as many. slots: also map to
    physical slots, pages of 128 entries. end: live columns, None = all of them.
    """

    name: str
    rows: int
    width: int
    k: int = 512
    kind: str = "random"
    sparse: bool = False
    slots: bool = False
    end: int | None = None
    goal_us: float | None = None  # first goal of spec/performance.md on one H200
    reference_us: float | None = None  # the reference system's figure on its B300
    spill_bytes: int = 0  # most the kernel may spill (80 registers a thread: three rows share an SM)

    @property
    def bytes(self) -> int:
        """Each live score and block id read once, each output written once."""
        live = self.width if self.end is None else self.end
        ids = 4 * (live // 8) + 4 if self.sparse else 0
        return self.rows * (2 * live + 4 + ids + 4 * self.k * (2 if self.slots else 1))

    @property
    def flops(self) -> int:
        return 0

    def make_inputs(self, seed: int):
        """(positional, keyword) arguments of `select_tokens` except k, on the default device."""
        rng = np.random.default_rng(seed)
        scores = sample_scores(rng, self.rows, self.width, self.kind)
        live = self.width if self.end is None else self.end
        end = np.full(self.rows, live, np.int32)
        kwargs = {}
        if self.sparse:
            blocks = self.width // 8
            ids = np.stack([np.sort(rng.permutation(2 * blocks)[:blocks]) for _ in range(self.rows)])
            kwargs["block_ids"] = jnp.asarray(ids, jnp.int32)
            kwargs["causal"] = jnp.full((self.rows,), 2 * self.width, jnp.int32)
        if self.slots:
            pages = 2 * self.width // 128
            requests = max(self.rows // 6, 1)
            table = 1 + rng.permutation(requests * pages).reshape(requests, pages)
            request = np.minimum(np.arange(self.rows) // 6, requests - 1)
            kwargs["slot_map"] = SlotMap(jnp.asarray(table, jnp.int32), jnp.asarray(request, jnp.int32), 128)
        return (jnp.asarray(scores, jnp.bfloat16), jnp.asarray(end)), kwargs


SPECS = (
    SelectSpec("tiny", 3, 256, 32),
    SelectSpec("tiny_sparse", 3, 256, 32, sparse=True, slots=True),
    SelectSpec("verify_reindex", 384, 16384, sparse=True, goal_us=16, reference_us=26.16),
    SelectSpec("verify_reindex_near_equal", 384, 16384, kind="near_equal", sparse=True, goal_us=16, reference_us=25.94),
    SelectSpec("verify_reindex_slots", 384, 16384, sparse=True, slots=True),
    SelectSpec("verify_full2", 384, 16384, goal_us=16),
    SelectSpec("verify_full2_near_equal", 384, 16384, kind="near_equal", goal_us=16),
    SelectSpec("verify_full1", 384, 33792, goal_us=40),
    SelectSpec("verify_full1_near_equal", 384, 33792, kind="near_equal", goal_us=40),
)
BY_NAME = {s.name: s for s in SPECS}


def abstract_inputs(spec: SelectSpec):
    """make_inputs' shapes and dtypes, without making the values."""
    return jax.eval_shape(lambda: spec.make_inputs(0))


def deviceless_case(name: str):
    """"spec/implementation" for the deviceless compile -> (function, arguments)."""
    from .api import select_tokens

    name, _, impl = name.partition("/")
    spec = BY_NAME[name]
    args, kwargs = abstract_inputs(spec)
    return (lambda a, kw: select_tokens(*a, **kw, k=spec.k, impl=impl)), (args, kwargs)
