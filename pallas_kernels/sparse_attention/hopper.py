"""sparse_attention on Hopper: when the kernel of hopper_kernel.py fits, and how it is launched."""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, gluon_call
from pallas_kernels.sparse_attention.reference import query_shape, window_bounds

LOG2E = 1.4426950408889634
PROGRAMS = 132  # multiprocessors of an H100 or H200
SHIFT = 2.0**32  # the kernel's key planes hold keys / SHIFT


def refuses(q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, *, first=0, **options):
    """Why the kernel does not take these arguments, or None."""
    del slots, positions, global_slots, cos, sin, options
    heads, dim = query_shape(q, sink, first)[2:]
    if reason := gluon_call.unavailable():
        return reason
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}, the kernel is for bfloat16"
    if window_pool.dtype != jnp.uint8 or (global_pool is not None and global_pool.dtype != jnp.uint8):
        return "the pools hold values, the kernel reads packed records"
    if (heads, dim) != (64, 512):
        return f"{heads} heads of {dim} channels, the kernel is for 64 of 512"
    if first % 8:
        return f"queries behind {first} columns are not aligned to 16 bytes"
    if window_pool.shape[1] * window_pool.shape[2] % 16:
        return "the ring's bytes are no multiple of 16"
    if global_pool is not None and global_pool.shape[0] * global_pool.shape[1] >= 2**31:
        return "2**31 entries or more overflow the selected slots"
    return None


def sparse_attention(
    q, window_pool, slots, positions, global_pool, global_slots, sink, cos, sin, *,
    window, scale, window_start=None, window_end=None, rotate_query=False, first=0, programs=PROGRAMS, ahead=False,
):  # fmt: skip
    """The operator (api.py has its contract) for bf16 q of 64 heads with 512 channels and packed pools. programs: at most
    so many share the rows; no row's result depends on them. ahead: load a row's selected slots a row before its records."""
    from pallas_kernels.sparse_attention import hopper_kernel

    shape = batch, span, heads, dim = query_shape(q, sink, first)
    bounds = window_start is not None or window_end is not None
    start, end = window_bounds(positions, window, window_start, window_end) if bounds else (positions, positions)
    entries, selected, wide = 0, 0, False
    if global_pool is None:  # K = 0 removes the loop that would read these
        global_pool, global_slots = window_pool, slots
    else:
        entries, selected = global_pool.shape[0] * global_pool.shape[1], global_slots.shape[2]
        wide = global_pool.size // 4 > 2**31  # words
    rows = batch * span
    programs = codecs.cdiv(rows, codecs.cdiv(rows, programs))  # as many as give every program the same number, but one
    padded = max(64, 1 << (selected - 1).bit_length()) if ahead and selected else 0
    return gluon_call.gluon_call(
        hopper_kernel.attention,
        q, window_pool, slots, positions, start, end, global_pool, global_slots, sink, cos, sin,
        out_shape=jax.ShapeDtypeStruct(shape, q.dtype),
        grid=(programs, 1, 1), warps=4, compute_capability=90,
        scale_log2=scale * LOG2E * SHIFT, S=span, N=heads, D=dim, FIRST=first, PAIRS=cos.shape[-1],
        N_SLOTS=window_pool.shape[0], RING=window_pool.shape[1], WINDOW=window, ENTRIES=entries, K=selected,
        BOUNDS=bounds, ROTATE=rotate_query, ROWS=rows, PADDED=padded, WIDE=wide,
        DECODER_REGISTERS=88, OTHER_REGISTERS=192,
    )  # fmt: skip
