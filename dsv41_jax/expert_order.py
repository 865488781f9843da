"""The order in which a device holds the routed experts: the checkpoint's, or the one that the Hopper kernel reads.

The Hopper kernel takes weights that were shuffled once, when they were loaded (pallas_kernels/experts/layout.py); every
other implementation takes the checkpoint's order, and the definition takes both.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence

import jax

from dsv41_jax.config import ModelConfig
from pallas_kernels.experts import layout

ORDERS = ("auto", "checkpoint", "shuffled")
_NAMES = ("w13", "s13", "w2", "s2")
_STEM = ".ffn.experts."


def stems(paths) -> list[str]:
    """"layers.0.ffn.experts", ... of parameter paths, once each."""
    return list(dict.fromkeys(path.rpartition(".")[0] for path in paths if _STEM in path))


def shuffled_stems(leaves: dict) -> set[str]:
    """The experts of {path: array or placeholder} that are held in the kernel's order."""
    return {stem for stem in stems(leaves) if layout.is_shuffled(leaves[f"{stem}.w13"])}


def wanted(order: str, c: ModelConfig, device) -> bool:
    """Whether `order` means the kernel's order on `device` (a jax.Device, a Sharding or None for the default device).

    "auto": on Hopper, for sizes that the kernel takes. Raises ValueError for another order, or for "shuffled" with sizes
    that the kernel does not take."""
    if order not in ORDERS:
        raise ValueError(f"expert_order: expected one of {ORDERS}, got {order!r}")
    if order == "shuffled":
        layout.shuffled_shapes(1, c.hidden_size, c.moe_intermediate_size)
    return order == "shuffled" or order == "auto" and _is_hopper(device) and _fits_tiles(c)


def _is_hopper(device) -> bool:
    if device is None:
        device = jax.devices()[0]
    elif isinstance(device, jax.sharding.Sharding):
        device = next(iter(device.device_set))
    return device.platform == "gpu" and device.compute_capability == "9.0"


def _fits_tiles(c: ModelConfig) -> bool:
    try:
        layout.shuffled_shapes(1, c.hidden_size, c.moe_intermediate_size)
    except ValueError:
        return False
    return True


@functools.cache
def _shuffle(name: str):
    return jax.jit({"w13": layout.shuffle_w13, "w2": layout.shuffle_w2}[name])


def shuffle(ranks: Sequence[dict[str, jax.Array]], only: set[str] | None = None) -> list[str]:
    """Reorder the experts in place, in {path: array} of every rank: those of `only`, or all.

    Experts with a row whose scales span more octaves than the kernel's table (layout.scales_fit) on any rank stay as they
    are on all. Returns the stems that stayed."""
    stayed = []
    for stem in stems(ranks[0]):
        if only is not None and stem not in only:
            continue
        if not all(bool(layout.scales_fit(arrays[f"{stem}.{s}"])) for arrays in ranks for s in ("s13", "s2")):
            stayed.append(stem)
            continue
        for arrays in ranks:
            for weight, scale in (("w13", "s13"), ("w2", "s2")):
                pair = f"{stem}.{weight}", f"{stem}.{scale}"
                # one matrix at a time, waited for: two orders of one matrix are in memory, never of two
                arrays[pair[0]], arrays[pair[1]] = jax.block_until_ready(_shuffle(weight)(*(arrays[p] for p in pair)))
    return stayed


def warn_of(stayed: list[str]) -> None:
    """Say which experts no kernel will take."""
    if stayed:
        warnings.warn(
            f"experts: a row's scales span more than {layout.LEVELS} octaves in {', '.join(stayed[:4])}"
            f"{' ...' if len(stayed) > 4 else ''}: these use the plain implementation, which is far slower",
            stacklevel=3,
        )


def as_shuffled(expected: dict, only: Iterable[str] | None = None) -> dict:
    """{path: jax.ShapeDtypeStruct} in the checkpoint's order -> the same with experts (those of `only`, or all) in the
    kernel's; shardings stay: they split the leading axis, which both orders share."""
    out = dict(expected)
    for stem in stems(expected) if only is None else only:
        w13 = expected[f"{stem}.w13"]
        shapes = layout.shuffled_shapes(w13.shape[0], w13.shape[2] * 2, w13.shape[1] // 2)
        for name in _NAMES:
            leaf = expected[f"{stem}.{name}"]
            out[f"{stem}.{name}"] = jax.ShapeDtypeStruct(shapes[name], "int32", sharding=leaf.sharding)
    return out


def as_held(expected: dict, held: dict) -> dict:
    """`expected` {path: placeholder in the checkpoint's order} with the kernel's order where `held` has it."""
    return as_shuffled(expected, shuffled_stems(held) & set(stems(expected)))
