"""fp8_round_trip: what is left of activations after FP8 with one scale per 32 channels (spec/model.md section 4), and
quantise, the FP8 form itself."""

import jax.numpy as jnp

from ..codecs import GROUP
from ..registry import Implementation, resolve
from . import one_pass, reference

IMPLEMENTATIONS = (
    Implementation("one_pass", one_pass.fp8_round_trip, one_pass.ARCHES, one_pass.refuses),
    Implementation("reference", reference.fp8_round_trip),
)

QUANTISERS = (
    Implementation("one_pass", one_pass.quantise, one_pass.ARCHES, one_pass.refuses),
    Implementation("reference", reference.quantise),
)


def _validate(x):
    if x.ndim != 2 or x.shape[1] % GROUP:
        raise ValueError(f"fp8_round_trip: expected x [T, I] with I a multiple of {GROUP}, got {x.shape}")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"fp8_round_trip: expected x bfloat16 or float32, got {x.dtype}")


def fp8_round_trip(
    x,  # bf16|f32[T, I], finite
    *,
    impl: str = "auto",
    arch: str | None = None,
):
    """x's dtype [T, I]: `codecs.dequantize_fp8(*codecs.quantize_fp8(x))`, exact in bf16; the same bits everywhere.

    Raises ValueError for shapes or dtypes that do not fit. Source: spec/model.md section 4."""
    _validate(x)
    chosen, _ = resolve("fp8_round_trip", IMPLEMENTATIONS, impl, arch, x)
    return chosen.run(x)


def quantise(
    x,  # bf16|f32[T, I], finite
    count=None,  # i32[], rows in use; None = all
    *,
    impl: str = "auto",
    arch: str | None = None,
):
    """(e4m3 codes u8[T, I], e8m0 scales u8[T, I/32]): the bytes of `codecs.quantize_fp8(x)`, the same everywhere; rows
    from `count` on hold anything.

    Raises ValueError for shapes or dtypes that do not fit. Source: spec/model.md section 4."""
    _validate(x)
    if count is not None and (count.ndim or count.dtype != jnp.int32):
        raise ValueError(f"quantise: expected count i32 [], got {count.dtype} {count.shape}")
    chosen, _ = resolve("quantise", QUANTISERS, impl, arch, x, count)
    return chosen.run(x, count)


def explain(x, *, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(x)
    chosen, against = resolve("fp8_round_trip", IMPLEMENTATIONS, "auto", arch, x)
    return {**against, "chosen": chosen.name}
