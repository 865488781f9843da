"""Feature switches of the decode path, and which implementation each operator gets (spec/design.md, "Switches")."""

import dataclasses
import importlib
import os
from collections.abc import Mapping

from pallas_kernels import registry

OPERATORS = ("block_scaled_matmul", "candidate_blocks", "expert_plan", "experts", "fp8_round_trip", "global_producer",
             "hyper_coefficients", "hyper_enter", "hyper_leave", "index_query", "index_score", "index_score_blocks",
             "markov_argmax", "qkv_producer", "router", "select_tokens", "sparse_attention", "sparse_plan", "swiglu", "window_store")  # fmt: skip


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
        DSV41_IMPL_<OPERATOR>=name. Raises ValueError for other values, unknown operators, and implementations that are not
        for the default device."""
        names = {f"DSV41_IMPL_{op.upper()}": op for op in OPERATORS}
        unknown = sorted(v for v in env if v.startswith("DSV41_IMPL_") and v not in names)
        if unknown:
            raise ValueError(f"{unknown[0]}: expected one of {', '.join(sorted(names))}")
        default = env.get("DSV41_IMPL", "auto")
        if default not in ("auto", "reference"):
            raise ValueError(f"DSV41_IMPL: expected auto or reference, got {default!r}")
        overrides = tuple((op, env[v]) for v, op in names.items() if v in env)
        for op, name in overrides:
            check_implementation(op, name, f"DSV41_IMPL_{op.upper()}")
        return cls(
            default_implementation=default,
            implementations=overrides,
            fake_balance_experts=_flag(env, "FAKE_BALANCE_EXPERT"),
        )


def check_implementation(op: str, name: str, where: str) -> None:
    """Raises ValueError, which begins with `where`, for a name that `op` has no implementation of, or none for this device."""
    module, table = ("index_score", "BLOCK_IMPLEMENTATIONS") if op == "index_score_blocks" else (op, "IMPLEMENTATIONS")
    known = {i.name: i for i in getattr(importlib.import_module(f"pallas_kernels.{module}.api"), table)}
    arch = registry.current_arch()
    if name != "auto" and name not in known:
        raise ValueError(f"{where}: expected one of {', '.join(['auto', *known])}, got {name!r}")
    if name != "auto" and known[name].arches and arch not in known[name].arches:
        raise ValueError(f"{where}: {name} is for {', '.join(known[name].arches)}, this device is {arch}")


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
