"""sinkhorn: doubly normalised mixing matrices of the hyper-connections (spec/model.md section 3)."""

from ..registry import Implementation, resolve
from . import one_kernel, reference

IMPLEMENTATIONS = (
    Implementation("one_kernel", one_kernel.sinkhorn, one_kernel.ARCHES, one_kernel.refuses),
    Implementation("reference", reference.sinkhorn),
)


def _validate(logits, iterations):
    if logits.ndim != 3 or logits.shape[1] != logits.shape[2]:
        raise ValueError(f"sinkhorn: expected logits [T, M, M], got {logits.shape}")
    if iterations < 1:
        raise ValueError(f"sinkhorn: expected iterations >= 1, got {iterations}")


def sinkhorn(
    logits,  # f32[T, M, M]
    *,
    iterations: int,
    eps: float,
    impl: str = "auto",
    arch: str | None = None,
):
    """f32[T, M, M]: row softmax plus eps, a column normalisation, then iterations - 1 times rows and columns.

    A normalisation divides by the sum plus eps; the last one is over columns. Source: spec/model.md section 3.
    Raises ValueError for shapes that do not fit."""
    _validate(logits, iterations)
    chosen, _ = resolve("sinkhorn", IMPLEMENTATIONS, impl, arch, logits, iterations=iterations, eps=eps)
    return chosen.run(logits, iterations=iterations, eps=eps)


def explain(logits, *, iterations: int, eps: float, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(logits, iterations)
    chosen, against = resolve("sinkhorn", IMPLEMENTATIONS, "auto", arch, logits, iterations=iterations, eps=eps)
    return {**against, "chosen": chosen.name}
