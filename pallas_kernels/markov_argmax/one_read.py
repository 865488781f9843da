"""The choice in one pass over weights and logits, Pallas on Triton: a program runs down a stretch of the vocabulary and keeps
its largest logit of every row, a second, small launch takes the largest of the stretches.

As a product and a reduction the biased logits, 33 MB a column, are written and read again, which is two thirds as much as
the weights and logits that have to be read.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..codecs import cdiv
from ..triton_e4m3 import bits_of

ARCHES = ("sm_90", "sm_100", "sm_103")
TILE = 32  # columns of one product
PROGRAMS = 264  # at most: two for each multiprocessor of an H200
STAGES = 4  # tiles of weights on their way: 96 kB on a multiprocessor of an H200
LEAST_ROWS, MOST_ROWS = 16, 128  # of one product; fewer are filled up with the last
RANKS = (32, 64, 128, 256)
LEAST = -(2**31)  # below the key of every number


def refuses(base, embedded, weight, *, first):
    """Why the kernel does not take these arguments, or None."""
    del base, first  # every size of f32 logits is addressed whole (triton_rows.refuses_size)
    if embedded.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"operands are {embedded.dtype} and {weight.dtype}, the kernel is for bfloat16"
    rows, rank = embedded.shape
    if rows > MOST_ROWS or rank not in RANKS:
        return f"{rows} rows of rank {rank}, the kernel is for at most {MOST_ROWS} rows and ranks {RANKS}"
    return None


def ordered(x):
    """f32 -> i32 in the order of the numbers, -0 equal to 0, every NaN the same and above all of them."""
    bits = bits_of(x)
    key = jnp.where(bits == -(2**31), 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, key)


def _largest(base, embedded, weight, keys, ids, *, first: int, tiles: int):
    """Whole arrays. keys, ids: i32[B, programs], of a program's stretch of the vocabulary."""
    from jax.experimental.pallas import triton as plt

    (real, rank), vocabulary = embedded.shape, base.shape[1]
    rows = max(LEAST_ROWS, pl.next_power_of_2(real))
    stretch = pl.program_id(0) * tiles * TILE
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (n,), 0) for n in (rows, TILE))

    def from_rows(array, top, column, **masked):
        """The columns i32[n] of the rows from `top` on."""
        at = jnp.broadcast_arrays(top + jnp.minimum(row, real - 1)[:, None], column[None, :])
        return plt.load(array.at[*at], **masked)

    x = from_rows(embedded, 0, jax.lax.broadcasted_iota(jnp.int32, (rank,), 0))

    def logits(start):
        column = start + lane
        inside = jnp.broadcast_to((column < vocabulary)[None, :], (rows, TILE))
        return from_rows(base, first, column, mask=inside, other=0.0)

    def tile(i, carry):
        largest, where, ahead = carry
        start = stretch + i * TILE
        column = start + lane
        inside = jnp.broadcast_to((column < vocabulary)[:, None], (TILE, rank))
        w = plt.load(weight.at[pl.ds(start, TILE), :], mask=inside, other=0.0)
        # of the tile after this one: the compiler fetches ahead only what products read
        following = logits(start + TILE)
        value = ahead + plt.dot(x, w, trans_b=True)
        key = jnp.where((column < vocabulary)[None, :], ordered(value), LEAST)
        better = key > largest  # a lane's columns ascend: the first of equals stays
        column = jnp.broadcast_to(column[None, :], key.shape)
        return jnp.where(better, key, largest), jnp.where(better, column, where), following

    none = jnp.full((rows, TILE), LEAST, jnp.int32), jnp.full((rows, TILE), vocabulary, jnp.int32)
    largest, where, _ = jax.lax.fori_loop(0, tiles, tile, (*none, logits(stretch)))
    best = jnp.max(largest, 1)
    at = jnp.full((rows,), pl.program_id(0), jnp.int32)
    plt.store(keys.at[row, at], best, mask=row < real)
    plt.store(ids.at[row, at], jnp.min(jnp.where(largest == best[:, None], where, vocabulary), 1), mask=row < real)


def _choose(keys, ids, out, *, vocabulary: int):
    """Whole arrays; one row of out i32[B]: the lowest index of the largest key."""
    from jax.experimental.pallas import triton as plt

    row, programs = pl.program_id(0), keys.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(programs),), 0)
    key = plt.load(keys.at[row, lane], mask=lane < programs, other=LEAST)
    index = plt.load(ids.at[row, lane], mask=lane < programs, other=vocabulary)
    out[row] = jnp.min(jnp.where(key == jnp.max(key), index, vocabulary))


@functools.partial(jax.jit, static_argnames=("first", "interpret"))
def markov_argmax(base, embedded, weight, *, first: int, interpret: bool = False):
    """See `api.markov_argmax`."""
    from jax.experimental.pallas import triton as plt

    rows, vocabulary = embedded.shape[0], base.shape[1]
    every = cdiv(vocabulary, TILE)
    tiles = cdiv(every, PROGRAMS)
    programs = cdiv(every, tiles)
    array = jax.ShapeDtypeStruct
    found = pl.pallas_call(
        functools.partial(_largest, first=first, tiles=tiles),
        out_shape=[array((rows, programs), jnp.int32)] * 2,
        grid=(programs,),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=STAGES),
        name="markov_largest",
    )(base, embedded, weight)
    return pl.pallas_call(
        functools.partial(_choose, vocabulary=vocabulary),
        out_shape=array((rows,), jnp.int32),
        grid=(rows,),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=2),
        name="markov_choose",
    )(*found)
