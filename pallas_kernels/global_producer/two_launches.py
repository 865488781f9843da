"""The global producer in two launches round the keys' product, Pallas on Triton: a program owns a row each time.

The first pools a row with the one before it, normalises, stores the entry and the pending row and puts out the latent; the
second stores the index key. Rows are independent although pending rows are overwritten: of a request only the row before
the chunk is read from the ring, and a chunk shorter than the ring does not reach round to it. For longer chunks (prefill)
that row is gathered before the launch, which takes it as an operand.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import FP8_MAX, GROUP, NV_GROUP, NVFP4_FLOOR, sixth, to_e2m1
from ..row_ops import matmul
from ..triton_e4m3 import code_of, value_of
from ..triton_rows import (
    as_bytes,
    largest,
    mxfp4_codes,
    normalised,
    refuses_rows,
    refuses_size,
    rotated,
    store_bytes,
    warps,
    within_reach,
)
from .reference import pending_row, pool_rows

ARCHES = ("sm_90", "sm_100", "sm_103")


def refuses(
    global_pool, index_pool, pending, value, gate, norm, wk, key_norm, cos, sin, global_slots, index_slots,
    slots, start, row_slots, positions, kept, *, eps, dtype
):  # fmt: skip
    """Why the kernels do not take these arguments, or None."""
    del gate, norm, key_norm, sin, global_slots, index_slots, slots, start, row_slots, positions, kept, eps
    if dtype != jnp.bfloat16:
        return f"latents are {dtype}, the kernels are for bfloat16"
    if global_pool.dtype != jnp.uint8 or index_pool.dtype != jnp.uint8:
        return f"pools are {global_pool.dtype} and {index_pool.dtype}, the kernels write u8 records"
    if reason := refuses_rows(value.shape[1], cos.shape[1]) or refuses_rows(wk.shape[0], cos.shape[1]):
        return reason
    return refuses_size(index_pool) if wk.shape[0] // GROUP % 2 else None  # an odd number of scales makes no pairs


def _store_entry(row, latent, cos, sin, slots, pool):
    """Rotate, quantise and store the latent bf16[D] of a row."""
    dim, slot = latent.shape[0], slots[row]
    even, odd = rotated(latent, cos, sin, row)
    amax = jnp.maximum(largest(even, odd, NV_GROUP // 2), jnp.float32(NVFP4_FLOOR))
    code = code_of(jnp.minimum(sixth(amax), jnp.float32(FP8_MAX)))
    scale = value_of(code)[:, None]
    nibbles = lambda x: to_e2m1(x.reshape(dim // NV_GROUP, NV_GROUP // 2), scale)
    packed = (nibbles(even) | (nibbles(odd) << 4)).reshape(dim // 2)
    pages, per_page = pool.shape[:2]

    @pl.when((slot >= 0) & (slot < pages * per_page))
    def _store():
        page, entry = slot // per_page, slot % per_page
        store_bytes(pool, page, entry, 0, values=packed)
        store_bytes(pool, page, entry, dim // 2, values=code.astype(jnp.uint8))


def _entries(value, norm, cos, sin, slots, _, latent, pool, *, eps: float):
    """Ratio 1: the row is the value. Whole arrays; pool is the output that aliases the input before it, of either width of
    `within_reach`."""
    row = pl.program_id(0)
    out = normalised(value[row, :].astype(jnp.float32), norm[:].astype(jnp.float32), eps)
    latent[row, :] = out
    _store_entry(row, out, cos, sin, slots, pool)


def _pair_entries(
    value, gate, norm, cos, sin, entry_slots, slots, start, row_slots, positions, kept, previous, _, __,
    latent, pool, pending, *, span: int, eps: float
):  # fmt: skip
    """Ratio 2. pending: f32[slots, ring, 2 * D]. previous: f32[B, 2 * D], or None: then the row before the chunk is read
    from the ring."""
    from jax.experimental.pallas import triton as plt

    row, dim, ring = pl.program_id(0), norm.shape[0], pending.shape[1]
    request, first = row // span, row % span == 0
    channels, gates = pl.ds(0, dim), pl.ds(dim, dim)
    v, g = value[row, channels], gate[row, channels]
    before = jnp.maximum(row - 1, 0)
    inside = lambda ref: plt.load(ref.at[before, channels], mask=jnp.broadcast_to(~first, (dim,)), other=0.0)
    if previous is None:
        slot = slots[request]
        live = jnp.broadcast_to(first & (slot >= 0), (dim,))
        at = (jnp.clip(slot, 0, pending.shape[0] - 1), (start[request] - 1) % ring)
        earlier = [plt.load(pending.at[*at, part], mask=live, other=0.0) for part in (channels, gates)]
    else:
        live = jnp.broadcast_to(first, (dim,))
        earlier = [plt.load(previous.at[request, part], mask=live, other=0.0) for part in (channels, gates)]
    before_v, before_g = jnp.where(first, earlier[0], inside(value)), jnp.where(first, earlier[1], inside(gate))
    pooled = pool_rows(before_v, before_g, v, g).astype(jnp.bfloat16)
    out = normalised(pooled.astype(jnp.float32), norm[channels].astype(jnp.float32), eps)
    latent[row, channels] = out
    _store_entry(row, out, cos, sin, entry_slots, pool)
    held = row_slots[row]

    @pl.when(kept[row] & (held >= 0) & (held < pending.shape[0]))
    def _store():
        at = positions[row] % ring
        pending[held, at, channels] = v
        pending[held, at, gates] = g


def _keys(keys, norm, cos, sin, slots, _, pool, *, eps: float):
    """Normalise, rotate, quantise and store the index key of a row; payload and scales go to their planes."""
    row, dim = pl.program_id(0), norm.shape[0]
    half, groups = dim // 2, dim // GROUP
    per_page, slot = pool.shape[1] * pool.dtype.itemsize // (half + groups), slots[row]
    key = normalised(keys[row, :].astype(jnp.float32), norm[:].astype(jnp.float32), eps)
    even, odd = rotated(key, cos, sin, row)
    low, high, exponent = mxfp4_codes(even, odd)
    packed = (low | (high << 4)).reshape(half).astype(jnp.uint8)

    @pl.when((slot >= 0) & (slot < pool.shape[0] * per_page))
    def _store():
        page, entry = slot // per_page, slot % per_page
        store_bytes(pool, page, entry * half, values=packed)
        store_bytes(pool, page, per_page * half + entry * groups, values=exponent.astype(jnp.uint8))


def _call(body, operands, pools, rows: int, dim: int, name: str, interpret: bool, latent: bool):
    """One launch over the rows; the last operands are `pools`, updated in place, after the latents where there are any."""
    from jax.experimental.pallas import triton as plt

    outputs = [jax.ShapeDtypeStruct((rows, dim), jnp.bfloat16)] if latent else []
    first, new = len(operands), len(outputs)
    return pl.pallas_call(
        body,
        out_shape=(*outputs, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)),
        grid=(rows,),
        input_output_aliases={first + i: new + i for i in range(len(pools))},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=warps(dim)),
        name=name,
    )(*operands, *pools)


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))  # lowered once for all layers of a ratio
def global_producer(
    global_pool, index_pool, pending, value, gate, norm, wk, key_norm, cos, sin, global_slots, index_slots,
    slots, start, row_slots, positions, kept, *, eps: float, dtype, interpret: bool = False
):  # fmt: skip
    """See `api.global_producer`."""
    del dtype
    t, dim = value.shape
    global_pool, index_pool = within_reach(global_pool), within_reach(index_pool)
    if gate is None:
        latent, global_pool = _call(functools.partial(_entries, eps=eps), (value, norm, cos, sin, global_slots),
                                    (global_pool,), t, dim, "global_entries", interpret, True)  # fmt: skip
    else:
        span = t // slots.shape[0]
        operands = [value, gate, norm, cos, sin, global_slots, slots, start, row_slots, positions, kept]
        if span < pending.shape[1]:
            body = lambda *refs: _pair_entries(*refs[:11], None, *refs[11:], span=span, eps=eps)
        else:
            body = functools.partial(_pair_entries, span=span, eps=eps)
            operands.append(pending_row(pending, slots, start).reshape(-1, 2 * dim))
        flat = pending.reshape(*pending.shape[:2], 2 * dim)
        latent, global_pool, flat = _call(body, operands, (global_pool, flat), t, dim, "global_entries", interpret, True)
        pending = flat.reshape(pending.shape)
    keys = matmul(latent, wk)
    (index_pool,) = _call(functools.partial(_keys, eps=eps), (keys, key_norm, cos, sin, index_slots), (index_pool,), t,
                          wk.shape[0], "index_keys", interpret, False)  # fmt: skip
    return as_bytes(global_pool), as_bytes(index_pool), pending
