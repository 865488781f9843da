"""Shapes of the index scorers that tests and benchmarks share, with their byte and flop counts."""

import dataclasses

import numpy as np

from pallas_kernels import codecs


@dataclasses.dataclass(frozen=True)
class Spec:
    """One problem: B requests of S rows, `heads` index heads of J channels, C columns of pages with E entries.

    `context` entries are visible to the first row of a request, one more to each next row. `blocks` > 0 makes it a
    candidate-only problem of that many blocks a row.
    """

    name: str
    batch: int
    span: int
    heads: int
    dim: int
    page_entries: int
    columns: int
    context: int
    blocks: int = 0
    block_size: int = 8
    fill: bool = True

    @property
    def rows(self) -> int:
        return self.batch * self.span

    @property
    def capacity(self) -> int:
        return self.columns * self.page_entries

    @property
    def pool_shape(self) -> tuple[int, int]:
        """[P, bytes] of the pool: a page that nobody has and those that hold every request's context."""
        used = min(codecs.cdiv(self.context + self.span, self.page_entries), self.columns)
        return 1 + self.batch * used, self.page_entries * codecs.index_record_bytes(self.dim)

    @property
    def scored(self) -> int:
        """Columns computed for each row."""
        return min(self.context, self.blocks * self.block_size) if self.blocks else self.context

    @property
    def bytes(self) -> int:
        """Device bytes, each once: a request's visible keys, q in bf16, weights, block ids and the logits written."""
        keys = self.batch * self.context * codecs.index_record_bytes(self.dim)
        q = self.rows * self.heads * (2 * self.dim + 2)
        dense = self.capacity if self.fill else self.context
        out = 2 * self.rows * (self.blocks * self.block_size if self.blocks else dense)
        pages = codecs.cdiv(self.context, self.page_entries)
        return keys + q + out + 4 * self.rows * self.blocks + 4 * self.batch * pages

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.heads * self.dim * self.scored

    def make_inputs(self, seed: int) -> dict:
        """Keyword arguments of `index_score` (or `index_score_blocks` if `blocks`), numpy, pages permuted."""
        import ml_dtypes

        rng = np.random.default_rng(seed)
        used = codecs.cdiv(self.context + self.span, self.page_entries)
        table = np.zeros((self.batch, self.columns), np.int32)
        used = min(used, self.columns)
        table[:, :used] = 1 + rng.permutation(self.batch * used).reshape(self.batch, used)
        weights = rng.standard_normal((self.rows, self.heads)) / 64
        inputs = dict(
            q=random_queries(rng, (self.rows, self.heads), self.dim),
            head_weights=weights.astype(ml_dtypes.bfloat16),
            index_pool=random_index_pages(rng, self.pool_shape[0], self.page_entries, self.dim),
            table=table,
        )
        visible = np.minimum(self.context + np.tile(np.arange(self.span), self.batch), self.capacity)
        if not self.blocks:
            return inputs | dict(visible=visible.astype(np.int32))
        ids = np.zeros((self.rows, self.blocks), np.int32)
        end = np.zeros(self.rows, np.int32)
        for row, length in enumerate(visible):
            total = codecs.cdiv(int(length), self.block_size)
            count = min(self.blocks, total)
            chosen = np.sort(rng.choice(total - 1, count - 1, replace=False)) if count > 1 else np.zeros(0, int)
            ids[row, :count] = [*chosen, total - 1]
            ids[row, count:] = total - 1
            end[row] = (count - 1) * self.block_size + int(length) - (total - 1) * self.block_size
        return inputs | dict(block_ids=ids, end=end)


def random_queries(rng, shape, dim):
    """bf16[*shape, dim] that MXFP4 holds exactly: random e2m1 values times a power of two per 32 channels."""
    import ml_dtypes

    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 8, (*shape, dim))]
    scale = 2.0 ** rng.integers(-4, -1, (*shape, dim // codecs.GROUP))
    signed = magnitude * rng.choice([-1.0, 1.0], magnitude.shape)
    return (signed * np.repeat(scale, codecs.GROUP, -1)).astype(ml_dtypes.bfloat16)


def random_index_pages(rng, pages, entries, dim):
    """Random planar pages u8[pages, entries * (dim/2 + dim/32)] with scales 2^-4..2^-2; page 0 is poison."""
    payload = rng.integers(0, 256, (pages, entries * dim // 2), dtype=np.uint8)
    scale = rng.integers(123, 126, (pages, entries * dim // codecs.GROUP), dtype=np.uint8)
    pool = np.concatenate([payload, scale], -1)
    pool[0] = 0xFF
    return pool


TINY = Spec("tiny", 2, 3, 4, 32, 4, 7, 19)
TINY_ODD = Spec("tiny_odd_pages", 3, 1, 4, 64, 10, 4, 33)
TINY_BLOCKS = Spec("tiny_blocks", 2, 3, 4, 32, 8, 9, 60, blocks=5)
TINY_BLOCKS_ODD = Spec("tiny_blocks_odd_pages", 2, 2, 4, 32, 6, 12, 50, blocks=4)
SMALL = Spec("small", 2, 6, 32, 128, 128, 5, 517)
SMALL_R2 = Spec("small_r2", 3, 2, 32, 128, 64, 9, 400)
SMALL_BLOCKS = Spec("small_blocks", 2, 6, 32, 128, 128, 9, 1021, blocks=64)
M384_16K = Spec("m384_16k", 64, 6, 32, 128, 128, 132, 16384)
M384_FULL1 = Spec("m384_full1", 64, 6, 32, 128, 128, 264, 32768)
M384_1M = Spec("m384_16k_of_1m", 64, 6, 32, 128, 128, 8192, 16384, fill=False)
CAPACITY_1M = Spec("capacity_1m", 128, 6, 32, 128, 128, 8192, 2**20 - 6)  # a pool of 9.1 GB, never made whole
M384_BLOCKS = Spec("m384_blocks", 64, 6, 32, 128, 128, 264, 32768, blocks=2048)

CPU_SPECS = (TINY, TINY_ODD)
CPU_BLOCK_SPECS = (TINY_BLOCKS, TINY_BLOCKS_ODD)
GPU_SPECS = (SMALL, SMALL_R2)
GPU_BLOCK_SPECS = (SMALL_BLOCKS,)
BENCH_SPECS = SPECS = (M384_16K, M384_FULL1)
BENCH_BLOCK_SPECS = BLOCK_SPECS = (M384_BLOCKS,)


def deviceless_case(name: str):
    """(function, arguments) for a compile without a GPU (tests/deviceless.py): "m384_16k" for the Hopper kernel,
    "m384_blocks:gather" for the one that gathers row by row, "m384_16k:blackwell" for the Triton one, for the target in
    DEVICELESS_CAPABILITY; with ":capacity_1m" behind it the pool is as large as CAPACITY_1M's."""
    import os

    import jax

    from pallas_kernels.index_score import blackwell, hopper

    name, *kinds = name.split(":")
    spec = next(s for s in (*GPU_SPECS, *GPU_BLOCK_SPECS, *BENCH_SPECS, *BENCH_BLOCK_SPECS) if s.name == name)
    inputs = dataclasses.replace(spec, batch=2, context=2 * spec.page_entries).make_inputs(0)
    shapes = {k: v.shape for k, v in inputs.items()}
    if CAPACITY_1M.name in kinds:
        shapes["index_pool"] = CAPACITY_1M.pool_shape
    module, extra = hopper, {}
    if "blackwell" in kinds:
        module, extra = blackwell, {"capability": int(os.environ["DEVICELESS_CAPABILITY"])}
    if "gather" in kinds:
        extra = {"window": None}

    def function(*arrays):
        inner = dict(zip(inputs, arrays, strict=True)) | extra
        if spec.blocks:
            return module.index_score_blocks(**inner, block_size=spec.block_size)
        return module.index_score(**inner)

    return function, tuple(jax.ShapeDtypeStruct(shapes[k], v.dtype) for k, v in inputs.items())
