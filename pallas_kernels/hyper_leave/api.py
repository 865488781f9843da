"""hyper_leave: the exit of a site, where it pays with what the entry of the next one reads (spec/model.md section 3)."""

from ..hyper_enter.api import hyper_enter
from ..registry import Implementation, resolve
from . import fused, reference
from .reference import Ahead

IMPLEMENTATIONS = (
    Implementation("fused", fused.hyper_leave, fused.ARCHES, fused.refuses, fused.BY_NAME_ONLY),
    Implementation("reference", reference.hyper_leave),
)


def _validate(streams, y, post, comb, pre, fn):
    if streams.ndim != 3:
        raise ValueError(f"hyper_leave: expected streams [T, M, H], got {streams.shape}")
    t, m, h = streams.shape
    expected = {"y": (t, h), "post": (t, m), "comb": (t, m, m), "pre": (t, m), "fn": (m * (2 + m), m * h)}
    for (name, shape), x in zip(expected.items(), (y, post, comb, pre, fn), strict=True):
        if x.shape != shape:
            raise ValueError(f"hyper_leave: expected {name} {list(shape)}, got {x.shape}")


def hyper_leave(
    streams,  # dtype[T, M, H]
    y,  # dtype[T, H], the sublayer output
    post,  # f32[T, M]
    comb,  # f32[T, M, M]: from stream j to k
    pre,  # f32[T, M], this site's, for the next sublayer
    fn,  # f32[M * (2 + M), M * H] of the next site
    *,
    impl: str = "auto",
    arch: str | None = None,
):
    """The streams after a sublayer: post[k] * y + sum_j comb[j, k] * streams[j], in fp32, rounded once.

    Returns (streams dtype[T, M, H], ahead). ahead: what the next site needs of them, made in the same pass (`Ahead`), or
    None from an implementation that leaves it to the next site; `enter_next` takes both.
    Raises ValueError for shapes that do not fit. Source: spec/model.md section 3, spec/decode.md A3."""
    arguments = (streams, y, post, comb, pre, fn)
    _validate(*arguments)
    chosen, _ = resolve("hyper_leave", IMPLEMENTATIONS, impl, arch, *arguments)
    return chosen.run(*arguments)


def enter_next(
    streams,  # dtype[T, M, H], which `hyper_leave` returned
    ahead: Ahead | None,  # likewise
    pre,  # f32[T, M], as given to `hyper_leave`
    fn,  # f32[N, M * H], as given to `hyper_leave`
    weight,  # bf16[H] or f32[H] of the norm
    *,
    eps: float,
    enter_impl: str = "auto",
):
    """(u dtype[T, H], r f32[T], products f32[T, n * N]): `hyper_enter` of the streams, and n parts whose sum is
    streams @ fn^T to fp32 accuracy, the smallest last (`hyper_coefficients` takes r and products).

    enter_impl: the implementation of hyper_enter where nothing is ahead."""
    if ahead is not None:
        return fused.finish(ahead, weight, streams=streams.shape[1], eps=eps)
    return *hyper_enter(streams, pre, weight, eps=eps, impl=enter_impl), reference.products(streams, fn)


def site_to_site(streams, y, post, comb, pre, fn, weight, *, eps: float, impl: str = "auto", enter_impl: str = "auto"):
    """(streams dtype[T, M, H], u dtype[T, H], r f32[T], products f32[T, n * N]): `hyper_leave`, then `enter_next`."""
    streams, ahead = hyper_leave(streams, y, post, comb, pre, fn, impl=impl)
    return streams, *enter_next(streams, ahead, pre, fn, weight, eps=eps, enter_impl=enter_impl)


def explain(streams, y, post, comb, pre, fn, *, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    arguments = (streams, y, post, comb, pre, fn)
    _validate(*arguments)
    chosen, against = resolve("hyper_leave", IMPLEMENTATIONS, "auto", arch, *arguments)
    return {**against, "chosen": chosen.name}
