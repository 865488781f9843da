"""The emulator of thread-level kernels: what it computes, and that it catches what lock step would hide."""

import numpy as np
import pytest

from pallas_kernels import radix, simt


def run(kernel, inputs=(), outputs=(((2, 128), "int32"),), shared_words=256):
    return simt.emulate(kernel, list(inputs), list(outputs), rows=2, threads=128, shared_words=shared_words)


def test_scans_and_ballots():
    values = np.random.default_rng(0).integers(0, 50, (2, 128)).astype(np.int32)

    def kernel(m, x, before, ballots):
        at = m.row * 128 + m.tid
        value = m.load(x, at)
        m.store(before, at, m.scan_block(value, m.shared(m.warps))[0])
        m.store(ballots, at, m.ballot(value > 25).ones())

    before, ballots = run(kernel, [values], [((2, 128), "int32")] * 2)
    np.testing.assert_array_equal(before, np.cumsum(values, 1) - values)
    per_warp = (values > 25).reshape(2, 4, 32).sum(-1)
    np.testing.assert_array_equal(ballots, np.repeat(per_warp, 32, 1))


def test_sums_over_a_warp_and_quotients():
    values = np.random.default_rng(1).integers(-(2**31), 2**31, (2, 128), np.int32)

    def kernel(m, x, sums, quotients):
        at = m.row * 128 + m.tid
        value = m.load(x, at)
        m.store(sums, at, m.sum_warp(value))
        m.store(quotients, at, value // 24)

    sums, quotients = run(kernel, [values], [((2, 128), "int32")] * 2)
    per_warp = values.reshape(2, 4, 32).sum(-1, dtype=np.int64).astype(np.int32)  # wraps
    np.testing.assert_array_equal(sums, np.repeat(per_warp, 32, 1))
    np.testing.assert_array_equal(quotients, (values.view(np.uint32) // 24).view(np.int32))


def test_words_wrap_and_compare_as_stated():
    def kernel(m, out):
        big = m.word(0x7FFFFFFF) + m.tid
        m.store(out, m.row * 128 + m.tid, (big < 0).pick(1, 0) + (big.below(m.word(5))).pick(2, 0))

    (out,) = run(kernel)
    np.testing.assert_array_equal(out[0], [0] + [1] * 127)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda m, s, o: m.get(s, m.tid), "before anyone wrote"),
        (lambda m, s, o: (m.put(s, m.tid, 1), m.get(s, 127 - m.tid)), "another thread's write"),
        (lambda m, s, o: (m.put(s, m.tid, 1), m.barrier(), m.get(s, 127 - m.tid), m.put(s, m.tid, 2)), "while read"),
        (lambda m, s, o: m.put(s, 0, m.tid), "two threads store one shared"),
        (lambda m, s, o: m.put(s, m.tid + 200, 1), "out of bounds"),
        (lambda m, s, o: m.store(o, m.tid + 200, m.tid), "global access out of bounds"),
        (lambda m, s, o: (m.put(s, m.tid, 0), m.add(s, m.tid, 1)), "atomic in the epoch"),
        (lambda m, s, o: m.get_many(s, m.tid, 2), "misaligned"),
    ],
)
def test_faults_are_caught(fault, message):
    def kernel(m, out):
        fault(m, m.shared(256), out)

    with pytest.raises(AssertionError, match=message):
        run(kernel)


def test_barrier_in_divergent_code_is_caught():
    def kernel(m, out):
        del out
        with m.when(m.tid < 64):
            m.barrier()

    with pytest.raises(AssertionError, match="divergent"):
        run(kernel)


def test_find_cut_is_the_kth_rank():
    rng = np.random.default_rng(4)
    ranks = rng.integers(0x80, 0x90, (2, 256)).astype(np.uint16)
    ranks[1] = rng.integers(0, 65536, 256)

    def kernel(m, pairs, out):
        space = radix.allocate(m)
        pair = m.load(pairs, m.row * 128 + m.tid)
        m.barrier()
        cut, places, _ = radix.find_cut(m, space, lambda visit: visit(pair), 40)
        m.store(out, m.row * 2, cut, where=m.tid.equals(0))
        m.store(out, m.row * 2 + 1, places, where=m.tid.equals(0))

    (out,) = run(kernel, [ranks], [((2, 2), "int32")], radix.shared_words(128))
    for row, (cut, places) in zip(ranks, out, strict=True):
        assert cut == np.sort(row)[39] and places == 40 - (row < cut).sum()


def test_radix_wants_a_power_of_two_of_threads():
    with pytest.raises(ValueError, match="power of two"):
        radix.per_thread(384)
