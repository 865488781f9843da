"""hyper_coefficients: pre, post and comb of one site from the product of its streams with fn (spec/model.md section 3)."""

import dataclasses

from ..registry import Implementation, resolve
from . import one_kernel, reference

IMPLEMENTATIONS = (
    Implementation("one_kernel", one_kernel.hyper_coefficients, one_kernel.ARCHES, one_kernel.refuses),
    Implementation("reference", reference.hyper_coefficients),
)


@dataclasses.dataclass(frozen=True)
class Static:
    """streams: M; iterations of the Sinkhorn normalisation; its eps, also added to pre."""

    streams: int
    iterations: int
    eps: float

    @property
    def width(self) -> int:
        """Coefficients of a row: M of pre, M of post, M * M of comb."""
        return self.streams * (2 + self.streams)


def _validate(products, r, scale, base, static):
    n = static.width
    if products.ndim != 2 or products.shape[1] % n or not products.shape[1]:
        raise ValueError(f"hyper_coefficients: expected products [T, n * {n}], got {products.shape}")
    t = products.shape[0]
    if (r.shape, scale.shape, base.shape) != ((t,), (3,), (n,)):
        raise ValueError(
            f"hyper_coefficients: expected r [{t}], scale [3] and base [{n}], got {r.shape}, {scale.shape}, {base.shape}"
        )
    if static.iterations < 1:
        raise ValueError(f"hyper_coefficients: expected iterations >= 1, got {static.iterations}")


def hyper_coefficients(
    products,  # f32[T, n * M * (2 + M)], n parts whose sum is streams @ fn^T
    r,  # f32[T]
    scale,  # f32[3]: of pre, post, comb
    base,  # f32[M * (2 + M)]
    *,
    streams: int,
    iterations: int,
    eps: float,
    impl: str = "auto",
    arch: str | None = None,
):
    """Coefficients of one site; y = r * (sum of the n parts, the last first), a = y * scale + base.

    pre = sigmoid(a) + eps; post = 2 sigmoid(a); comb[j, k] (from stream j to k): the row softmax of a plus
    eps, a column normalisation, then iterations - 1 times rows and columns; a normalisation divides by the sum plus eps.
    Returns (pre f32[T, M], post f32[T, M], comb f32[T, M, M]). Source: spec/model.md section 3.
    Raises ValueError for shapes that do not fit."""
    static = Static(streams, iterations, eps)
    _validate(products, r, scale, base, static)
    chosen, _ = resolve("hyper_coefficients", IMPLEMENTATIONS, impl, arch, products, r, scale, base, static=static)
    return chosen.run(products, r, scale, base, static=static)


def explain(products, r, scale, base, *, streams: int, iterations: int, eps: float, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    static = Static(streams, iterations, eps)
    _validate(products, r, scale, base, static)
    chosen, against = resolve("hyper_coefficients", IMPLEMENTATIONS, "auto", arch, products, r, scale, base, static=static)
    return {**against, "chosen": chosen.name}
