"""The decode benchmark over the ranks of a host: DP attention, EP experts, through `sharding.ShardedSteps`.

    python -m bench.decode --preset flash --ranks 4
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m bench.decode --preset tiny --ranks 4

Every rank has a batch of its own; one process dispatches for all. A step counts as done when the tokens of all ranks are
on the host, so the slowest rank sets the time, as in the reference's protocol. The floor is that of one rank: its experts,
over which as many rows are routed as reach them from all ranks. What the exchange moves is not in it.
"""

import dataclasses

import jax
from jax.sharding import NamedSharding

from bench import decode, presets, synthetic
from bench.compile_report import make_exchange
from bench.floors import step_floor
from dsv41_jax.cache import CacheGeometry
from sharding.mesh import check_ranks, make_mesh
from sharding.rules import state_spec
from sharding.step import ShardedSteps, stack_ranks


def exchange_here(name: str, ranks: int, hidden: int, parts: int = 1, spare_sms: int | None = None):
    """`make_exchange`, to be run on this machine. Raises ValueError as that, and for one that only GPUs have."""
    exchange = make_exchange(name, ranks, parts, spare_sms, hidden)
    if getattr(exchange, "ragged", False) and jax.default_backend() != "gpu":
        raise ValueError(f"exchange: {name} expected GPUs, the default backend is {jax.default_backend()}")
    return exchange


def exchange_over(args, config):
    """The exchange of the command line, over `args.ranks` devices. Raises ValueError for more ranks than devices, ranks that do
    not divide the experts, and as `exchange_here`."""
    make_mesh(args.ranks)
    check_ranks(config, args.ranks)
    parts = 1 if args.exchange_parts is None else args.exchange_parts
    return exchange_here(args.exchange or "gather", args.ranks, config.hidden_size, parts, args.exchange_spare_sms)


class RanksBench(decode.Bench):
    """One workload over `args.ranks` devices; the workload's batch and page tables are those of one rank.

    Raises ValueError as `exchange_over`."""

    def __init__(self, args, watch: decode.CompileWatch, params=None):
        self.ranks, self.mesh = args.ranks, make_mesh(args.ranks)
        self.placement = NamedSharding(self.mesh, state_spec())  # every array of batch and state is split by its first axis
        self.exchange = exchange_over(args, decode.checked_workload(args).config)
        name, parts = args.exchange or "gather", self.exchange.parts
        super().__init__(args, watch, params)
        cut = f" in {parts} parts, {self.exchange.spare_sms} multiprocessors spared" if parts > 1 else ""
        note = f"{args.ranks} ranks, {self.workload.batch} requests each, exchange {name}{cut}; " \
               "floor of one rank, without what the exchange moves"  # fmt: skip
        self.workload = dataclasses.replace(self.workload, notes=(*self.workload.notes, note))

    def make_state(self):
        g, w = self.geometry, self.workload
        whole = CacheGeometry(g.slots * self.ranks, g.pages * self.ranks, g.page_tokens, g.span)
        return synthetic.random_state(w.config, whole, w.context, self.args.seed, self.placement)

    def make_steps(self):
        return ShardedSteps(self.net, self.params, self.mesh, self.args.gamma, self.exchange)

    def host_batch(self, rank: int = 0):
        """All ranks' batches end to end."""
        return stack_ranks([super(RanksBench, self).host_batch(r) for r in range(self.ranks)])

    def floor(self, peaks) -> dict:
        w = self.workload
        return step_floor(dataclasses.replace(w, config=presets.rank_of(w.config, self.ranks)), self.args.gamma, peaks)
