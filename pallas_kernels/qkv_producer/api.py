"""qkv_producer: what QB reads and what the window ring holds, from one product of both (spec/decode.md A8)."""

from ..codecs import GROUP
from ..registry import Implementation, resolve
from ..window_store.api import validate as validate_window
from . import apart, one_launch, reference

IMPLEMENTATIONS = (
    Implementation("one_launch", one_launch.qkv_producer, one_launch.ARCHES, one_launch.refuses,
                   by_name_only=one_launch.OPTIONAL),
    Implementation("apart", apart.qkv_producer, one_launch.ARCHES),
    Implementation("reference", reference.qkv_producer),
)  # fmt: skip


def _validate(pool, front, query_norm, norm, cos, sin, slots, positions):
    if query_norm.ndim != 1 or query_norm.shape[0] % GROUP:
        raise ValueError(f"qkv_producer: expected query_norm [Q], Q a multiple of {GROUP}, got {query_norm.shape}")
    validate_window(pool, front, norm, cos, sin, slots, positions, query_norm.shape[0], op="qkv_producer")


def qkv_producer(
    pool,  # u8[slots, ring, D + D/32] or f32[slots, ring, D]
    front,  # dtype[T, Q + D]: query latents, then window KV, both before their norms
    query_norm,  # bf16[Q] or f32[Q]
    norm,  # bf16[D] or f32[D]
    cos,  # f32[T, R/2]
    sin,  # f32[T, R/2]
    slots,  # i32[T], negative or beyond the pool = write nothing
    positions,  # i32[T]
    *,
    eps: float,
    round_trip: bool,
    impl: str = "auto",
    arch: str | None = None,
):
    """(pool, q dtype[T, Q]).

    q = RMSNorm(front[:, :Q]), rounded to dtype; round_trip: then through FP8 with one scale per 32 channels, as QB's product
    wants it. pool: `window_store` of the same rows with first = Q. Rows without a slot have queries like any other.
    A step without the merged launch runs the operators that "apart" is made of, each as its own options say (`merges`).
    Raises ValueError for shapes or dtypes that do not fit. Source: spec/model.md sections 4 and 5, spec/decode.md A8."""
    arguments = (pool, front, query_norm, norm, cos, sin, slots, positions)
    _validate(*arguments)
    chosen, _ = resolve("qkv_producer", IMPLEMENTATIONS, impl, arch, *arguments, eps=eps, round_trip=round_trip)
    return chosen.run(*arguments, eps=eps, round_trip=round_trip)


def merges(*arguments, eps: float, round_trip: bool, impl: str = "auto", arch: str | None = None) -> bool:
    """Whether both halves are one launch here. Arguments and errors as above."""
    _validate(*arguments)
    chosen, _ = resolve("qkv_producer", IMPLEMENTATIONS, impl, arch, *arguments, eps=eps, round_trip=round_trip)
    return chosen.name == "one_launch"


def explain(*arguments, eps: float, round_trip: bool, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(*arguments)
    chosen, against = resolve("qkv_producer", IMPLEMENTATIONS, "auto", arch, *arguments, eps=eps, round_trip=round_trip)
    return {**against, "chosen": chosen.name}
