"""Norms and matrix products, with the rounding points of the reference (spec/model.md sections 2, 4, 14)."""

import functools

import jax

from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Fp8Linear
from dsv41_jax.precision import Precision
from pallas_kernels import registry
from pallas_kernels.block_scaled_matmul.api import block_scaled_matmul
from pallas_kernels.fp8_round_trip.api import fp8_round_trip
from pallas_kernels.row_ops import matmul as matmul
from pallas_kernels.row_ops import rms_norm as rms_norm


def quantise_input(
    x,  # dtype[T, I]
    p: Precision,
    options: DecodeOptions,
):
    """The input of an FP8 or FP4 linear after its per-32 FP8 round trip (exact in bf16); unchanged in fp32 precisions."""
    return fp8_round_trip(x, impl=options.impl("fp8_round_trip")) if p.quantise_activations else x


@functools.partial(jax.jit, static_argnames=("groups", "quantised", "impl", "arch"))
def _block_scaled_matmul(x, weight, scale, *, groups, quantised, impl, arch):
    """The operator traced and lowered once for all layers of one shape: a kernel's own lowering takes half a second."""
    return block_scaled_matmul(x, weight, scale, groups=groups, quantised=quantised, impl=impl, arch=arch)


def fp8_matmul(
    x,  # dtype[T, G*I]
    weight,  # f8[G*O, I]
    scale,  # u8[ceil(G*O/32), ceil(I/32)]
    options: DecodeOptions,
    *,
    quantised: bool,
    groups: int = 1,
):
    """dtype[T, G*O]: products with a block-scaled weight, of the O rows of each group with that group's I channels.
    quantised: x has been through quantise_input in `released`."""
    return _block_scaled_matmul(x, weight, scale, groups=groups, quantised=quantised,
                                impl=options.impl("block_scaled_matmul"), arch=registry.current_arch())  # fmt: skip


def fp8_linear(
    x,  # dtype[T, I]
    linear: Fp8Linear,
    p: Precision,
    options: DecodeOptions,
):
    """dtype[T, O]: the FP8 linear of spec/model.md section 4."""
    return fp8_matmul(quantise_input(x, p, options), linear.weight[...], linear.scale[...], options,
                      quantised=p.quantise_activations)  # fmt: skip
