"""Feature switches of the decode path, and which implementation each operator gets (spec/design.md, "Switches")."""

import dataclasses
import os
from collections.abc import Mapping

OPERATORS = ("block_scaled_matmul", "candidate_blocks", "experts", "fp8_round_trip", "hyper_coefficients", "hyper_enter",
             "index_score", "index_score_blocks", "router", "select_tokens", "sparse_attention", "sparse_plan")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """What is on. Every combination computes the same function.

    implementations: ((operator, implementation), ...) overrides; others use `default_implementation`, "auto" = fastest
        that takes the device and the shapes, "reference" = plain XLA.
    fake_balance_experts: replace routing by the balanced assignment of the reference benchmark (changes outputs; only for
        benchmarks, which must report it).
    """

    default_implementation: str = "auto"
    implementations: tuple[tuple[str, str], ...] = ()
    fake_balance_experts: bool = False

    def __post_init__(self):
        unknown = [op for op, _ in self.implementations if op not in OPERATORS]
        if unknown:
            raise ValueError(f"options: implementations expected operators among {list(OPERATORS)}, got {unknown}")

    def impl(self, op: str) -> str:
        """The `impl` argument of an operator's api."""
        return dict(self.implementations).get(op, self.default_implementation)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "DecodeOptions":
        """Read once, at the command line. FAKE_BALANCE_EXPERT=0|1; DSV41_IMPL=auto|reference;
        DSV41_IMPL_<OPERATOR>=name. Raises ValueError for other values."""
        overrides = tuple((op, env[f"DSV41_IMPL_{op.upper()}"]) for op in OPERATORS if f"DSV41_IMPL_{op.upper()}" in env)
        return cls(
            default_implementation=env.get("DSV41_IMPL", "auto"),
            implementations=overrides,
            fake_balance_experts=_flag(env, "FAKE_BALANCE_EXPERT"),
        )


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
