"""What the tests of the index scores share: the definition as loops in numpy, and what two results may differ by."""

import jax
import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16


def key_of(pool, table_row, position, entries, dim):
    """Decoded key f64[J] of one logical position, or None if it is unallocated."""
    column = position // entries
    if not 0 <= column < len(table_row) or not 0 < table_row[column] < pool.shape[0]:
        return None
    page, entry = pool[table_row[column]], position % entries
    if pool.dtype != np.uint8:
        return page[entry].astype(np.float64)
    packed = page[entry * dim // 2 : (entry + 1) * dim // 2]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(dim).astype(np.uint8)
    at = entries * dim // 2 + entry * (dim // 32)
    scale = 2.0 ** (page[at : at + dim // 32].astype(np.float64) - 127)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(scale, 32)


def score_of(q, weights, key):
    """q f64[heads, J], weights bf16|f32[heads], key f64[J] -> the score with the roundings of the weights' dtype."""
    if key is None:
        return 0.0
    dtype = weights.dtype.type
    term = np.maximum((q @ key).astype(dtype), dtype(0)) * weights
    return float(term.astype(np.float64).sum().astype(dtype)) + 0.0


def loop(q, head_weights, index_pool, table, lengths, entries, position_of, width):
    rows, heads, dim = q.shape
    out = np.full((rows, width), -np.inf)
    for t in range(rows):
        request = t // (rows // table.shape[0])
        for c in range(min(max(int(lengths[t]), 0), width)):
            key = key_of(index_pool, table[request], position_of(t, c), entries, dim)
            out[t, c] = score_of(q[t].astype(np.float64), head_weights[t], key)
    return out


def loop_dense(inputs, spec):
    kw = {k: v for k, v in inputs.items() if k != "visible"}
    return loop(**kw, lengths=inputs["visible"], entries=spec.page_entries, position_of=lambda t, c: c,
                width=spec.capacity)  # fmt: skip


def loop_blocks(inputs, spec):
    ids, size = inputs["block_ids"], spec.block_size
    kw = {k: v for k, v in inputs.items() if k not in ("block_ids", "end")}
    return loop(**kw, lengths=inputs["end"], entries=spec.page_entries, width=ids.shape[1] * size,
                position_of=lambda t, c: int(ids[t, c // size]) * size + c % size)  # fmt: skip


def check(got, want, dtype):
    got = np.asarray(got)
    assert got.dtype == dtype
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert seen.any()
    scale = np.abs(want[seen]).max()
    # fp32 sums of heads in another order may move a bf16 result by one unit in the last place
    np.testing.assert_allclose(got[seen], want[seen], rtol=2**-7 if dtype == BF16 else 1e-5, atol=scale * 1e-6)
    assert not (np.signbit(got) & (got == 0)).any(), "-0 must be written as +0"


def kernel_against_reference(inputs, function, impl="hopper", same=None, **options):
    """FP8 products keep about 13 bits below the largest term, so a dot may round to the neighbouring bf16. same: inputs for
    the reference, if others than the kernel's."""
    inputs = jax.device_put(inputs)
    run = lambda impl, kw: np.asarray(jax.jit(lambda kw: function(**kw, **options, impl=impl))(kw)).astype(np.float64)
    got, want = run(impl, inputs), run("reference", inputs if same is None else jax.device_put(same))
    check_kernel(got, want)
    return got


def check_kernel(got, want):
    """f64[T, columns] of a kernel and of the reference: the same -inf and 0, the rest near."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert np.isfinite(got[seen]).all()
    np.testing.assert_array_equal(got[seen & (want == 0)], 0)
    assert not (np.signbit(got) & (got == 0)).any()
    if seen.any():
        rms = np.sqrt(np.mean((got[seen] - want[seen]) ** 2) / np.mean(want[seen] ** 2))
        assert rms < 3e-3, f"relative RMS {rms:.2e}"
