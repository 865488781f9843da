"""On a CPU a row's bits depend neither on how many rows share an operation nor on its place among them.

Every operation of a layer that adds numbers, on 96 random rows at once and in pieces, compared bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import hyper, linear, rope
from dsv41_jax.sampling import SamplingParams, pack_sampling, target_log_probs
from pallas_kernels.experts.api import experts
from pallas_kernels.global_producer import reference as producer
from pallas_kernels.hyper_coefficients.api import hyper_coefficients
from pallas_kernels.hyper_enter.api import hyper_enter
from pallas_kernels.index_score.api import index_score
from pallas_kernels.router.api import router
from pallas_kernels.row_tiles import ROWS, in_row_tiles
from pallas_kernels.sparse_attention.api import sparse_attention

T, H, PIECES = 96, 64, (1, 6, 13, 18)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(seed, high, *shape, dtype=np.uint8):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), dtype)


bf16 = functools.partial(normal, dtype=jnp.bfloat16)
ANGLES = rope.tables(np.float32(10000.0) ** -np.linspace(0, 1, 16, dtype=np.float32), jnp.arange(T))
EXPERT = [integers(1, 256, 4, 128, H // 2), integers(2, 3, 4, 128, H // 32) + 120,
          integers(3, 256, 4, H, 32), integers(4, 3, 4, H, 2) + 120]  # fmt: skip
RING = jnp.concatenate([integers(5, 100, T, 16, H), integers(6, 3, T, 16, H // 32) + 126], -1)
TABLE = jnp.asarray([[1, 2, 3]], jnp.int32)


def attend(q, slots, position, cos, sin):
    """Every row is a request of its own."""
    return sparse_attention(q[:, None], RING, slots, position[:, None], None, None, normal(9, 4), cos[:, None], sin[:, None],
                            window=8, scale=1 / 16, impl="reference")  # fmt: skip


def index(q, weights):
    pool = integers(7, 120, 4, 16 * 34)
    return index_score(q, weights, pool, TABLE, jnp.full(q.shape[0], 40, jnp.int32), impl="reference")


def sample(logits):
    n = logits.shape[0]
    return target_log_probs(logits[:, None], pack_sampling([SamplingParams(0.8, 40, 0.9, 0.01)] * n, [0] * n, 0))


OPERATIONS = {
    "bf16 product": (lambda x: linear.matmul(x, bf16(0, 96, H)), [bf16(1, T, H)]),
    "fp32 product": (lambda x: linear.matmul(x, normal(0, 24, H)), [normal(1, T, H)]),
    "norm": (lambda x: linear.rms_norm(x, bf16(0, H), 1e-20), [bf16(1, T, H)]),
    "rotation": (lambda x, c, s: rope.rotate(x, c[:, None], s[:, None]), [bf16(1, T, 4, H), *ANGLES]),
    "angles": (lambda p: rope.tables(np.float32(0.7) ** np.arange(32, dtype=np.float32), p), [jnp.arange(T) * 977]),
    "collapse": (hyper.collapse, [bf16(1, T, 4, H), normal(2, T, 4)]),
    "expand": (hyper.expand, [bf16(1, T, 4, H), bf16(2, T, H), normal(3, T, 4), normal(4, T, 4, 4)]),
    "enter": (lambda x, p: hyper_enter(x, p, bf16(0, H), eps=1e-20, impl="reference"), [bf16(1, T, 4, H), normal(2, T, 4)]),
    "coefficients": (
        lambda x, r: hyper_coefficients(x, r, normal(3, 3), normal(4, 24), streams=4, iterations=4, eps=1e-6, impl="reference"),
        [normal(1, T, 72), jnp.abs(normal(2, T))],
    ),
    "pooling": (lambda v, g, p: producer.pool_pairs(v[:, None], g[:, None], p),
                [normal(1, T, H), normal(2, T, H), normal(3, T, 2, H)]),
    "router": (lambda x: router(x, bf16(0, 32, H), normal(2, 32), k=6, impl="reference"), [bf16(1, T, H)]),
    "experts": (lambda x, i, w: experts(x, i, w, *EXPERT, impl="reference"),
                [bf16(1, T, H), integers(2, 4, T, 1, dtype=np.int32), normal(3, T, 1)]),
    "attention": (attend, [bf16(1, T, 4, H), jnp.arange(T), jnp.arange(T) % 30, *ANGLES]),
    "index score": (index, [bf16(1, T, 8, 64), bf16(2, T, 8)]),
    "sampling": (sample, [normal(1, T, 320) * 3]),
}


def bits(tree):
    return [np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in map(np.asarray, jax.tree.leaves(tree))]


@pytest.mark.parametrize("name", OPERATIONS)
def test_pieces_have_the_bits_of_the_whole(name):
    operation, operands = OPERATIONS[name]
    run = jax.jit(operation)
    whole = bits(run(*operands))
    for size in PIECES:
        parts = [bits(run(*(x[i : i + size] for x in operands))) for i in range(0, T - size + 1, size)]
        for got, want in zip(zip(*parts, strict=True), whole, strict=True):
            got = np.concatenate(got)
            np.testing.assert_array_equal(got, want[: len(got)], err_msg=f"pieces of {size}")


def test_a_score_does_not_depend_on_the_table():
    """A wider page table adds columns; the others keep their bits."""
    q, weights, visible = bf16(1, 6, 8, 64), bf16(2, 6, 8), jnp.full(6, 40, jnp.int32)
    pool = integers(7, 120, 4, 16 * 34)
    score = jax.jit(functools.partial(index_score, impl="reference"))
    wide = jnp.concatenate([TABLE, jnp.zeros((1, 9), jnp.int32)], 1)
    narrow, wider = score(q, weights, pool, TABLE, visible), score(q, weights, pool, wide, visible)
    np.testing.assert_array_equal(*(bits(x)[0] for x in (narrow, wider[:, : narrow.shape[1]])))


def test_a_gpu_runs_the_plain_operation():
    """Decided when lowered: for a CPU a loop over tiles, for a GPU one product."""
    traced = jax.jit(lambda x: in_row_tiles(lambda x: x @ normal(0, H, H), x)).trace(normal(1, 2 * ROWS, H))
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
    assert "while" in texts["cpu"] and "while" not in texts["cuda"]
    assert f"tensor<{2 * ROWS}x{H}xf32>, tensor<{H}x{H}xf32>" in texts["cuda"]
