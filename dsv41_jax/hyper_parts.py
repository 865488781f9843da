"""The form in which a device holds the fp32 weights of hyper-connection sites (`HyperSite.fn`): the checkpoint's, or the
three bf16 parts whose sum they are, which a GPU multiplies by bf16 streams (pallas_kernels/hyper_leave/reference.py).

The parts are made once, when weights are loaded: made in a step, they would be read and written at every site. Products
with fp32 streams join them again, exactly.
"""

from collections.abc import Iterable

import jax

from pallas_kernels.hyper_leave.reference import PARTS, is_split, split

_ENDS = (".hc_attn.fn", ".hc_ffn.fn")
_split = jax.jit(split)


def of_sites(paths: Iterable[str]) -> list[str]:
    """Of parameter paths those of sites' weights."""
    return [path for path in paths if path.endswith(_ENDS)]


def wanted(device) -> bool:
    """Whether a device (a jax.Device, a Sharding or None for the default device) holds the parts: a GPU does."""
    if isinstance(device, jax.sharding.Sharding):
        device = next(iter(device.device_set))
    return (device or jax.devices()[0]).platform == "gpu"


def to_parts(arrays: dict[str, jax.Array], only: Iterable[str] | None = None) -> None:
    """Replace sites' weights f32[N, M * H] by bf16[3 * N, M * H], in place in {path: array}: those of `only`, or all."""
    for path in of_sites(arrays) if only is None else only:
        arrays[path] = jax.block_until_ready(_split(arrays[path]))


def as_parts(expected: dict, only: Iterable[str] | None = None) -> dict:
    """{path: jax.ShapeDtypeStruct} in the checkpoint's form -> the same with the parts (in `only`, or everywhere); shardings
    stay."""
    out = dict(expected)
    for path in of_sites(expected) if only is None else only:
        leaf = expected[path]
        shape = PARTS * leaf.shape[0], *leaf.shape[1:]
        out[path] = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=leaf.sharding)
    return out


def held(leaves: dict) -> list[str]:
    """Of {path: array or placeholder} the paths of sites whose weights are held in parts."""
    return [path for path in of_sites(leaves) if is_split(leaves[path])]


def as_held(expected: dict, live: dict) -> dict:
    """`expected` {path: placeholder in the checkpoint's form} with the parts where `live` has them."""
    return as_parts(expected, [path for path in held(live) if path in expected])
