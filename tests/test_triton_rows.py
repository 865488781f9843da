"""The size of arrays that kernels of Pallas on Triton may index: where jax changes the width of their offsets."""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_rows import as_bytes, refuses_size, within_reach

COLUMNS = 64
H200 = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu"))


def _update(rows, _, pool):
    """A masked load, a plain one and a store, each at a row that is not known before."""
    row, lane = rows[pl.program_id(0)], jax.lax.broadcasted_iota(jnp.int32, (32,), 0)
    masked = plt.load(pool.at[row, lane], mask=lane < 5, other=jnp.zeros((), pool.dtype))
    pool[row, pl.ds(0, 32)] = masked + pool[row, pl.ds(32, 32)]


def offset_widths(pool) -> list[int]:
    """Bits of the offsets at which `_update` reads and writes an array of this shape, out of what is lowered for a GPU."""
    call = pl.pallas_call(
        _update, out_shape=pool, grid=(4,), input_output_aliases={1: 0}, compiler_params=plt.CompilerParams(num_warps=1),
        debug=True,
    )  # fmt: skip
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), jax.sharding.use_abstract_mesh(H200):
        jax.jit(call).trace(jax.ShapeDtypeStruct((4,), jnp.int32), pool).lower(lowering_platforms=("cuda",))
    return [int(bits) for bits in re.findall(r"tt\.addptr .*, tensor<32xi(\d+)>", printed.getvalue())]


@pytest.mark.parametrize(
    ("dtype", "elements", "bits", "taken"),
    [
        (jnp.uint8, 2**31, 32, True),
        (jnp.uint8, 2**31 + COLUMNS, 32, False),
        (jnp.uint8, 2**32, 32, False),
        (jnp.uint8, 2**32 + COLUMNS, 64, True),
        (jnp.bfloat16, 2**31, 32, True),
        (jnp.bfloat16, 2**31 + COLUMNS, 64, True),
        (jnp.float32, 2**30, 32, True),
        (jnp.float32, 2**30 + COLUMNS, 64, True),
    ],
)
def test_arrays_are_refused_where_their_offsets_are_too_narrow(dtype, elements, bits, taken):
    """Fails when another jax lowers to other offsets: then the limits of `triton_rows` move with it."""
    pool = jax.ShapeDtypeStruct((elements // COLUMNS, COLUMNS), dtype)
    widths = offset_widths(pool)
    assert widths == [bits] * 3
    assert (refuses_size(pool) is None) == taken
    assert taken == (elements - 1 < 2 ** (min(widths) - 1))


@pytest.mark.parametrize("elements", [2**31 + 2 * COLUMNS, 2**32])
def test_a_view_in_pairs_of_bytes_is_within_reach(elements):
    pool = jax.ShapeDtypeStruct((elements // (2 * COLUMNS), 2 * COLUMNS), jnp.uint8)
    pairs = jax.eval_shape(within_reach, pool)
    assert refuses_size(pairs) is None and pairs.size - 1 < 2 ** (min(offset_widths(pairs)) - 1)
    assert jax.eval_shape(as_bytes, pairs) == pool
    for other in (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((2**25, COLUMNS), (2**26 + 1, COLUMNS))):
        assert jax.eval_shape(within_reach, other) == other
