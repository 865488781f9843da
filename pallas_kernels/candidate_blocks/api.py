"""candidate_blocks: the blocks of positions that later index sources may select from."""

import jax.numpy as jnp

from ..registry import Implementation, resolve
from . import radix_candidates, radix_wide, reference

IMPLEMENTATIONS = (
    Implementation("radix_candidates", radix_candidates.candidate_blocks, radix_candidates.ARCHES, radix_candidates.refuses),
    Implementation("radix_wide", radix_wide.candidate_blocks, radix_wide.ARCHES, radix_wide.refuses),
    Implementation("reference", reference.candidate_blocks),
)


def _validate(logits, visible, k_blocks, block_size):
    if logits.ndim != 2 or logits.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"candidate_blocks: expected logits bf16 or f32 [T, width], got {logits.dtype} {logits.shape}"
        )
    if visible.shape != logits.shape[:1] or visible.dtype != jnp.int32:
        raise ValueError(
            f"candidate_blocks: expected visible i32[{logits.shape[0]}], got {visible.dtype} {visible.shape}"
        )
    if k_blocks < 1 or block_size < 1 or logits.shape[1] < 1:
        raise ValueError(
            "candidate_blocks: expected k_blocks, block_size and width >= 1, got "
            f"{k_blocks}, {block_size}, {logits.shape[1]}"
        )


def candidate_blocks(
    logits,  # bf16[T, width] or f32[T, width], not restricted to candidates
    visible,  # i32[T], visible length, clamped to [0, width]
    *,
    k_blocks: int = 2048,
    block_size: int = 8,
    flags: bool = False,
    impl: str = "auto",
    arch: str | None = None,
):
    """Publish the min(k_blocks, N) best blocks of every row, N = ceil(width / block_size).

    A block's score is the largest of its visible logits (NaN wins), in the order of the remapped bits; a block with
    nothing visible has none. The block that holds the newest visible position always takes one of the places and is
    always published; blocks with a NaN come next and take places without being published; ties go to the lowest block.
    Blocks whose score is -inf are not published.
    Returns (ids i32[T, k_blocks], ascending, then -1; count i32[T]), and with `flags` also u8[T, N], 1 at those blocks.
    Raises ValueError for shapes that do not fit together. Source: spec/decode.md section 3, spec/model.md section 7.
    """
    _validate(logits, visible, k_blocks, block_size)
    kwargs = {"k_blocks": k_blocks, "block_size": block_size, "flags": flags}
    chosen, _ = resolve("candidate_blocks", IMPLEMENTATIONS, impl, arch, logits, visible, **kwargs)
    return chosen.run(logits, visible, **kwargs)


def explain(logits, visible, *, k_blocks=2048, block_size=8, flags=False, impl="auto", arch=None) -> dict[str, str]:
    """{implementation passed over: reason, "chosen": name} for these arguments."""
    _validate(logits, visible, k_blocks, block_size)
    kwargs = {"k_blocks": k_blocks, "block_size": block_size, "flags": flags}
    chosen, against = resolve("candidate_blocks", IMPLEMENTATIONS, impl, arch, logits, visible, **kwargs)
    return {**against, "chosen": chosen.name}
