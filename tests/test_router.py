"""Router: jnp against numpy, ties, extremes, FAKE_BALANCE_EXPERT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import explain, fake_balance, one_kernel, reference, router, two_kernels
from pallas_kernels.router.specs import SPECS, RouterSpec
from tests import deviceless

SMALL = [s for s in SPECS if s.hidden <= 128]


def numpy_router(x, gate, bias, k, scale):
    """float64 throughout; ids by a stable sort of descending biased score."""
    z = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    s = np.sqrt(np.logaddexp(0.0, z))
    ids = np.argsort(-(s + np.asarray(bias, np.float64)), axis=1, kind="stable")[:, :k]
    w = np.take_along_axis(s, ids, 1)
    return ids, scale * w / (w.sum(1, keepdims=True) + 1e-20)


@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reference_equals_numpy(spec, dtype):
    x, gate, bias = spec.make_inputs(3)
    x, gate = x.astype(dtype), gate.astype(dtype)
    ids, w = router(x, gate, bias, k=spec.k, scale=spec.scale)
    want_ids, want_w = numpy_router(x, gate, bias, spec.k, spec.scale)
    assert ids.dtype == jnp.int32 and w.dtype == jnp.float32
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(w, want_w, rtol=2e-6)


def test_ties_take_the_lowest_id_in_any_batch():
    x = jnp.ones((5, 32), jnp.bfloat16)
    gate = jnp.zeros((12, 32), jnp.bfloat16).at[jnp.array([3, 7, 9])].set(0.5)
    ids, w = router(x, gate, jnp.zeros(12), k=5, scale=1.5)
    np.testing.assert_array_equal(ids, np.tile([3, 7, 9, 0, 1], (5, 1)))
    one, _ = router(x[:1], gate, jnp.zeros(12), k=5, scale=1.5)
    np.testing.assert_array_equal(one[0], ids[0])
    assert float(w[0].sum()) == pytest.approx(1.5, rel=1e-6)


def test_bias_moves_the_choice_but_not_the_weights():
    x = jnp.ones((1, 32), jnp.float32)
    gate = jnp.linspace(-1, 1, 8)[:, None] * jnp.ones((8, 32)) / 32
    bias = jnp.zeros(8).at[0].set(10.0)
    ids, w = router(x, gate, bias, k=2, scale=1.0)
    np.testing.assert_array_equal(ids, [[0, 7]])
    s = np.sqrt(np.log1p(np.exp([-1.0, 1.0])))
    np.testing.assert_allclose(w[0], s / s.sum(), rtol=1e-6)


@pytest.mark.parametrize("z", [-200.0, -80.0, -17.0, 0.0, 30.0, 95.0, 2000.0])
def test_extreme_logits_stay_finite_and_exact(z):
    x = jnp.ones((1, 32), jnp.float32)
    gate = jnp.full((2, 32), z / 32, jnp.float32)
    _, w = router(x, gate, jnp.zeros(2), k=2, scale=1.5)
    # Two equal scores, however small, share 1.5, damped by 1e-20; exp(-200) is below fp32.
    s = np.exp(0.5 * z) if -100 < z < -40 else 0.0 if z < -100 else np.sqrt(np.logaddexp(0, z))
    np.testing.assert_allclose(w, 1.5 * s / (2 * s + 1e-20), rtol=1e-4, atol=1e-22)


@pytest.mark.parametrize("ep,dp", [(1, 1), (4, 4), (4, 2), (2, 4)])
def test_fake_balance_is_balanced(ep, dp):
    experts, rows, k = 96, 32, 6
    ids = np.stack([fake_balance(rows, k, experts=experts, ep_size=ep, dp_size=dp, dp_rank=d)[0] for d in range(dp)])
    counts = np.bincount(ids.ravel(), minlength=experts)
    assert counts.max() - counts.min() <= 1
    assert all(len(set(row)) == k for row in ids.reshape(-1, k).tolist())
    _, w = fake_balance(rows, k, experts=experts, ep_size=ep, dp_size=dp)
    assert (np.asarray(w) == 1).all()


def test_fake_balance_formula_with_a_traced_rank():
    ep, dp, local, rows, k = 4, 4, 24, 5, 6
    got, _ = jax.jit(lambda d: fake_balance(rows, k, experts=ep * local, ep_size=ep, dp_size=dp, dp_rank=d))(3)
    i = np.arange(rows * k)
    want = ((ep * 3 // dp + i % ep) % ep) * local + (int(3 * max(local / dp, 1)) + i // ep) % local
    np.testing.assert_array_equal(np.asarray(got).ravel(), want)


def test_errors_name_the_shapes():
    x, gate, bias = SMALL[0].make_inputs(0)
    with pytest.raises(ValueError, match=r"bias \[16\], got \(15,\)"):
        router(x, gate, bias[:15], k=3)
    with pytest.raises(ValueError, match="k = 17"):
        router(x, gate, bias, k=17)
    with pytest.raises(ValueError, match="ep_size"):
        fake_balance(4, 2, experts=10, ep_size=4)
    assert explain(x, gate, bias, k=3, arch="cpu")["chosen"] == "reference"


@pytest.mark.parametrize(("experts", "k"), [(16, 3), (48, 1), (96, 6), (384, 6), (16, 16), (2048, 8)])
def test_kernel_selects_what_the_definition_does(experts, k):
    rng = np.random.default_rng(experts)
    z = rng.integers(-40, 40, (5, experts)).astype(np.float32) / 16  # many ties
    z[0], z[1, ::2] = 0.0, np.inf
    bias = jnp.asarray(rng.integers(-2, 3, experts).astype(np.float32) / 16)
    want_ids, want_w = reference.select(reference.score(jnp.asarray(z)), bias, k, 1.5)
    got_ids, got_w = one_kernel.select(jnp.asarray(z)[None], bias, k=k, scale=1.5, interpret=True)
    np.testing.assert_array_equal(got_ids, want_ids)
    finite = np.isfinite(np.asarray(want_w))
    np.testing.assert_allclose(np.asarray(got_w)[finite], np.asarray(want_w)[finite], rtol=1e-6)


@pytest.mark.parametrize("rows", [70, 64])
def test_two_kernels_equal_numpy_and_a_row_does_not_depend_on_the_others(rows):
    spec = RouterSpec("sliced", rows, hidden=512, experts=48, k=4)
    x, gate, bias = spec.make_inputs(7)
    run = lambda x: two_kernels.router(x, gate, bias, k=spec.k, scale=spec.scale, precision="released", interpret=True)
    assert two_kernels.product(x, gate, interpret=True).shape == (7, rows, 48)
    ids, w = run(x)
    want_ids, want_w = numpy_router(x, gate, bias, spec.k, spec.scale)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(w, want_w, rtol=2e-6)
    for got, whole in zip(run(x[9:20]), (ids, w), strict=True):
        np.testing.assert_array_equal(got, whole[9:20])


@pytest.mark.parametrize("tile", [two_kernels.Tiling(64, 64, 64, 3), two_kernels.Tiling(32, 32, 128, 4)], ids=str)
def test_product_in_any_tiling(tile):
    """Slices of unequal length, a last tile of rows and of experts that is not full."""
    x, gate, _ = RouterSpec("sliced", 70, hidden=512, experts=48, k=4).make_inputs(8)
    z = two_kernels.product(x, gate, tile=tile, interpret=True)
    assert z.shape == (tile.slices, 70, 48)
    want = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    np.testing.assert_allclose(np.asarray(z, np.float64).sum(0), want, atol=2e-6 * np.abs(want).max())
    one = two_kernels.product(x[9:20], gate, tile=tile, interpret=True)
    np.testing.assert_array_equal(one, z[:, 9:20])


@pytest.mark.parametrize(
    ("experts", "tiles", "slices"), [(16, 1, 7), (96, 3, 7), (128, 1, 16), (192, 6, 7), (384, 3, 7), (2048, 16, 7)]
)
def test_tilings_fit_the_weight(experts, tiles, slices):
    """Tiles without columns beyond the experts; a program's loads under way fit the shared memory of a multiprocessor."""
    tile = two_kernels.tiling(experts)
    assert tile.slices == slices and (experts, 0) == (tiles * tile.experts, experts % tile.experts)
    assert 2 * tile.step * (tile.rows + tile.experts) * tile.stages <= 227 * 1024


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000], ids=hex)
def test_kernel_chooses_distinct_ids_for_rows_of_nan_and_infinity(bits):
    """Whatever a NaN's payload: in the scores, and in the bias, whose bits the sum keeps."""
    special = jnp.full(32, np.uint32(bits).view(np.float32))
    for z, bias in ((special, jnp.zeros(32)), (jnp.zeros(32), special)):
        ids, _ = one_kernel.select(z[None, None], bias, k=6, scale=1.5, interpret=True)
        np.testing.assert_array_equal(ids, [np.arange(6)])


def test_two_kernels_by_default_and_falls_back_with_a_reason():
    x, gate, bias = SMALL[0].make_inputs(0)
    for arch in two_kernels.ARCHES:
        assert explain(x, gate, bias, k=3, arch=arch) == {"chosen": "two_kernels"}
    of_float32 = explain(x.astype(jnp.float32), gate, bias, k=3, arch="sm_103")
    assert of_float32["chosen"] == "one_kernel" and "x is float32" in of_float32["two_kernels"]
    uneven = explain(x[:, :72], gate[:, :72], bias, k=3, arch="sm_90")
    assert uneven["chosen"] == "one_kernel" and "72 channels, the product wants a multiple of 64" in uneven["two_kernels"]
    few = explain(x, gate[:9], bias[:9], k=3, arch="sm_90")
    assert few["chosen"] == "reference" and all("multiples of 16" in few[name] for name in ("one_kernel", "two_kernels"))


def check_selection(kernel):
    """A row stays in a warp: no barrier, no shuffle, three reductions of one instruction each in each of the six rounds."""
    assert len(kernel.kernels) == 1 and kernel.spill_bytes == 0 and kernel.registers <= 96
    assert not any(i in kernel.ptx for i in ("bar.sync", "shfl.sync")) and kernel.ptx.count("redux.sync") == 18


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_without_spills(target):
    cases = "verify:one_kernel", "verify:two_kernels", "verify_96:two_kernels", "draft:two_kernels"
    one, *two = deviceless.compile_all(target, "pallas_kernels.router.specs:deviceless_case", cases).values()
    assert not one.matching("sqrt").kernels  # no pass over scores
    check_selection(one.matching("router_select"))
    for compiled in two:
        assert sorted(k.name for k in compiled.kernels) == ["router_product", "router_select"] and compiled.spill_bytes == 0
        product = compiled.matching("router_product")
        assert product.registers <= 128 and not product.kernels[0].serialised
        assert ("wgmma.mma_async" if target == "sm_90a" else "tcgen05.mma") in product.ptx and "cp.async.cg" in product.ptx
        assert deviceless.unfenced_products(product.ptx) == 0
    for compiled in two[:2]:
        check_selection(compiled.matching("router_select"))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["one_kernel", "two_kernels"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec, impl):
    x, gate, bias = spec.make_inputs(9)
    gate = gate.at[5].set(gate[2]).at[11].set(gate[2])  # ties
    bias = bias.at[jnp.array([5, 11])].set(bias[2])
    want = router(x, gate, bias, k=spec.k, scale=spec.scale, impl="reference")
    got = router(x, gate, bias, k=spec.k, scale=spec.scale, impl=impl)
    (ids, weights), (want_ids, want_weights) = (tuple(map(np.asarray, pair)) for pair in (got, want))
    # XLA's library sums 5120 products in another order: where two experts are nearer than that, either may come first
    other = ids != want_ids
    assert other.sum() <= 4, other.sum()
    exact = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    keys = np.sqrt(np.logaddexp(0, exact)) + np.asarray(bias, np.float64)
    at = lambda i: np.take_along_axis(keys, i, 1)
    np.testing.assert_allclose(at(ids)[other], at(want_ids)[other], rtol=5e-6)
    assert all(len(set(row)) == spec.k for row in ids.tolist())
    same = ~other.any(1)
    tolerance = 5e-6 if impl == "two_kernels" else 1e-6  # its fp32 sums have an order of their own
    np.testing.assert_allclose(weights[same], want_weights[same], rtol=tolerance)
