"""Codecs and record layouts, bit for bit against ml_dtypes and numpy (spec/model.md section 4; spec/decode.md
section 1).

Every rounding decision is tried exhaustively: each midpoint of a format and its two float32 neighbours, each
power-of-two boundary of a scale and its two neighbours. The expected bytes never come from the code under test.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax import cache
from pallas_kernels import codecs
from pallas_kernels.global_producer.reference import store_global, store_index
from pallas_kernels.window_store.reference import store_window

F32, U8 = np.float32, np.uint8
E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
E4M3_VALUES = np.arange(127, dtype=U8).view(E4M3).astype(F32)  # 0..448
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
UNALLOCATED = (0, -1, -7, -99)


def with_neighbours(x):
    """Each value, one ulp below, one above, and all of them negated."""
    x = np.asarray(x, F32).reshape(-1)
    x = np.concatenate([np.nextafter(x, F32(-np.inf)), x, np.nextafter(x, F32(np.inf))])
    return np.concatenate([x, -x])


def midpoints(values):
    return (values[1:] + values[:-1]) / 2


def bits(x):
    return np.asarray(x).view(U8)


def smallest_power(x):
    """f32[...] > 0 -> u8[...]: e8m0 byte of the smallest power of two >= x, found by comparison."""
    powers = np.ldexp(1.0, np.arange(-127, 128))
    return np.searchsorted(powers, x.astype(np.float64), side="left").clip(0, 254).astype(U8)


def pack(values):
    """f32[..., D] of e2m1 values (clamped before) -> u8[..., D/2] through ml_dtypes' rounding."""
    code = np.asarray(values, F32).astype(E2M1).view(U8) & 15
    return code[..., 0::2] | (code[..., 1::2] << 4)


def in_groups(x, size):
    return x.reshape(*x.shape[:-1], -1, size)


def expected_fp8(x):
    """(payload bytes u8[..., D], e8m0 u8[..., D/32])."""
    g = in_groups(x, 32)
    scale = smallest_power(np.maximum(np.abs(g).max(-1), F32(1e-4)) * F32(1 / 448))
    q = np.clip(g / scale.view(E8M0).astype(F32)[..., None], -448, 448).astype(E4M3)
    return q.view(U8).reshape(x.shape), scale


def expected_mxfp4(x):
    """(packed u8[..., D/2], e8m0 u8[..., D/32])."""
    g = in_groups(x, 32)
    scale = smallest_power(np.maximum(np.abs(g).max(-1), F32(6 * 2.0**-126)) * F32(1 / 6))
    q = np.clip(g / scale.view(E8M0).astype(F32)[..., None], -6, 6)
    return pack(q.reshape(x.shape)), scale


def expected_nvfp4(x):
    """(packed u8[..., D/2], e4m3 bytes u8[..., D/16])."""
    g = in_groups(x, 16)
    scale = np.minimum(np.maximum(np.abs(g).max(-1), F32(6 * 2.0**-9)) / F32(6), F32(448)).astype(E4M3)
    q = np.clip(g / scale.astype(F32)[..., None], -6, 6)
    return pack(q.reshape(x.shape)), scale.view(U8)


def groups_with_amax(amax, size, seed=0):
    """One group per value of `amax`: it sits in a random channel with a random sign, the others are smaller."""
    rng = np.random.default_rng(seed)
    amax = np.asarray(amax, F32).reshape(-1)
    out = (rng.uniform(-0.99, 0.99, (amax.size, size)) * amax[:, None]).astype(F32)
    out[np.arange(amax.size), rng.integers(0, size, amax.size)] = amax * rng.choice([-1, 1], amax.size)
    return out


# ------------------------------------------------------------------------------------------------------ element codes


def test_e4m3_rounds_every_midpoint_to_even():
    x = with_neighbours(np.concatenate([midpoints(E4M3_VALUES), E4M3_VALUES[1:-1]]))
    x = np.concatenate([x, [0.0, -0.0, 448, -448, 2.0**-10, -(2.0**-10), 2.0**-11]]).astype(F32)
    np.testing.assert_array_equal(bits(codecs.to_e4m3(x)), x.astype(E4M3).view(U8))


def test_e4m3_clamps():
    x = np.array([448.0001, 464, 480, 1e30, 3.4e38], F32)
    np.testing.assert_array_equal(bits(codecs.to_e4m3(np.concatenate([x, -x]))), [0x7E] * 5 + [0xFE] * 5)


def test_e2m1_rounds_every_midpoint_to_the_even_code():
    ties = midpoints(E2M1_VALUES)
    code = np.asarray(codecs.to_e2m1(ties))
    np.testing.assert_array_equal(code, [0, 2, 2, 4, 4, 6, 6])  # model.md: .25 1.25 2.5 5 down, .75 1.75 3.5 up
    np.testing.assert_array_equal(codecs.to_e2m1(np.nextafter(ties, F32(0))), np.arange(7))
    np.testing.assert_array_equal(codecs.to_e2m1(np.nextafter(ties, F32(9))), np.arange(1, 8))
    x = with_neighbours(np.concatenate([ties, E2M1_VALUES[1:-1]]))
    np.testing.assert_array_equal(codecs.to_e2m1(x), x.astype(E2M1).view(U8) & 15)


def test_e2m1_keeps_the_sign_of_zero_and_clamps():
    x = np.array([0.0, -0.0, 0.25, -0.25, 6, -6, 6.01, -7, 1e38, -1e38], F32)
    np.testing.assert_array_equal(codecs.to_e2m1(x), [0, 8, 0, 8, 7, 15, 7, 15, 7, 15])
    back = np.asarray(codecs.from_e2m1(np.arange(16, dtype=U8)))
    np.testing.assert_array_equal(back, np.concatenate([E2M1_VALUES, -E2M1_VALUES]))
    assert np.signbit(back[8]) and not np.signbit(back[0])


def test_low_nibble_is_the_even_channel():
    code = np.arange(16, dtype=U8)[None]
    packed = np.asarray(codecs.pack_nibbles(code))
    np.testing.assert_array_equal(packed[0], [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    np.testing.assert_array_equal(codecs.unpack_nibbles(packed), code)


# ------------------------------------------------------------------------------------------------------------- scales


def test_e8m0_is_the_smallest_power_of_two_that_is_not_smaller():
    """All normal powers of two and both neighbours; the neighbour above the largest stays at byte 254."""
    power = np.ldexp(F32(1), np.arange(-126, 128)).astype(F32)
    byte = np.arange(1, 255)
    np.testing.assert_array_equal(codecs.ceil_e8m0(power), byte)
    np.testing.assert_array_equal(codecs.ceil_e8m0(np.nextafter(power, F32(np.inf))), np.minimum(byte + 1, 254))
    np.testing.assert_array_equal(codecs.ceil_e8m0(np.nextafter(power[1:], F32(0))), byte[1:])


def test_e8m0_bytes_are_powers_of_two():
    """Byte 0 is the subnormal 2^-127, byte 254 is 2^127. Compared as bits: a CPU may flush the former."""
    byte = np.arange(255, dtype=U8)
    want = np.ldexp(F32(1), byte.astype(int) - 127).astype(F32)
    np.testing.assert_array_equal(np.asarray(codecs.e8m0_to_f32(byte)).view(np.uint32), want.view(np.uint32))
    np.testing.assert_array_equal(want, byte.view(E8M0).astype(F32))


# ------------------------------------------------------------------------------------------------------------- groups


def boundary_amax(top):
    """Group maxima around every scale boundary top * 2^k, and ordinary ones between them."""
    at = with_neighbours(top * np.exp2(np.arange(-30.0, 60.0)))
    return np.concatenate([at[at > 0], np.exp2(np.random.default_rng(1).uniform(-40, 100, 200)).astype(F32)])


@pytest.mark.parametrize("size,top,quantise,expected", [
    (32, 448.0, codecs.quantize_fp8, expected_fp8),
    (32, 6.0, codecs.quantize_mxfp4, expected_mxfp4),
    (16, 6.0, codecs.quantize_nvfp4, expected_nvfp4),
], ids=["fp8", "mxfp4", "nvfp4"])  # fmt: skip
def test_groups_around_every_scale_boundary(size, top, quantise, expected):
    x = groups_with_amax(boundary_amax(top), size)
    for got, want in zip(quantise(x), expected(x), strict=True):
        np.testing.assert_array_equal(bits(got), want)


@pytest.mark.parametrize("quantise,expected", [
    (codecs.quantize_fp8, expected_fp8),
    (codecs.quantize_mxfp4, expected_mxfp4),
    (codecs.quantize_nvfp4, expected_nvfp4),
], ids=["fp8", "mxfp4", "nvfp4"])  # fmt: skip
def test_extreme_groups(quantise, expected):
    """Zeros of both signs, values far below the floors (normal floats), around the floors, and the largest floats."""
    floors = with_neighbours([1e-4, 6 * 2.0**-9, 6 * 2.0**-126, 2.0**-126])
    amax = np.concatenate([floors[floors >= 2.0**-126], [2.0**-120, 1e-30, 1e-10, 1e30, 3e38, np.finfo(F32).max]])
    x = np.concatenate([groups_with_amax(amax, 32), np.zeros((1, 32), F32), -np.zeros((1, 32), F32)])
    # a subnormal element beside a normal amax rounds to a zero whose sign is kept, flushed or not
    x[np.abs(x) < 2.0**-126] *= 0
    for got, want in zip(quantise(x), expected(x), strict=True):
        np.testing.assert_array_equal(bits(got), want)


@pytest.mark.parametrize("round_trip", [
    lambda x: codecs.dequantize_fp8(*codecs.quantize_fp8(x)),
    lambda x: codecs.dequantize_nvfp4(*codecs.quantize_nvfp4(x)),
], ids=["fp8", "nvfp4"])  # fmt: skip
def test_subnormal_groups_become_zero(round_trip):
    x = np.full((2, 32), 1e-40, F32) * np.array([[1], [-1]], F32)
    np.testing.assert_array_equal(round_trip(x), np.zeros_like(x))


def test_subnormal_groups_stay_below_the_smallest_normal_in_mxfp4():
    """Its floor is the smallest normal: a subnormal may round to it, or be flushed, but never grows."""
    x = np.full((1, 32), 1.1e-38, F32)
    payload, scale = codecs.quantize_mxfp4(x)
    assert np.asarray(scale).tolist() == [[1]]
    assert np.abs(np.asarray(codecs.dequantize_mxfp4(payload, scale))).max() <= 2.0**-126


def test_nvfp4_scale_rounds_at_every_e4m3_midpoint():
    """amax = 6 * midpoint exactly, and one ulp on either side; where the scale went down the largest element clips."""
    mid = midpoints(E4M3_VALUES[1:])
    amax = with_neighbours(6 * mid)
    x = groups_with_amax(amax[amax > 0], 16)
    packed, scale = codecs.quantize_nvfp4(x)
    want_packed, want_scale = expected_nvfp4(x)
    np.testing.assert_array_equal(bits(scale), want_scale)
    np.testing.assert_array_equal(packed, want_packed)
    largest = np.abs(x).max(-1) / np.asarray(scale).astype(F32)[:, 0]
    assert (largest > 6.1).sum() > 60  # the case exists
    decoded = np.abs(np.asarray(codecs.dequantize_nvfp4(packed, scale))).max(-1)
    clipped = largest > 6
    np.testing.assert_array_equal(decoded[clipped], 6 * np.asarray(scale).astype(F32)[clipped, 0])


def test_nvfp4_rounds_every_tie_to_even_at_every_scale():
    """threshold * scale exactly, and the bf16 numbers beside it, next to an amax that has that scale."""
    scale = E4M3_VALUES[1:].repeat(7)
    ties = np.tile(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], F32), 126) * scale
    x = np.zeros((len(ties), 16), F32)
    x[:, 0], x[:, 1], x[:, 2] = 6 * scale, ties, -ties
    x[:, 3], x[:, 4] = ties * F32(1 + 2.0**-7), ties * F32(1 - 2.0**-8)
    packed, got = codecs.quantize_nvfp4(x)
    np.testing.assert_array_equal(np.asarray(got).astype(F32)[:, 0], scale)
    np.testing.assert_array_equal(packed, expected_nvfp4(x)[0])


def test_nvfp4_saturates():
    x = groups_with_amax([6 * 448, 6 * 448.1, 3000, 1e6, 3e38], 16)
    packed, scale = codecs.quantize_nvfp4(x)
    np.testing.assert_array_equal(np.asarray(scale).astype(F32), np.full((5, 1), 448, F32))
    assert np.abs(np.asarray(codecs.dequantize_nvfp4(packed, scale))).max() == 6 * 448


def test_negative_zero_nibbles_survive_a_record():
    x = np.tile(np.array([1.0, -0.01], F32), 16)[None]  # -0.01 rounds to -0 beside 1.0
    for packed in (codecs.quantize_mxfp4(x)[0], codecs.quantize_nvfp4(x)[0]):
        assert (np.asarray(packed) >> 4 == 8).all()


def test_dequantised_values_are_exact_in_bf16():
    """All e4m3 scales times all e2m1 codes, all e2m1 and e4m3 codes times a power of two."""
    scale = np.repeat(np.arange(127, dtype=U8)[1:, None], 1, 1)
    payload = np.broadcast_to(codecs.pack_nibbles(np.arange(16, dtype=U8)), (126, 8))
    value = np.asarray(codecs.dequantize_nvfp4(jnp.asarray(payload), jnp.asarray(scale.view(E4M3))))
    want = np.concatenate([E2M1_VALUES, -E2M1_VALUES]) * scale.view(E4M3).astype(F32)
    np.testing.assert_array_equal(value, want)
    np.testing.assert_array_equal(value.astype(ml_dtypes.bfloat16).astype(F32), value)


def test_weight_tiles_use_their_own_scale():
    """[40, 70]: the last tiles of both axes are partial."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((40, 70)).astype(E4M3)
    scale = rng.integers(100, 150, (2, 3), dtype=U8)
    spread = np.repeat(np.repeat(scale.view(E8M0).astype(F32), 32, 0), 32, 1)[:40, :70]
    np.testing.assert_array_equal(codecs.dequantize_weight_fp8(weight, scale, F32), weight.astype(F32) * spread)


# ------------------------------------------------------------------------------------------------------------ records


def test_record_sizes_of_the_release():
    sizes = codecs.window_record_bytes(512), codecs.global_record_bytes(512), codecs.index_record_bytes(128)
    assert sizes == (528, 288, 68)


def test_record_layouts():
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(F32)
    payload, scale = expected_fp8(x)
    window = np.asarray(codecs.encode_window(x))
    np.testing.assert_array_equal(window, np.concatenate([payload, scale], 1))
    want = in_groups(payload.view(E4M3).astype(F32), 32) * scale.view(E8M0).astype(F32)[..., None]
    np.testing.assert_array_equal(codecs.decode_window(jnp.asarray(window), 96), want.reshape(5, 96))
    packed, scale = expected_nvfp4(x)
    record = np.asarray(codecs.encode_global(x))
    np.testing.assert_array_equal(record, np.concatenate([packed, scale], 1))
    decoded = np.asarray(codecs.decode_global(jnp.asarray(record), 96))
    code = np.stack([packed & 15, packed >> 4], -1).reshape(5, 96)
    signed = np.concatenate([E2M1_VALUES, -E2M1_VALUES])[code]
    np.testing.assert_array_equal(decoded, signed * np.repeat(scale.view(E4M3).astype(F32), 16, 1))


def test_index_pages_are_planar():
    """Entry e of a page of 4: payload at e*16, scale at 4*16 + e. Slot -1 writes nothing, nor does any other
    byte move."""
    pages, per_page, dim = 3, 4, 32
    pool = np.full((pages, per_page * codecs.index_record_bytes(dim)), 0xAB, U8)
    x = np.random.default_rng(0).standard_normal((5, dim)).astype(F32)
    slots = np.array([1 * 4 + 3, -1, 2 * 4 + 0, 1 * 4 + 0, -1], np.int32)
    got = np.asarray(store_index(jnp.asarray(pool), x, slots))
    packed, scale = expected_mxfp4(x)
    want = pool.copy()
    for row, slot in enumerate(slots):
        if slot >= 0:
            page, entry = divmod(slot, per_page)
            want[page, entry * 16 : entry * 16 + 16] = packed[row]
            want[page, per_page * 16 + entry] = scale[row, 0]
    np.testing.assert_array_equal(got, want)
    assert (got[0] == 0xAB).all()


def test_global_and_window_stores_skip_negative_slots():
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(F32)
    pool = np.full((2, 4, codecs.global_record_bytes(32)), 0xAB, U8)
    got = np.asarray(store_global(jnp.asarray(pool), x, np.array([5, -1, 7], np.int32)))
    want = pool.copy()
    want[1, 1], want[1, 3] = np.asarray(codecs.encode_global(x))[[0, 2]]
    np.testing.assert_array_equal(got, want)
    ring = np.full((2, 8, codecs.window_record_bytes(32)), 0xAB, U8)
    got = np.asarray(
        store_window(jnp.asarray(ring), x, np.array([1, -1, 0], np.int32), np.array([17, 3, 8], np.int32))
    )
    want = ring.copy()
    want[1, 1], want[0, 0] = np.asarray(codecs.encode_window(x))[[0, 2]]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("per_page", [4, 2])
def test_entry_slots_of_unallocated_pages_and_beyond_the_table(per_page):
    """Ids <= 0 or outside the pool give -1, so do entries past the last column: nothing is clamped to a live page."""
    pages = 6
    table = np.array([[3, *UNALLOCATED, 5], [pages, pages + 7, 1, 2, 0, -1]], np.int32)
    entries = np.arange(-2, 6 * per_page + 9, dtype=np.int32)
    got = np.asarray(cache.entry_slots(jnp.asarray(table), jnp.asarray(np.stack([entries] * 2)), per_page, pages))
    for row in range(2):
        for entry, slot in zip(entries, got[row], strict=True):
            column = entry // per_page
            page = table[row, column] if entry >= 0 and column < 6 else 0
            assert slot == (page * per_page + entry % per_page if 0 < page < pages else -1), (row, entry)
    assert (got >= 0).sum() == 4 * per_page
