"""Shapes of sparse attention that tests and benchmarks share, with their byte and flop counts."""

import dataclasses
import functools

import numpy as np

from pallas_kernels import codecs


@dataclasses.dataclass(frozen=True)
class Spec:
    """One problem: B requests of S rows, N heads of D channels, K selected entries in pages of E, window W, ring R."""

    name: str
    batch: int
    span: int
    heads: int
    dim: int
    window: int
    selected: int  # 0 = SWA layer
    ring: int
    page_entries: int
    context: int  # positions before the first row
    ratio: int = 1
    rotary: int = 64
    sparsity: float = 0.0  # share of selected slots that are -1

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def rows(self) -> int:
        return self.batch * self.span

    @property
    def entries(self) -> int:
        """Of one request."""
        return max((self.context + self.span) // self.ratio, 1)

    @property
    def pool_shape(self) -> tuple[int, int, int]:
        """[P, E, bytes] of the global pool: a page that nobody has and those of all requests."""
        pages = 1 + self.batch * codecs.cdiv(self.entries, self.page_entries)
        return pages, self.page_entries, codecs.global_record_bytes(self.dim)

    @property
    def bytes(self) -> int:
        """Device bytes, each once: q and output in bf16, the ring rows of a request, every row's selected records.

        Selections of two rows may overlap and then sit in the cache; they are counted apart, as performance.md does.
        """
        q_and_out = 2 * 2 * self.rows * self.heads * self.dim
        ring = self.batch * (self.window + self.span - 1) * codecs.window_record_bytes(self.dim)
        chosen = self.rows * self.selected * (codecs.global_record_bytes(self.dim) + 4)
        return q_and_out + ring + chosen + self.rows * self.rotary * 4

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.heads * (self.window + self.selected) * self.dim

    def make_inputs(self, seed: int) -> dict:
        """Keyword arguments of `sparse_attention`, numpy, with random pages, permuted slots and no padding rows."""
        rng = np.random.default_rng(seed)
        entries = self.entries
        columns = codecs.cdiv(entries, self.page_entries)
        table = 1 + rng.permutation(self.batch * columns).reshape(self.batch, columns)
        positions = self.context + np.tile(np.arange(self.span), (self.batch, 1))
        angle = rng.uniform(0, 2 * np.pi, (self.batch, self.span, self.rotary // 2))
        inputs = dict(
            q=_bf16(rng.standard_normal((self.batch, self.span, self.heads, self.dim))),
            window_pool=random_records(rng, (self.batch, self.ring), self.dim, window=True),
            slots=rng.permutation(self.batch).astype(np.int32),
            positions=positions.astype(np.int32),
            global_pool=None,
            global_slots=None,
            sink=rng.standard_normal(self.heads).astype(np.float32),
            cos=np.cos(angle).astype(np.float32),
            sin=np.sin(angle).astype(np.float32),
        )
        if self.selected:
            pick = self._select(rng, positions, entries)
            page = np.take_along_axis(table[:, None, :], pick // self.page_entries, 2)
            slots = np.where(pick >= 0, page * self.page_entries + pick % self.page_entries, -1)
            inputs["global_pool"] = random_records(rng, self.pool_shape[:2], self.dim, window=False)
            inputs["global_slots"] = slots.astype(np.int32)
        return inputs

    def _select(self, rng, positions, entries):
        """Distinct visible entries of every row, i64[B, S, K] ascending, -1 at the end where there are too few."""
        pick = np.full((self.batch, self.span, self.selected), -1)
        for row in np.ndindex(self.batch, self.span):
            visible = min((positions[row] + 1) // self.ratio, entries)
            count = int(min(self.selected, visible) * (1 - self.sparsity))
            pick[row][:count] = np.sort(rng.choice(visible, count, replace=False))
        return pick

    @property
    def options(self) -> dict:
        """The static keyword arguments of `sparse_attention`."""
        return dict(window=self.window, scale=self.scale)


def _bf16(x):
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16)


def random_records(rng, shape, dim, *, window: bool):
    """Random valid records u8[*shape, bytes]: finite payloads, scales such that values are of order 1."""
    if window:
        payload = rng.integers(0, 256, (*shape, dim), dtype=np.uint8)
        payload[(payload & 0x7F) == 0x7F] = 0  # the two NaN codes
        scale = rng.integers(119, 122, (*shape, dim // codecs.GROUP), dtype=np.uint8)
    else:
        payload = rng.integers(0, 256, (*shape, dim // 2), dtype=np.uint8)
        scale = rng.integers(0x20, 0x30, (*shape, dim // codecs.NV_GROUP), dtype=np.uint8)  # 2^-3 .. 0.47
    return np.concatenate([payload, scale], -1)


TINY = Spec("tiny", 2, 3, 4, 64, 8, 6, 12, 4, 21, rotary=16)
TINY_SWA = Spec("tiny_swa", 3, 1, 4, 64, 8, 0, 9, 4, 5, rotary=16)
SMALL = Spec("small", 2, 2, 64, 512, 128, 96, 133, 64, 300, 2)  # what a kernel check on the GPU starts with
SHORT = Spec("short", 3, 6, 64, 512, 128, 512, 133, 128, 40, sparsity=0.25)
M384 = Spec("m384_r1", 64, 6, 64, 512, 128, 512, 133, 128, 32768)
M384_R2 = Spec("m384_r2", 64, 6, 64, 512, 128, 512, 133, 64, 32768, 2)
M384_SWA = Spec("m384_swa", 64, 6, 64, 512, 128, 0, 133, 128, 32768)
M384_1M = Spec("m384_1m", 64, 6, 64, 512, 128, 512, 133, 128, 2**20 - 6)  # a pool of 19 GB, never made whole

CPU_SPECS = (TINY, TINY_SWA)
GPU_SPECS = (SMALL, SHORT, M384_SWA, M384)
BENCH_SPECS = SPECS = (M384, M384_R2, M384_SWA)


def deviceless_case(name: str):
    """(function, arguments) of "<spec>[:<implementation>]", by default the Hopper kernel, for a compile without a GPU
    (tests/deviceless.py)."""
    import jax

    from pallas_kernels.sparse_attention import hopper, one_pass

    name, _, implementation = name.partition(":")
    run = {
        "": hopper.sparse_attention, "hopper_persistent": hopper.sparse_attention,
        "hopper_ahead": functools.partial(hopper.sparse_attention, ahead=True), "one_pass": one_pass.sparse_attention,
    }[implementation]  # fmt: skip
    spec = next(s for s in (*GPU_SPECS, *BENCH_SPECS, M384_1M) if s.name == name)
    inputs = dataclasses.replace(spec, batch=2, context=300).make_inputs(0)  # the grid is no part of the code
    names = [k for k, v in inputs.items() if v is not None]
    shapes = {k: inputs[k].shape for k in names}
    if spec == M384_1M:
        shapes["global_pool"] = spec.pool_shape  # its size is

    def function(*arrays):
        given = dict.fromkeys(inputs) | dict(zip(names, arrays, strict=True))
        return run(**given, **spec.options, rotate_query=True)

    return function, tuple(jax.ShapeDtypeStruct(shapes[k], inputs[k].dtype) for k in names)
