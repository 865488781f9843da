"""swiglu: clamped SwiGLU of a row's gate and up columns, where asked through FP8 (spec/model.md sections 4 and 9)."""

import jax.numpy as jnp

from ..codecs import GROUP
from ..registry import Implementation, resolve
from . import apart, one_pass, reference

IMPLEMENTATIONS = (
    Implementation("one_pass", one_pass.swiglu, one_pass.ARCHES, one_pass.refuses, by_name_only=one_pass.NO_GAIN),
    Implementation("apart", apart.swiglu, one_pass.ARCHES),
    Implementation("reference", reference.swiglu),
)


def _validate(gate_up, limit, round_trip):
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or (round_trip and gate_up.shape[1] % (2 * GROUP)):
        wanted = f"F a multiple of {GROUP}" if round_trip else "gate and up columns"
        raise ValueError(f"swiglu: expected gate_up [T, 2F], {wanted}, got {gate_up.shape}")
    if gate_up.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"swiglu: expected gate_up bfloat16 or float32, got {gate_up.dtype}")
    if not limit > 0:
        raise ValueError(f"swiglu: limit expected > 0, got {limit}")


def swiglu(
    gate_up,  # dtype[T, 2F]: gate columns, then up columns
    *,
    limit: float,
    round_trip: bool = False,
    impl: str = "auto",
    arch: str | None = None,
):
    """dtype[T, F]: silu(min(gate, limit)) * clamp(up, +-limit) in fp32, rounded once to dtype; round_trip: then through FP8
    with one scale per 32 channels (`fp8_round_trip`), as the product that follows wants it.

    Raises ValueError for shapes, dtypes or limits that do not fit. Source: spec/model.md sections 4 and 9."""
    _validate(gate_up, limit, round_trip)
    chosen, _ = resolve("swiglu", IMPLEMENTATIONS, impl, arch, gate_up, limit=limit, round_trip=round_trip)
    return chosen.run(gate_up, limit=limit, round_trip=round_trip)


def fuses(gate_up, *, limit: float, impl: str = "auto", arch: str | None = None) -> bool:
    """Whether the round trip costs no pass of its own here. Arguments and errors as above."""
    _validate(gate_up, limit, True)
    chosen, _ = resolve("swiglu", IMPLEMENTATIONS, impl, arch, gate_up, limit=limit, round_trip=True)
    return chosen.name == "one_pass"


def explain(gate_up, *, limit: float, round_trip: bool = False, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(gate_up, limit, round_trip)
    chosen, against = resolve("swiglu", IMPLEMENTATIONS, "auto", arch, gate_up, limit=limit, round_trip=round_trip)
    return {**against, "chosen": chosen.name}
