"""Expert exchanges: how the rows of one rank reach the experts of all ranks, and an engram table split over them.

Each is used inside shard_map over one mesh axis and has the members of `dsv41_jax.moe.LocalExchange`: `ranks`, `rank()`,
`run_experts`, `lookup`. Rank r owns experts [r*E/R, (r+1)*E/R). Both exchanges give the same bits.

What is exact. Rows travel as FP8 with their scales in `released` (experts quantise to the same values again: quantising
a quantised group is the identity on values, though its scale may be half as large) and as they are in the float32
precisions. A rank's contribution to a row is an fp32 sum over its experts in ascending id; the home rank adds the ranks'
contributions in ascending rank. So, where the experts give a row the same bits in any batch, the result depends neither on
the exchange, nor on the rest of the batch, nor on which rank the request lives on. (XLA's own dense products promise that
on a GPU only for the same number of rows: `bench.ranks_check` compares a step over R ranks with each rank's requests alone
on one device.) The definition of this order on one device is `BlockedExchange(R)`. `moe.LocalExchange` adds all experts one
by one instead: the same terms in the same order, associated differently, so a row with two or more experts on a later rank
may differ from it by fp32 rounding (before the result is rounded to the activation dtype).
`GatherExchange(combine="reduce_scatter")` leaves the order to the collective.

What hides a transfer. XLA's scheduler does not know what the kernels cost, so barriers tell it the order: rows travel
beside the first half of the work handed in as `beside` (the shared expert's first product), contributions beside its
second half; with `parts` > 1 only those of the last part do, each earlier part's beside the next part's product. The order
of sums does not depend on it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax.engram import lookup, split_records
from dsv41_jax.moe import NOTHING_BESIDE
from dsv41_jax.params import Experts
from pallas_kernels import codecs
from sharding.mesh import RANKS

COMBINES = ("ordered", "reduce_scatter")


# rows on the wire ------------------------------------------------------------------------------------------------------


def row_bytes(hidden: int, k: int, dtype) -> int:
    """Bytes of one packed row: the activation (FP8 and scales for bf16, else as it is), ids and weights."""
    x = hidden + hidden // codecs.GROUP if jnp.dtype(dtype) == jnp.bfloat16 else hidden * jnp.dtype(dtype).itemsize
    return x + 8 * k


def _bytes(x):
    """dtype[T, n] -> u8[T, n * itemsize]"""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)


def _from_bytes(raw, dtype):
    """u8[T, n * itemsize] -> dtype[T, n]"""
    size = jnp.dtype(dtype).itemsize
    shape = (raw.shape[0], -1) if size == 1 else (raw.shape[0], raw.shape[1] // size, size)
    return jax.lax.bitcast_convert_type(raw.reshape(shape), dtype)


def pack_rows(
    x,  # bf16[T, H] or f32[T, H]
    ids,  # i32[T, K]
    weights,  # f32[T, K]
):
    """u8[T, row_bytes]: everything a rank needs to run its experts on a row, as one array: a collective of a decode
    step costs its latency, so one is better than four."""
    parts = codecs.quantize_fp8(x) if x.dtype == jnp.bfloat16 else (x,)
    return jnp.concatenate([_bytes(a) for a in (*parts, ids, weights)], 1)


def unpack_rows(
    rows,  # u8[T, row_bytes]
    hidden: int,
    k: int,
    dtype,
):
    """(x dtype[T, H], ids i32[T, K], weights f32[T, K]); x has been through FP8 where dtype is bf16."""
    width = rows.shape[1] - 8 * k
    if jnp.dtype(dtype) == jnp.bfloat16:
        payload = _from_bytes(rows[:, :hidden], jnp.float8_e4m3fn)
        x = codecs.dequantize_fp8(payload, rows[:, hidden:width]).astype(dtype)
    else:
        x = _from_bytes(rows[:, :width], dtype)
    ids, weights = rows[:, width : width + 4 * k], rows[:, width + 4 * k :]
    return x, _from_bytes(ids, jnp.int32), _from_bytes(weights, jnp.float32)


def _ordered_sum(
    parts,  # f32[R, T, H], or R of f32[T, H]
):
    """f32[T, H]: ((parts[0] + parts[1]) + parts[2]) + ..., whatever a backend's reduction would do."""
    total = parts[0]
    for r in range(1, len(parts)):
        total = total + parts[r]
    return total


def _in_turn(send, parts):
    """[send(part), ...], each part on its way once the one before has arrived. Without that XLA's scheduler may take a
    later part to be the earlier transfer, or put two transfers into one, and leave all of them for the end."""
    arrived = [send(parts[0])]
    for part in parts[1:]:
        arrived[-1], part = jax.lax.optimization_barrier((arrived[-1], part))
        arrived.append(send(part))
    return arrived


def _contributions(exchange, rows, unpack, params, run, beside):
    """(`run`'s parts of `unpack(rows)`, what `beside` gives), ordered for overlap: the rows are not read before the first
    half of `beside` is done, its second half does not begin before the last part is computed.

    Left to itself XLA's scheduler guesses what the kernels cost, and puts neither half beside the transfer."""
    first, second = beside
    rows, halfway = jax.lax.optimization_barrier((rows, first()))
    *parts, last = run(*unpack(rows), params, exchange.first_expert(params), exchange.parts, exchange.spare_sms)
    last, halfway = jax.lax.optimization_barrier((last, halfway))
    return (*parts, last), second(halfway)


# exchanges -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """What the exchanges share.

    ranks: size of the mesh axis. axis: its name. parts: into how many parts the columns of the contributions are cut; a
    part goes home while the experts' second product of the next part is computed. spare_sms: multiprocessors that the
    product leaves to that transfer (`experts_parts`). Raises ValueError for ranks < 1, parts < 1 or spare_sms < 0.
    """

    ranks: int
    axis: str = RANKS
    parts: int = 1
    spare_sms: int = 8

    compiler_options = ()  # ((XLA option, value), ...) that a program with this exchange is compiled with

    def __post_init__(self):
        if self.ranks < 1:
            raise ValueError(f"exchange: expected ranks >= 1, got {self.ranks}")
        if self.parts < 1 or self.spare_sms < 0:
            raise ValueError(f"exchange: expected parts >= 1 and spare_sms >= 0, got {self.parts} and {self.spare_sms}")

    def rank(self):
        """i32[]: this rank."""
        return jax.lax.axis_index(self.axis)

    def first_expert(self, params: Experts):
        """i32[]: global id of this rank's first expert."""
        return self.rank() * params.w13[...].shape[0]

    def _to_all(self, rows):
        """dtype[R*T, n]: the rows of all ranks, rank 0 first."""
        return jax.lax.all_gather(rows, self.axis, tiled=True)

    def _home(self, blocks):
        """R of dtype[T, n]: blocks[b] has gone to the rank whose rows are block b of `_to_all`; that of rank r comes at
        `_place(r)`."""
        return jax.lax.all_to_all(blocks, self.axis, 0, 0)

    def _place(self, rank):
        return rank

    def lookup(self, table, scale, rows, dtype):
        """dtype[T, n*D]: dequantised rows of an engram table split by rows, bit for bit what one device reads.

        table f8[rows/R, D] and scale u8[rows/R, D/32] are this rank's; rows i32[T, n] are global, outside the table:
        zeros. Ids go to all ranks, every rank reads what it owns as raw bytes, and the bytes go back to the home rank, which
        takes the owner's.
        """
        t, n = rows.shape
        owned = table.shape[0]
        asked = self._to_all(rows)  # i32[R*T, n]
        local = asked - self.rank() * owned
        at = jnp.where((local >= 0) & (local < owned), local, 0)
        records = jnp.concatenate([jax.lax.bitcast_convert_type(table[at], jnp.uint8), scale[at]], -1)
        answers = jnp.stack(self._home(records.reshape(self.ranks, t, -1))).reshape(self.ranks, t, n, -1)
        known = (rows >= 0) & (rows < owned * self.ranks)
        place = self._place(jnp.where(known, rows // owned, 0))
        record = jnp.take_along_axis(answers, place[None, :, :, None], 0)[0].reshape(t * n, -1)
        row = jnp.where(known, jnp.arange(t * n, dtype=jnp.int32).reshape(t, n), -1)
        return lookup(*split_records(record), row, dtype)


@dataclasses.dataclass(frozen=True)
class GatherExchange(_Sharded):
    """All rows to all ranks, local experts on all of them, contributions back to the home rank, a part after the other.

    With top-6 over four ranks a row needs 3.29 of 4 ranks on average, so this moves little more than an ideal dispatch,
    with static shapes and nothing ever dropped.
    combine: "ordered" sends every contribution home and adds them there in rank order; "reduce_scatter" lets the
    collective add, in its own order. Both move (R-1) * T * H fp32 values per rank.
    Raises ValueError for another combine.
    """

    combine: str = "ordered"

    def __post_init__(self):
        super().__post_init__()
        if self.combine not in COMBINES:
            raise ValueError(f"exchange: combine expected one of {COMBINES}, got {self.combine!r}")

    def run_experts(self, x, ids, weights, params: Experts, run, beside=NOTHING_BESIDE):
        """(f32[T, H], ...): the routed sum of this rank's rows over the experts of all ranks; what is beside it
        (`LocalExchange.run_experts`)."""
        rows = self._to_all(pack_rows(x, ids, weights))
        unpack = lambda rows: unpack_rows(rows, x.shape[1], ids.shape[1], x.dtype)
        parts, done = _contributions(self, rows, unpack, params, run, beside)
        if self.combine == "reduce_scatter":
            home = _in_turn(lambda part: jax.lax.psum_scatter(part, self.axis, tiled=True), parts)
        else:
            home = _in_turn(lambda part: self._home(part.reshape(self.ranks, x.shape[0], -1)), parts)
            home = [_ordered_sum(part) for part in home]
        return jnp.concatenate(home, 1), done


@dataclasses.dataclass(frozen=True)
class RingExchange(_Sharded):
    """What GatherExchange moves, as collective-permutes: for each distance d, every rank sends to the rank d before it.

    On a GPU XLA can leave a permute within a host to the copy engines (`compiler_options`): nothing of a transfer then runs
    on the multiprocessors that the experts need. NCCL's all-to-all of the same bytes is a kernel that copies twice.
    """

    @property
    def compiler_options(self):
        # one limit for all: with XLA's own of 1 a permute would wait for the one before, with nothing beside it
        return (("xla_gpu_collective_permute_mode", "COLLECTIVES_PEER_MEMORY"),
                ("xla_gpu_experimental_parallel_collective_overlap_limit", max(1, self.ranks - 1)))  # fmt: skip

    def shift(self, x, distance: int):
        """`x` of the rank `distance` behind this one."""
        pairs = [(r, (r - distance) % self.ranks) for r in range(self.ranks)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def _to_all(self, rows):
        return jnp.concatenate(self._ring(rows))

    def _ring(self, rows):
        """R of dtype[T, n]: the rows of ranks r, r + 1, ..., modulo R."""
        return [rows, *(self.shift(rows, d) for d in range(1, self.ranks))]

    def _home(self, blocks):
        return [blocks[0], *(self.shift(blocks[d], -d) for d in range(1, self.ranks))]  # of ranks r, r - 1, ...

    def _place(self, rank):
        return (self.rank() - rank) % self.ranks

    def run_experts(self, x, ids, weights, params: Experts, run, beside=NOTHING_BESIDE):
        """(f32[T, H], ...): the routed sum of this rank's rows over the experts of all ranks; what is beside it
        (`LocalExchange.run_experts`)."""
        rows = self._ring(pack_rows(x, ids, weights))
        unpack = lambda rows: unpack_rows(jnp.concatenate(rows), x.shape[1], ids.shape[1], x.dtype)
        parts, done = _contributions(self, rows, unpack, params, run, beside)
        home = _in_turn(lambda part: self._home(jnp.split(part, self.ranks)), parts)
        return jnp.concatenate([self._by_rank(part) for part in home], 1), done

    def _by_rank(self, parts):
        """f32[T, H]: what came home, added by ascending rank. Elementwise, so that each is read once."""
        if self.ranks == 2:  # either order gives the same bits
            return parts[0] + parts[1]
        return _ordered_sum([jax.lax.select_n(self._place(rank), *parts) for rank in range(self.ranks)])


@dataclasses.dataclass(frozen=True)
class AllToAllExchange(_Sharded):
    """Rows go only to the ranks that own one of their experts, packed to the front of a buffer of worst-case size.

    A row is sent to a rank once, however many of its experts live there, so T rows per destination always suffice and
    nothing is dropped, whatever the routing. ragged: move only the rows that are there (`ragged_all_to_all`, GPU only);
    otherwise the whole buffers move.
    """

    ragged: bool = False

    def run_experts(self, x, ids, weights, params: Experts, run, beside=NOTHING_BESIDE):
        """(f32[T, H], ...): the routed sum of this rank's rows over the experts of all ranks; what is beside it
        (`LocalExchange.run_experts`)."""
        t, h = x.shape
        k = ids.shape[1]
        owner = ids // params.w13[...].shape[0]
        needs = jnp.any(owner[None] == jnp.arange(self.ranks)[:, None, None], -1)  # bool[R, T]
        place = jnp.cumsum(needs, 1, dtype=jnp.int32) - 1  # i32[R, T]: where row t sits in the buffer for rank d
        counts = place[:, -1] + 1  # i32[R]
        at = jnp.where(needs, place, t)
        source = jnp.full((self.ranks, t), t, jnp.int32)  # row t = the blank one
        source = source.at[jnp.arange(self.ranks)[:, None], at].set(jnp.arange(t, dtype=jnp.int32), mode="drop")
        blank = pack_rows(jnp.zeros((1, h), x.dtype), jnp.full((1, k), -1, jnp.int32), jnp.zeros((1, k), jnp.float32))
        packed = jnp.concatenate([pack_rows(x, ids, weights), blank])
        received = jax.lax.all_to_all(counts, self.axis, 0, 0, tiled=True) if self.ragged else None
        arrived = self._move(packed[source], counts, received, blank[0])
        unpack = lambda rows: unpack_rows(rows.reshape(self.ranks * t, -1), h, k, x.dtype)
        parts, done = _contributions(self, arrived, unpack, params, run, beside)

        def send(part):
            part = part.reshape(self.ranks, t, -1)
            return self._move(part, received, counts, jnp.zeros(part.shape[2:], part.dtype))

        def arranged(part):
            mine = jnp.take_along_axis(part, jnp.maximum(place, 0)[..., None], 1)
            return _ordered_sum(jnp.where(needs[..., None], mine, 0))

        return jnp.concatenate([arranged(part) for part in _in_turn(send, parts)], 1), done

    def _move(self, buffers, send, receive, fill):
        """dtype[R, T, n]: buffers[d] to rank d; result[s] = what rank s sent here. Only the first send[d] rows count.

        fill dtype[n]: what the rows beyond them hold where they are not moved."""
        if not self.ragged:
            return jax.lax.all_to_all(buffers, self.axis, 0, 0)
        ranks, t, n = buffers.shape
        own = jnp.arange(ranks, dtype=jnp.int32) * t
        out = jax.lax.ragged_all_to_all(
            buffers.reshape(ranks * t, n), jnp.broadcast_to(fill, (ranks * t, n)), own, send,
            jnp.full((ranks,), self.rank() * t, jnp.int32), receive, axis_name=self.axis,
        )  # fmt: skip
        return out.reshape(ranks, t, n)


@dataclasses.dataclass(frozen=True)
class BlockedExchange:
    """One device that adds in the order of `blocks` ranks: what the sharded exchanges are equal to, bit for bit.

    blocks: ranks to imitate; must divide the experts. Raises ValueError when it does not.
    """

    blocks: int
    ranks = 1

    def run_experts(self, x, ids, weights, params: Experts, run, beside=NOTHING_BESIDE):
        """(f32[T, H], ...): contributions of consecutive blocks of experts, added in block order; what is beside it."""
        experts = params.w13[...].shape[0]
        if self.blocks < 1 or experts % self.blocks:
            raise ValueError(f"exchange: blocks expected a divisor of {experts} experts, got {self.blocks}")
        n = experts // self.blocks
        block = lambda i: jax.tree.map(lambda a: a[i * n : (i + 1) * n], params)
        first, second = beside
        routed = _ordered_sum(jnp.stack([run(x, ids, weights, block(i), i * n)[0] for i in range(self.blocks)]))
        return routed, second(first())

    def lookup(self, table, scale, rows, dtype):
        return lookup(table, scale, rows, dtype)

    def rank(self):
        return jnp.int32(0)
