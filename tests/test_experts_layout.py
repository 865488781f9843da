"""The Hopper kernel's weight order, decode arithmetic, combine and quantisation, emulated in numpy."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.codecs import dequantize_weight_mxfp4
from pallas_kernels.expert_plan import expert_plan
from pallas_kernels.experts import experts, explain, hopper, layout, requantise, route, shuffle_weights
from pallas_kernels.experts.reference import qdq_fp8
from pallas_kernels.experts.specs import ExpertsSpec

SPEC = ExpertsSpec("layout", 5, 512, 256, 3, 2)


def prmt(low, high, selector):
    """PTX prmt.b32 without sign copies: byte i = byte (nibble i of selector) of {high, low}."""
    pool = np.stack([(low >> 8 * i) & 255 for i in range(4)] + [(high >> 8 * i) & 255 for i in range(4)], -1)
    out = np.zeros_like(low)
    for i in range(4):
        pick = (selector >> 4 * i) & 15
        assert (pick < 8).all()
        out |= np.take_along_axis(pool, pick[..., None].astype(np.int64), -1)[..., 0] << 8 * i
    return out


def lane_weights(w, s):
    """What the lanes feed to the tensor cores: f64[E, rows, inner], both in kernel order, factors applied."""
    e, blocks, chunks = w.shape[:3]
    words = np.asarray(w).view(np.uint32).reshape(e, blocks, chunks, 2, 128, 4).astype(np.uint64)
    t = np.asarray(s)[:, :, :-2].copy().view(np.uint8).reshape(e, blocks, chunks // 2, 128, 4)
    base = np.asarray(s)[:, :, -2:].copy().view(np.float32).reshape(e, blocks, 128, 2)
    out = np.full((e, blocks * 64, chunks * 128), np.nan)
    lanes = np.arange(128)
    warp, r, q = lanes // 32, lanes % 32 // 4, lanes % 4
    for c in range(chunks):
        for row in (0, 1):
            level = t[:, :, c // 2, :, 2 * (c % 2) + row].astype(np.uint64)
            low, high = level * 0x08080800 + 0x0C080000, level * 0x08080808 + 0x1C181410
            for i in range(4):
                word = words[:, :, c, i // 2, :, 2 * (i % 2) + row]
                m = word & 0x77777777
                a = prmt(low, high, m & 0xFFFF) | (word & 0x80808080)
                b = prmt(low, high, m >> 16) | ((word << 4) & 0x80808080)
                for h, register in enumerate((a, b)):
                    for j in range(4):
                        value = ((register >> 8 * j) & 255).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
                        position = 128 * c + 32 * i + 16 * h + 4 * q + j
                        rows = np.arange(blocks)[:, None] * 64 + 16 * warp + r + 8 * row
                        out[:, rows, position[None]] = value.astype(np.float64) * base[..., row]
    return out


def in_channel_order(a):
    """[..., positions] -> [..., channels]."""
    chunked = a.reshape(*a.shape[:-1], -1, 128)
    return chunked[..., np.argsort(layout.CHANNEL)].reshape(a.shape)


def test_lanes_decode_the_exact_weights():
    *_, w13, s13, w2, s2 = SPEC.make_inputs(7)
    a13, t13, a2, t2 = layout.shuffle_weights(w13, s13, w2, s2)
    f, h = SPEC.width, SPEC.hidden
    got = in_channel_order(lane_weights(a13, t13)).reshape(3, -1, 4, 2, 8, h)
    want = np.asarray(dequantize_weight_mxfp4(w13, s13, jnp.float32))
    # Gate rows of block b in lane order are positions 32 b + 8 warp + r; the up row sits eight rows below.
    gate, up = (in_channel_order(got[:, :, :, i].reshape(3, f, h).swapaxes(1, 2)).swapaxes(1, 2) for i in (0, 1))
    np.testing.assert_array_equal(gate, want[:, :f])
    np.testing.assert_array_equal(up, want[:, f:])
    down = in_channel_order(lane_weights(a2, t2)).reshape(3, -1, 4, 2, 8, f).swapaxes(3, 4).reshape(3, h, f)
    np.testing.assert_array_equal(down, np.asarray(dequantize_weight_mxfp4(w2, s2, jnp.float32)))


def test_shuffle_is_lossless_within_its_range_and_says_so():
    *_, w13, s13, w2, s2 = SPEC.make_inputs(1)
    s13 = s13.at[0, 3, 0].set(120).at[0, 3, 1:].set(109)
    assert bool(layout.scales_fit(s13))
    back = layout.unshuffle_weights(*layout.shuffle_weights(w13, s13, w2, s2))
    for a, b in zip(back, (w13, s13, w2, s2), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert not bool(layout.scales_fit(s13.at[0, 3, 0].set(121)))
    assert not bool(layout.scales_fit(jnp.zeros_like(s13)))
    with pytest.raises(ValueError, match="multiple of 256"):
        layout.shuffle_w13(w13[:, :, :64], s13[:, :, :4])


def test_combine_takes_local_rows_only_in_ascending_expert_order():
    spec = ExpertsSpec("combine", 9, 128, 64, 4, 3, total=8)
    ids, weights = spec.make_routing(np.random.default_rng(1))
    p = expert_plan(jnp.asarray(ids), jnp.asarray(weights), 2, local=4, tile_rows=8)
    y = np.full((p.token.shape[0], 128), np.nan, np.float32)  # the kernel leaves gaps and foreign rows unwritten
    real = np.sort(np.asarray(p.position)[np.asarray(p.position) < int(p.count)])
    y[real] = np.random.default_rng(2).standard_normal((len(real), 128))
    got = np.asarray(route.combine(jnp.asarray(y), p))
    want = np.zeros_like(got)
    for row in real:  # sorted rows are in ascending expert id
        want[int(p.token[row])] += y[row]
    np.testing.assert_array_equal(got, want)


def test_common_scale_rounds_as_stated():
    """Equal to the model's FP8 where the chunk's scales agree; else off by at most 2**-10 of the largest scale."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((6, 512)) * np.repeat(2.0 ** rng.integers(-9, 3, (6, 16)), 32, axis=1)
    x[0] = rng.uniform(1, 1.9, 512)
    x = jnp.asarray(x, jnp.bfloat16)
    q, scale = requantise.quantize_rows(x)
    value = np.asarray(q).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.asarray(scale)[..., None]
    value = in_channel_order(value).swapaxes(0, 1).reshape(6, 512)
    want = np.asarray(qdq_fp8(x), np.float64)
    np.testing.assert_array_equal(value[0], want[0])
    bound = np.repeat(np.asarray(scale).T, 128, axis=1) * 2.0**-10
    assert (np.abs(value - want) <= bound).all()
    assert 0 < (value != want).mean() < 0.5


def test_both_quantisers_agree():
    x = jnp.asarray(np.random.default_rng(6).standard_normal((7, 256)) * 3, jnp.bfloat16)
    q, scale = requantise.quantize_rows(x)
    chunked = x.reshape(7, 2, 128)[..., layout.CHANNEL].swapaxes(0, 1)
    q2, scale2 = requantise.quantize_sorted(chunked)
    np.testing.assert_array_equal(np.asarray(q), np.asarray(q2))
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(scale2))


def test_tile_rows_follow_the_mean():
    assert [hopper.tile_rows(n, 96) for n in (6, 576, 2304, 3000, 9216)] == [8, 8, 32, 64, 64]
    assert dataclasses.asdict(SPEC)["hidden"] % 256 == 0


def test_operator_takes_shuffled_weights_everywhere():
    """The definition undoes the order: same bits as in the checkpoint's order, and the reason for it can be asked."""
    arrays = SPEC.make_inputs(4)
    shuffled = (*arrays[:3], *shuffle_weights(*arrays[3:]))
    np.testing.assert_array_equal(np.asarray(experts(*shuffled)), np.asarray(experts(*arrays)))
    assert explain(*shuffled, arch="sm_90")["chosen"] == "hopper"
    assert "shuffle_weights" in explain(*arrays, arch="sm_90")["hopper"]
    assert "released" in explain(*shuffled, precision="float32", arch="sm_90")["hopper"]
    with pytest.raises(ValueError, match="expected s2"):
        experts(*shuffled[:-1], shuffled[-1][:, :, 1:])
