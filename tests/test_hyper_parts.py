"""Weights of hyper-connection sites in bf16 parts: what load, reload, placeholders and steps hold and compute."""

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax import checkpoint, hyper_parts
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.presets import TINY
from pallas_kernels.hyper_leave import reference


@pytest.fixture
def folders():
    return harness.checkpoint_pair(TINY)


def assert_same_but_for_the_form(parted: dict, plain: dict):
    sites = hyper_parts.of_sites(plain)
    assert len(sites) == 2 * (TINY.num_hidden_layers + len(TINY.draft_layers))
    assert hyper_parts.held(parted) == sites and not hyper_parts.held(plain)
    for path, want in plain.items():
        got = reference.joined(parted[path]) if path in sites else parted[path]
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), path


def test_load_and_reload_hold_the_parts_and_lose_nothing(folders):
    plain = [flat_paths(checkpoint.load(folder, progress=False)) for folder in folders]  # a CPU's own form
    live = checkpoint.load(folders[0], split_sites=True, progress=False)
    assert_same_but_for_the_form(flat_paths(live), plain[0])
    new = checkpoint.reload(live, folders[1], progress=False)
    assert_same_but_for_the_form(flat_paths(new), plain[1])
    described = lambda leaves: {path: (x.shape, x.dtype) for path, x in leaves.items()}
    assert described(flat_paths(new)) == described(flat_paths(live))
    assert described(hyper_parts.as_held(flat_paths(Transformer(TINY)), flat_paths(live))) == described(flat_paths(live))


def test_the_device_decides(monkeypatch):
    assert not hyper_parts.wanted(None) and not hyper_parts.wanted(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    gpu = type("Gpu", (), {"platform": "gpu"})()
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert hyper_parts.wanted(None) and hyper_parts.wanted(gpu)


@pytest.mark.parametrize("precision", ["released", "float32"])
def test_a_site_computes_the_same_from_either_form(precision):
    """Every bit, in bf16 and in fp32: what `hyper.enter` makes of random streams."""
    from dsv41_jax import hyper
    from dsv41_jax.options import DecodeOptions
    from dsv41_jax.params import HyperSite
    from dsv41_jax.precision import precision as named

    c, rng = harness.config("all_kinds"), np.random.default_rng(3)
    site = HyperSite(c)
    random = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
    site.fn, site.base, site.scale = (type(p)(random(p.get_value())) for p in (site.fn, site.base, site.scale))
    streams = jnp.asarray(rng.standard_normal((3, c.hc_mult, c.hidden_size)), named(precision).dtype)
    at = hyper.Residual(streams, jnp.ones((3, c.hc_mult)))
    run = lambda: hyper.enter(at, jnp.ones(c.hidden_size, jnp.bfloat16), site, c, DecodeOptions())
    want = run()
    site.fn = type(site.fn)(reference.split(site.fn[...]))
    for got, expected in zip(run(), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
