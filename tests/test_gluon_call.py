"""What every Gluon kernel needs of the process that compiles it."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pallas_kernels import gluon_call


@gluon.jit
def _copy(x_ptr, out_ptr, N: gl.constexpr):
    at = gl.arange(0, N, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out_ptr + at, gl.load(x_ptr + at))


def test_compiles_where_another_library_took_the_cache_folder_away(monkeypatch, tmp_path):
    """jax-triton sets TRITON_CACHE_DIR to nothing when it is imported."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr("triton.knobs.cache.home_dir", str(tmp_path))
    arrays = [jax.ShapeDtypeStruct((32,), jnp.float32)] * 2
    kernel = gluon_call.compile_kernel(_copy, arrays, {"N": 32}, warps=1, compute_capability=90)
    assert ".entry _copy" in kernel.asm["ptx"]
    assert list((tmp_path / ".triton" / "cache").iterdir())
