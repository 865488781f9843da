"""What every benchmark writes beside its numbers: device, versions, commit, seed, and the ceilings measured in the same run.

A floor is the larger of bytes over copy bandwidth and operations over the rate of the unit that does them; both rates
come from `measure_peaks` on the device of the run, never from a data sheet.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time

import jax
import jax.numpy as jnp

from dsv41_jax.cli_run import whole_file

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton", "triton", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Ceilings of one device. copy_gbps: bytes read plus bytes written, of the fastest of several passes over memory;
    bf16_tflops, fp8_tflops: the fastest of several large matrix products. notes: what could not be measured as asked, and
    what was taken instead."""

    copy_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    notes: tuple[str, ...] = ()

    def floor_us(self, nbytes: float, flops: float, unit: str = "bf16") -> float:
        """Microseconds that no implementation beats. unit: "bf16" or "fp8"."""
        rate = {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops}[unit]
        return max(nbytes / self.copy_gbps * 1e-3, flops / rate * 1e-6)


def _git(*args: str) -> str | None:
    root = pathlib.Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(["git", "-C", str(root), *args], check=False, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, check=False, capture_output=True, text=True, timeout=20)
        return done.stdout.split("\n")[0].strip() or None
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(seed: int | None = None) -> dict:
    """Plain data: device, driver, versions, commit, seed, flags. The commit is that of the working tree (with
    "modified": whether it has uncommitted changes) or of the variable DSV41_COMMIT where there is no repository."""
    device = jax.devices()[0]
    commit = os.environ.get("DSV41_COMMIT") or _git("rev-parse", "HEAD")
    modified = None if os.environ.get("DSV41_COMMIT") else bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "compute_capability": str(getattr(device, "compute_capability", "")) or None,
        "driver": _driver() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        "versions": {name: v for name in _PACKAGES if (v := _version(name))},
        "commit": commit,
        "modified": modified,
        "seed": seed,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(path, result: dict) -> pathlib.Path:
    """Write a result, whole or not at all; its folder is made."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, "w") as f:
        f.write(json.dumps(result, indent=1, sort_keys=False) + "\n")
    return path


def best_us(call, repeats: int = 9) -> float:
    """Microseconds of the fastest of `repeats` calls, after one more; results are waited for."""
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, (time.perf_counter() - start) * 1e6)
    return best


def copy_gbps(nbytes: int = 1 << 31, inner: int = 4) -> float:
    """GB/s, bytes read plus bytes written, of passes over `nbytes` of device memory: a copy, a sum of every row, or one added to
    every value, whichever is fastest."""
    x = jnp.ones((nbytes // 4,), jnp.float32)
    passes = (
        (jnp.copy, 2),
        (lambda x: x + 1.0, 2),
        (lambda x: jnp.sum(x.reshape(-1, 1 << 14), axis=1), 1),
    )

    def rate(one, moved: int) -> float:
        one = jax.jit(one)
        return moved * nbytes * inner / best_us(lambda: [one(x) for _ in range(inner)]) * 1e-3

    return max(rate(*p) for p in passes)


PRODUCTS = ((8192, 8192, 8192), (384, 129280, 5120))  # rows, columns, channels; the second: a step's lm_head
SMALL_PRODUCTS = ((256, 256, 256),)


def product_tflops(dtype, shapes=PRODUCTS, inner: int = 6) -> float:
    """TFLOP/s of products of random operands accumulated in fp32, of the shape that runs fastest.

    A ceiling that some kernel of the step passes is none. A GPU lowers its clock under product after product, and raises it only
    slowly out of idleness; in a step, one follows kernels that wait for memory. So each follows a pass over memory here, and
    what the passes take alone is left out, the wait for the end with it."""
    pass_over = jax.jit(lambda x: x + 1.0)
    x = jnp.ones((1 << 18 if shapes is SMALL_PRODUCTS else 1 << 28,), jnp.float32)

    def rate(rows: int, columns: int, channels: int) -> float:
        keys = jax.random.split(jax.random.key(0), 2)
        a, b = (
            (jax.random.normal(k, (n, channels), jnp.float32) / 8).astype(dtype)
            for k, n in zip(keys, (rows, columns), strict=True)
        )
        dot = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16))
        passes = best_us(lambda: [pass_over(x) for _ in range(inner)])
        both = best_us(lambda: [(pass_over(x), dot(a, b)) for _ in range(inner)])
        return 2 * rows * columns * channels * inner / max(both - passes, 1e-3 * both) * 1e-6

    return max(rate(*shape) for shape in shapes)


def measure_peaks() -> Peaks:
    """Ceilings of the default device. On a CPU the problems are small: there the figures only keep the arithmetic alive."""
    gpu = jax.default_backend() == "gpu"
    shapes = PRODUCTS if gpu else SMALL_PRODUCTS
    copy = copy_gbps(1 << 31 if gpu else 1 << 22, 4 if gpu else 2)
    bf16 = product_tflops(jnp.bfloat16, shapes)
    fp8 = product_tflops(jnp.float8_e4m3fn, shapes) if gpu else 2 * bf16
    notes = ()
    if fp8 < 1.3 * bf16:
        notes = (f"the fp8 product ran at {fp8:.0f} TFLOP/s, not on the fp8 unit: twice the bf16 rate is taken for it",)
        fp8 = 2 * bf16
    # significant digits, not decimals: a busy CPU's figures would round to nothing
    return Peaks(*(float(f"{x:.5g}") for x in (copy, bf16, fp8)), notes)
