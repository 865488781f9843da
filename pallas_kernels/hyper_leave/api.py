"""hyper_leave: the exit of a site, where it pays with what the entry of the next one reads (spec/model.md section 3)."""

from ..fp8_round_trip.api import fp8_round_trip
from ..hyper_coefficients.api import Static, hyper_coefficients
from ..hyper_enter.api import hyper_enter
from ..registry import Implementation, resolve
from . import fused, reference
from .reference import Ahead

IMPLEMENTATIONS = (
    Implementation("fused", fused.hyper_leave, fused.ARCHES, fused.refuses),
    Implementation("reference", reference.hyper_leave),
)


def _validate(streams, y, post, comb, pre, fn):
    if streams.ndim != 3:
        raise ValueError(f"hyper_leave: expected streams [T, M, H], got {streams.shape}")
    t, m, h = streams.shape
    rows = m * (2 + m) * (reference.PARTS if reference.is_split(fn) else 1)
    expected = {"y": (t, h), "post": (t, m), "comb": (t, m, m), "pre": (t, m), "fn": (rows, m * h)}
    for (name, shape), x in zip(expected.items(), (y, post, comb, pre, fn), strict=True):
        if x.shape != shape:
            raise ValueError(f"hyper_leave: expected {name} {list(shape)}, got {x.shape}")


def hyper_leave(
    streams,  # dtype[T, M, H]
    y,  # dtype[T, H], the sublayer output
    post,  # f32[T, M]
    comb,  # f32[T, M, M]: from stream j to k
    pre,  # f32[T, M], this site's, for the next sublayer
    fn,  # f32[M * (2 + M), M * H] of the next site, or its three bf16 parts end to end (`reference.split`)
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
    fn,  # f32[N, M * H] or bf16[3 * N, M * H], as given to `hyper_leave`
    weight,  # bf16[H] or f32[H] of the norm
    scale,  # f32[3] of the coefficients
    base,  # f32[N] of the coefficients
    *,
    eps: float,
    iterations: int,
    mix_eps: float,
    round_trip: bool = False,
    enter_impl: str = "auto",
    coefficients_impl: str = "auto",
):
    """The entry of the site that reads the streams: `hyper_enter` of them, `hyper_coefficients` of streams @ fn^T.

    eps: of both norms; iterations, mix_eps: of the coefficients. enter_impl, coefficients_impl: implementations of the two
    where nothing is ahead. Returns (u dtype[T, H], rounded, pre f32[T, M], post f32[T, M], comb f32[T, M, M]). rounded: with
    round_trip, and where that costs no pass of its own (something is ahead), u through FP8, dtype[T, H]; else None."""
    m = streams.shape[1]
    if ahead is not None:
        u, *rounded, pre, post, comb = fused.finish(
            ahead, weight, scale, base, static=Static(m, iterations, mix_eps), eps=eps, round_trip=round_trip
        )
        return u, rounded[0] if rounded else None, pre, post, comb
    u, r = hyper_enter(streams, pre, weight, eps=eps, impl=enter_impl)
    return u, None, *hyper_coefficients(reference.products(streams, fn), r, scale, base, streams=m, iterations=iterations,
                                  eps=mix_eps, impl=coefficients_impl)  # fmt: skip


def site_to_site(streams, y, post, comb, pre, fn, weight, scale, base, *, impl: str = "auto", round_trip=False, **entry):
    """(streams dtype[T, M, H], u dtype[T, H], pre f32[T, M], post f32[T, M], comb f32[T, M, M]): `hyper_leave`, then
    `enter_next`, which takes `entry`; with round_trip u through FP8 at the end, by a pass of its own where it needs one."""
    streams, ahead = hyper_leave(streams, y, post, comb, pre, fn, impl=impl)
    u, rounded, *mixes = enter_next(streams, ahead, pre, fn, weight, scale, base, round_trip=round_trip, **entry)
    if round_trip and rounded is None:
        rounded = fp8_round_trip(u)
    return streams, u, *mixes, *([rounded] if round_trip else [])


def explain(streams, y, post, comb, pre, fn, *, arch: str | None = None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    arguments = (streams, y, post, comb, pre, fn)
    _validate(*arguments)
    chosen, against = resolve("hyper_leave", IMPLEMENTATIONS, "auto", arch, *arguments)
    return {**against, "chosen": chosen.name}
