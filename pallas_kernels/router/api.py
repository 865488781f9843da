"""Router: fp32 scores, biased top-k with lowest-index ties, normalised weights (spec/model.md section 9)."""

from ..registry import Implementation, resolve
from . import one_kernel, reference, two_kernels

PRECISIONS = ("released", "float32_cache", "float32")


def _reference(x, gate, bias, *, k, scale, precision):
    del precision  # the router is fp32 in all three
    return reference.router(x, gate, bias, k=k, scale=scale)


IMPLEMENTATIONS = (
    Implementation("two_kernels", two_kernels.router, two_kernels.ARCHES, two_kernels.refuses),
    Implementation("one_kernel", one_kernel.router, one_kernel.ARCHES, one_kernel.refuses),
    Implementation("reference", _reference),
)


def _validate(x, gate, bias, k, precision):
    if x.ndim != 2 or gate.ndim != 2 or gate.shape[1] != x.shape[1]:
        raise ValueError(f"router: expected x [T, H] and gate [E, H], got {x.shape} and {gate.shape}")
    if bias.shape != (gate.shape[0],):
        raise ValueError(f"router: expected bias [{gate.shape[0]}], got {bias.shape}")
    if not 1 <= k <= gate.shape[0]:
        raise ValueError(f"router: expected 1 <= k <= {gate.shape[0]} experts, got k = {k}")
    if precision not in PRECISIONS:
        raise ValueError(f"router: expected precision in {PRECISIONS}, got {precision!r}")


def router(
    x,  # bf16[T, H] or f32[T, H], the ffn_norm output
    gate,  # bf16[E, H] or f32[E, H]
    bias,  # f32[E]
    *,
    k: int,
    scale: float = 1.5,
    precision: str = "released",
    impl: str = "auto",
    arch: str | None = None,
):
    """Choose k experts per row.

    s = sqrt(softplus(x @ gate^T)) in fp32 (never TF32); the k largest s + bias, lowest id first among equals; weights
    s[id] / (sum + 1e-20) * scale. Every row stands alone, so the choice does not depend on the batch.
    Returns (ids i32[T, k] in descending biased score, weights f32[T, k]).
    Raises ValueError for shapes that do not fit together. Source: spec/model.md section 9.
    """
    _validate(x, gate, bias, k, precision)
    kwargs = dict(k=k, scale=scale, precision=precision)
    chosen, _ = resolve("router", IMPLEMENTATIONS, impl, arch, x, gate, bias, **kwargs)
    return chosen.run(x, gate, bias, **kwargs)


def explain(x, gate, bias, *, k, scale=1.5, precision="released", arch=None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(x, gate, bias, k, precision)
    chosen, against = resolve(
        "router", IMPLEMENTATIONS, "auto", arch, x, gate, bias, k=k, scale=scale, precision=precision
    )
    return {**against, "chosen": chosen.name}


def fake_balance(
    rows: int,
    k: int,
    *,
    experts: int,
    ep_size: int = 1,
    dp_size: int = 1,
    dp_rank=0,  # int or i32[]
):
    """FAKE_BALANCE_EXPERT: ids that load all experts evenly over the DP ranks, whatever the input; for benchmarks.

    Flat slot i of rank d goes to EP rank (ep_size * d / dp_size + i % ep_size) % ep_size, local expert
    (floor(d * max(local / dp_size, 1)) + i / ep_size) % local; weights 1.0. Source: spec/decode.md section 4.
    Returns (ids i32[rows, k], weights f32[rows, k]).
    Raises ValueError if the experts do not divide over the EP ranks.
    """
    if ep_size < 1 or experts % ep_size:
        raise ValueError(f"fake_balance: expected experts divisible by ep_size, got {experts} and {ep_size}")
    return reference.fake_balance(rows, k, experts=experts, ep_size=ep_size, dp_size=dp_size, dp_rank=dp_rank)
