"""hyper_enter: what a sublayer reads from the residual streams, in one pass over them (spec/model.md section 3)."""

from ..registry import Implementation, resolve
from . import one_pass, reference

IMPLEMENTATIONS = (
    Implementation("one_pass", one_pass.hyper_enter, one_pass.ARCHES, one_pass.refuses),
    Implementation("reference", reference.hyper_enter),
)


def _validate(streams, pre, weight):
    if streams.ndim != 3:
        raise ValueError(f"hyper_enter: expected streams [T, M, H], got {streams.shape}")
    t, m, h = streams.shape
    if pre.shape != (t, m) or weight.shape != (h,):
        raise ValueError(f"hyper_enter: expected pre [{t}, {m}] and weight [{h}], got {pre.shape} and {weight.shape}")


def hyper_enter(
    streams,  # dtype[T, M, H]
    pre,  # f32[T, M]
    weight,  # bf16[H] or f32[H]
    *,
    eps: float,
    impl: str = "auto",
    arch: str | None = None,
):
    """The input of a sublayer, collapsed and normalised, and the factor that normalises the streams for its mixes.

    x = sum_m pre[m] * streams[m] in fp32, rounded to dtype; u = x * rsqrt(mean(x^2) + eps) * weight, rounded to dtype;
    r = rsqrt(mean over all M * H values of streams^2 + eps), fp32.
    Returns (u dtype[T, H], r f32[T]). Source: spec/model.md sections 2 and 3.
    Raises ValueError for shapes that do not fit."""
    _validate(streams, pre, weight)
    chosen, _ = resolve("hyper_enter", IMPLEMENTATIONS, impl, arch, streams, pre, weight, eps=eps)
    return chosen.run(streams, pre, weight, eps=eps)


def explain(streams, pre, weight, *, eps: float, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(streams, pre, weight)
    chosen, against = resolve("hyper_enter", IMPLEMENTATIONS, "auto", arch, streams, pre, weight, eps=eps)
    return {**against, "chosen": chosen.name}
