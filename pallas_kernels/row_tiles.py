"""Rows whose bits do not depend on the rows beside them.

XLA's CPU backend picks the order of a sum by the size of the whole operation (a product as a vector product, a small or a
blocked one; a reduction in a loop or by its library from some number of elements on), so the same row would round
differently in a step of one token and in a verify step of six. On a CPU sums therefore run in tiles of a fixed number of
rows: every operation has one shape, whatever the batch. On a GPU nothing is tiled.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.codecs import cdiv

ROWS = 8  # a verify step of one request (6 rows) is one tile


def in_row_tiles(
    run: Callable,  # (*operands [R, ...]) -> pytree of [R, ...]: a row of the result from the same row of each operand
    *operands,  # [T, ...]
    rows: int = ROWS,
):
    """run(*operands), results [T, ...]; on a CPU in tiles of `rows` rows, the last one padded with zeros, so that a row's
    bits depend neither on T nor on its place. Decided when lowered: a compile for a GPU has the plain operation."""
    tiled = lambda *x: _tiled(run, x, rows)
    return jax.lax.platform_dependent(*operands, cpu=tiled, default=run)


def _tiled(run, operands, rows: int):
    total = operands[0].shape[0]
    count = cdiv(total, rows)
    spare = count * rows - total
    if spare:
        operands = [jnp.pad(x, ((0, spare), *[(0, 0)] * (x.ndim - 1))) for x in operands]
    # fused with its surroundings, be it the loop's slices, the same operation may round otherwise: multiply-adds
    alone = lambda x: jax.lax.optimization_barrier(run(*jax.lax.optimization_barrier(x)))
    if count == 1:
        out = alone(tuple(operands))
    else:
        out = jax.lax.map(alone, tuple(x.reshape(count, rows, *x.shape[1:]) for x in operands))
        out = jax.tree.map(lambda x: x.reshape(count * rows, *x.shape[2:]), out)
    return jax.tree.map(lambda x: x[:total], out) if spare else out
