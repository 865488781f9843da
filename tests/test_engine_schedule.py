"""The engine's schedules on a scripted network: no model, thousands of steps.

The script is a device that keeps token ids in its pages and rings, the next token is a hash of all before it. Whenever it
reads, it checks that the pages of a request hold the request's own text: a page that two requests write, a prefix that is
not the one it is taken for, a slot that is used too early or a position without a page cannot stay unseen.
"""

import types
import zlib

import engine_harness as harness
import jax
import numpy as np
import pytest

from dsv41_jax.generate import stop_ids

GAMMA = harness.CONFIG.dspark_block_size
PAGE = harness.PAGE


def following(tokens: list[int]) -> int:
    """The token after a text."""
    return 3 + zlib.crc32(np.array(tokens, np.int32).tobytes()) % 497


def drafts_accepted(tokens: list[int]) -> int:
    return zlib.crc32(np.array(tokens[::-1], np.int32).tobytes()) % (GAMMA + 1)


class ScriptedDevice:
    """`Steps` and `Snapshots` on numpy. seen: per slot all tokens that have run, which stands for rings and registers."""

    def __init__(self, pages: int, slots: int):
        self.pages = np.full((pages, PAGE), -1)
        self.seen: list = [None] * slots
        self.anchor = [None] * slots

    # Steps

    def prefill(self, state, batch):
        b = jax.device_get(batch)
        tokens, count = np.zeros((len(b.last), 1), np.int32), np.zeros(len(b.last), np.int32)
        table = next(iter(b.chunk.tables.index.values()))
        for row, slot in enumerate(b.chunk.slots):
            if slot < 0:
                continue
            if b.chunk.start[row] == 0:
                self.seen[slot] = []
            assert len(self.seen[slot]) == b.chunk.start[row]
            self._run(table[row], slot, b.chunk.tokens[row, : b.chunk.count[row]].tolist())
            if b.last[row]:
                known = int(b.next_token[row])
                self.anchor[slot] = tokens[row] = known if known >= 0 else following(self.seen[slot])
                count[row] = 1
        return state, self._out(tokens, count)

    def decode(self, state, batch):
        b = jax.device_get(batch)
        tokens, count = np.zeros((len(b.slots), GAMMA + 1), np.int32), np.zeros(len(b.slots), np.int32)
        assert len({s for s in b.slots if s >= 0}) == sum(b.slots >= 0)
        table = next(iter(b.tables.index.values()))
        for row, slot in enumerate(b.slots):
            if slot < 0:
                continue
            new = [self.anchor[slot]]
            accepted = GAMMA if b.sampling.forced[row] else drafts_accepted(self.seen[slot] + new)
            for _ in range(accepted + 1):
                new.append(following(self.seen[slot] + new))
            length = len(self.seen[slot])
            for position in range(length, length + GAMMA + 1):  # all rows are written, rejected ones too
                self._write(table[row], position, -7)
            self._run(table[row], slot, new[:-1])
            self.anchor[slot] = new[-1]
            tokens[row, : accepted + 1], count[row] = new[1:], accepted + 1
        return state, self._out(tokens, count)

    def _run(self, table, slot: int, tokens: list[int]) -> None:
        for token in tokens:
            self._write(table, len(self.seen[slot]), token)
            self.seen[slot] = [*self.seen[slot], token]
        end = min(len(self.seen[slot]), harness.CONTEXT)
        at = np.arange(end)
        assert self.pages[table[at // PAGE], at % PAGE].tolist() == self.seen[slot][:end], slot

    def _write(self, table, position: int, token: int) -> None:
        if position < harness.CONTEXT:  # beyond it nothing is kept
            assert table[position // PAGE] > 0, position
            self.pages[table[position // PAGE], position % PAGE] = token

    @staticmethod
    def _out(tokens, count):
        return types.SimpleNamespace(**jax.device_put({"tokens": tokens, "count": count, "finite": np.ones(len(count), bool)}))

    # Snapshots

    def take(self, state, rank, slot, length):
        assert len(self.seen[slot]) == length
        return list(self.seen[slot])

    def put(self, state, snapshot, rank, slot, length):
        assert len(snapshot) == length
        self.seen[slot] = list(snapshot)
        return state


def expected(case) -> tuple[list[int], str]:
    prompt, sampling, most = case
    ends = stop_ids(sampling, harness.CONFIG)
    out = []
    while True:
        out.append(following(prompt + out))
        if out[-1] in ends:
            return out, "stop"
        if len(out) == most:
            return out, "length"
        if len(prompt) + len(out) == harness.CONTEXT:
            return out, "context"


SHAPES = [
    {"pages": 22},
    {"pages": 28, "max_requests": 7, "chunk": 13, "prefix_bytes": 40_000, "batch_buckets": (7,), "prefill_buckets": (1, 3),
     "context_buckets": (40, 96), "token_budget": 30},
    {"pages": 20, "max_requests": 3, "chunk": 40, "prefix_bytes": 0, "batch_buckets": (1, 2, 3), "prefill_buckets": (1,),
     "token_budget": 1},
    {"pages": 27, "max_requests": 8, "chunk": 5, "prefix_on_host": False, "batch_buckets": (1, 8), "prefill_buckets": (4,),
     "context_buckets": (24, 48, 96), "reuse_batches": False},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_random_schedules_on_a_scripted_network(seed):
    """Three hundred requests each through pools, buckets, budgets, chunks and prefix budgets of several sizes."""
    served = harness.engine(**SHAPES[seed])
    device = ScriptedDevice(served.limits.pages, served.limits.max_requests)
    served._loop.steps = served._loop._snapshots = device
    cases = harness.random_requests(300, seed)
    requests = harness.drive(served, cases, np.random.default_rng(seed))
    harness.check_outcomes(requests, [expected(c) for c in cases])
    m = served.metrics
    assert {r.finish_reason for r in requests} == {"cancelled", "stop", "length", "context"}
    assert m.preemptions >= 3 and m.finished["cancelled"] >= 5
    assert (m.prefix_hits >= 10) == (served.limits.prefix_bytes > 0) and (m.batches_reused > 0) == (seed != 3)
    harness.check_all_free(served)
