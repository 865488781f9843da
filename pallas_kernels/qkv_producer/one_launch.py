"""Both halves of the front product in one launch, Pallas on Triton: of the two programs of a row one takes the window KV to
its record, the other the query latents to what QB multiplies.

Apart they are three launches that read the same product: an XLA norm, its FP8 round trip and the window store. The
programs share nothing, so that neither waits for the other; QB and the attention take the two results as values. A REUSE
layer needs no more of a merged producer: the attention rotates its queries, the selected slots are those of its source.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import GROUP
from ..triton_rows import fp8_rounded, warps
from ..window_store import one_pass
from ..window_store.one_pass import store_row

ARCHES = one_pass.ARCHES
MOST_CHANNELS = 4096  # of the query latents: one program holds them in its registers
OPTIONAL = (
    "an optional merged path, off by default: its kernel takes an H200 2.6 us, those of its parts more than 5; a step of six "
    "layers was 0.07 ms shorter, less than the same step differs from itself"
)


def refuses(pool, front, query_norm, norm, cos, sin, slots, positions, *, eps, round_trip):
    """Why the kernel does not take these arguments, or None."""
    del round_trip
    channels = query_norm.shape[0]
    if channels > MOST_CHANNELS:
        return f"query latents of {channels} channels, the kernel takes {MOST_CHANNELS}"
    return one_pass.refuses(pool, front, norm, cos, sin, slots, positions, first=channels, eps=eps)


def _runs(channels: int) -> list[tuple[int, int]]:
    """[(first, length)]: the channels in runs of powers of two, the longest first, as arrays in a kernel must be."""
    runs, first = [], 0
    while first < channels:
        runs.append((first, 1 << (channels - first).bit_length() - 1))
        first += runs[-1][1]
    return runs


def _query(front, norm, out, row, *, eps: float, round_trip: bool):
    """out bf16[T, Q], whole: one row of it."""
    runs = [pl.ds(*run) for run in _runs(norm.shape[0])]
    x = [front[row, run].astype(jnp.float32) for run in runs]
    mean = sum(jnp.sum(v * v) for v in x) * (1 / norm.shape[0])
    factor = jax.lax.rsqrt(mean + eps)
    for v, run in zip(x, runs, strict=True):
        y = (v * factor * norm[run].astype(jnp.float32)).astype(jnp.bfloat16)
        if round_trip:
            y = fp8_rounded(y.astype(jnp.float32).reshape(-1, GROUP)).reshape(y.shape)
        out[row, run] = y


def _body(front, query_norm, norm, cos, sin, slots, positions, _, pool, q, *, eps: float, round_trip: bool):
    """Whole arrays; pool is the output that aliases the input before it."""
    row, first = pl.program_id(0), query_norm.shape[0]

    @pl.when(pl.program_id(1) == 0)
    def _window():
        store_row(front, norm, cos, sin, slots, positions, pool, row, first=first, eps=eps)

    @pl.when(pl.program_id(1) == 1)
    def _queries():
        _query(front, query_norm, q, row, eps=eps, round_trip=round_trip)


@functools.partial(jax.jit, static_argnames=("eps", "round_trip", "interpret"))  # lowered once for all layers
def qkv_producer(
    pool, front, query_norm, norm, cos, sin, slots, positions, *, eps: float, round_trip: bool, interpret: bool = False
):
    """See `api.qkv_producer`."""
    from jax.experimental.pallas import triton as plt

    rows, array = front.shape[0], jax.ShapeDtypeStruct
    return pl.pallas_call(
        functools.partial(_body, eps=eps, round_trip=round_trip),
        out_shape=(array(pool.shape, pool.dtype), array((rows, query_norm.shape[0]), front.dtype)),
        grid=(rows, 2),
        input_output_aliases={7: 0},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=warps(norm.shape[0])),
        name="qkv_producer",
    )(front, query_norm, norm, cos, sin, slots, positions, pool)
