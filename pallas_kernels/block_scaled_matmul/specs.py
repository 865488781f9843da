"""Shapes of block_scaled_matmul that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..codecs import GROUP, cdiv, dequantize_fp8, quantize_fp8


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """rows M, inner I (channels of a group), outputs R (of all groups together); quantised: x had the FP8 round trip."""

    name: str
    rows: int
    inner: int
    outputs: int
    groups: int = 1
    quantised: bool = True
    goal_us: float | None = None  # first goal on one H200

    @property
    def bytes(self) -> int:
        """Weights and scales once, bf16 rows in and out."""
        weight = self.outputs * self.inner + cdiv(self.outputs, GROUP) * cdiv(self.inner, GROUP)
        return weight + 2 * self.rows * (self.groups * self.inner + self.outputs)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.outputs

    def make_inputs(self, seed: int):
        """(x, w, s): every finite code, scales spread over eight octaves."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.rows, self.groups * self.inner), np.float32)
        x = (dequantize_fp8(*quantize_fp8(jnp.asarray(x))) if self.quantised else jnp.asarray(x)).astype(jnp.bfloat16)
        codes = rng.integers(0, 256, (self.outputs, self.inner), np.uint8)
        codes[(codes & 127) == 127] -= 1  # the two codes that are no numbers
        w = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
        top = 127 - 6 - round(np.log2(self.inner) / 2)  # results of about one
        shape = cdiv(self.outputs, GROUP), cdiv(self.inner, GROUP)
        return x, w, jnp.asarray(rng.integers(top - 7, top + 1, shape).astype(np.uint8))


TINY = (
    MatmulSpec("tiny", 6, 128, 64),
    MatmulSpec("tiny_one_row", 1, 256, 96),
    MatmulSpec("tiny_groups", 5, 128, 256, groups=4, quantised=False),
    MatmulSpec("tiny_ragged", 9, 96, 40),
)
FULL = (
    MatmulSpec("front", 384, 5120, 1792, goal_us=12),
    MatmulSpec("qb_index", 384, 1280, 36864, goal_us=54),
    MatmulSpec("qb", 384, 1280, 32768),
    MatmulSpec("wo_a", 384, 4096, 8192, groups=8, quantised=False),
    MatmulSpec("wo_b", 384, 8192, 5120),
    MatmulSpec("shared_w13", 384, 5120, 4608),
    MatmulSpec("shared_w2", 384, 2304, 5120),
    MatmulSpec("main_proj", 384, 15360, 5120),
    MatmulSpec("qb_one_row", 1, 1280, 36864),
    MatmulSpec("front_one_row", 1, 5120, 1792),
    MatmulSpec("wo_a_one_row", 1, 4096, 8192, groups=8, quantised=False),
    MatmulSpec("wo_a_prefill", 1536, 4096, 8192, groups=8, quantised=False),
)
SPECS = TINY + FULL
BY_NAME = {s.name: s for s in SPECS}


def deviceless_case(name: str):
    """(function, abstract arguments) of "<spec>", "<spec>:blackwell" or "<spec>:n,math,splits[,registers]"."""
    import functools
    import os

    from . import blackwell, hopper

    name, _, cut = name.partition(":")
    spec = BY_NAME[name]
    tile = None
    if cut and cut != "blackwell":
        numbers = [int(v) for v in cut.split(",")]
        tile = hopper.Tile(*numbers[:3], registers=tuple(numbers[3:]) or None)
    shape = jax.ShapeDtypeStruct
    args = (
        shape((spec.rows, spec.groups * spec.inner), jnp.bfloat16),
        shape((spec.outputs, spec.inner), jnp.float8_e4m3fn),
        shape((cdiv(spec.outputs, GROUP), cdiv(spec.inner, GROUP)), jnp.uint8),
    )
    if cut == "blackwell":
        capability = int(os.environ["DEVICELESS_CAPABILITY"])
        run = functools.partial(blackwell.block_scaled_matmul, groups=spec.groups, quantised=spec.quantised)
        return functools.partial(run, capability=capability), args
    return functools.partial(hopper.block_scaled_matmul, groups=spec.groups, tile=tile), args
