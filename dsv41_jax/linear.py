"""Norms and matrix products, with the rounding points of the reference (spec/model.md sections 2, 4, 14)."""

import dataclasses
import functools

import jax

from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Fp8Linear
from dsv41_jax.precision import Precision
from pallas_kernels import registry
from pallas_kernels.block_scaled_matmul.api import block_scaled_matmul, rounds_rows
from pallas_kernels.fp8_round_trip.api import fp8_round_trip
from pallas_kernels.row_ops import matmul as matmul
from pallas_kernels.row_ops import rms_norm as rms_norm


@functools.partial(jax.jit, static_argnames=("groups", "quantised", "impl", "arch"))
def _block_scaled_matmul(x, weight, scale, *, groups, quantised, impl, arch):
    """The operator traced and lowered once for all layers of one shape: a kernel's own lowering takes half a second."""
    return block_scaled_matmul(x, weight, scale, groups=groups, quantised=quantised, impl=impl, arch=arch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows whose maker saved `fp8_linear` its round trip: values dtype[T, I], rounded dtype[T, I] what FP8 leaves of them."""

    values: jax.Array
    rounded: jax.Array


def values(x):
    """dtype[T, I] of Rows, or of what is that itself."""
    return x.values if isinstance(x, Rows) else x


def _chosen(groups: int, options: DecodeOptions) -> dict:
    return {"groups": groups, "impl": options.impl("block_scaled_matmul"), "arch": registry.current_arch()}


def wants_round_trip(
    rows,  # dtype[T, I] or its shape and dtype
    linear: Fp8Linear,
    p: Precision,
    options: DecodeOptions,
) -> bool:
    """Whether `fp8_linear` of these rows begins with an FP8 round trip of its own, which whoever makes the rows may do."""
    operands = rows, linear.weight[...], linear.scale[...]
    return p.quantise_activations and not rounds_rows(*operands, **_chosen(1, options))


def fp8_matmul(
    x,  # dtype[T, G*I]
    weight,  # f8[G*O, I]
    scale,  # u8[ceil(G*O/32), ceil(I/32)]
    p: Precision,
    options: DecodeOptions,
    *,
    quantise: bool = True,
    ready: bool = False,
    groups: int = 1,
):
    """dtype[T, G*O]: products with a block-scaled weight, of the O rows of each group with that group's I channels.
    quantise: x goes through the per-32 FP8 round trip first (exact in bf16), in `released`. ready: it has been already."""
    quantise = quantise and p.quantise_activations
    chosen = _chosen(groups, options)
    if quantise and not ready and not rounds_rows(x, weight, scale, **chosen):
        x = fp8_round_trip(x, impl=options.impl("fp8_round_trip"))
    return _block_scaled_matmul(x, weight, scale, quantised=quantise, **chosen)


def fp8_linear(
    x,  # dtype[T, I] or Rows
    linear: Fp8Linear,
    p: Precision,
    options: DecodeOptions,
    ready: bool = False,
):
    """dtype[T, O]: the FP8 linear of spec/model.md section 4. ready: x has been through its round trip already."""
    if isinstance(x, Rows):
        x, ready = x.rounded, True
    return fp8_matmul(x, linear.weight[...], linear.scale[...], p, options, ready=ready)
