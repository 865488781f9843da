"""The jitted steps mapped over a mesh of R ranks: `dsv41_jax.step.Steps` with every rank at work on its own requests.

Arrays of the state, the batch and the output hold the ranks' arrays end to end ([R*B, ...], rank 0 first). Slots and page
ids are local to a rank. A rank without requests passes padding rows (slot -1): it takes part in every collective, its
state does not change. Random numbers belong to (request seed, position), so a request's tokens do not depend on its rank.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsv41_jax import expert_order, hyper_parts
from dsv41_jax.model import Network
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.sampling import SamplingBatch
from dsv41_jax.step import Steps, _forward_logits, mtp_step, prefill_step
from sharding.exchange import GatherExchange
from sharding.mesh import mesh_ranks
from sharding.rules import batch_spec, global_parameters, parameter_spec, state_spec


@functools.lru_cache(maxsize=64)
def compiled_over(mesh: jax.sharding.Mesh, treedef, paths: tuple[str, ...], *, step, **static):
    """`step` of dsv41_jax.step mapped over the mesh and jitted, over flat parameter leaves named by `paths`. The state is
    donated; host arrays of a batch go straight to their ranks."""

    def bound(leaves, state, batch):
        return step(jax.tree.unflatten(treedef, leaves), state, batch, **static)

    specs = ([parameter_spec(path) for path in paths], state_spec(), batch_spec())
    # values differ from rank to rank by construction, so there is nothing for vma checks to prove
    mapped = jax.shard_map(bound, mesh=mesh, in_specs=specs, out_specs=batch_spec(), check_vma=False)
    place = lambda s: NamedSharding(mesh, s)
    placed = ([place(s) for s in specs[0]], place(specs[1]), place(specs[2]))
    options = dict(static["net"].exchange.compiler_options)
    return jax.jit(mapped, in_shardings=placed, out_shardings=placed[2], donate_argnums=1, compiler_options=options)


class ShardedSteps(Steps):
    """`Steps` of one network over a mesh: the same decode, prefill, forward and reload on arrays of all ranks.

    net: its geometry is one rank's; its exchange is replaced. params: from `sharding.load.load_sharded`, or arrays with
    the shapes and shardings of `rules.global_parameters`. exchange: one of `sharding.exchange` (default GatherExchange).
    Raises ValueError if mesh, exchange and parameters do not belong together, and what Steps raises.
    """

    def __init__(self, net: Network, params: Transformer, mesh: jax.sharding.Mesh, gamma: int | None = None, exchange=None):
        self.mesh = mesh
        ranks = mesh_ranks(mesh)
        exchange = exchange or GatherExchange(ranks)
        if (exchange.ranks, getattr(exchange, "axis", None)) != (ranks, mesh.axis_names[0]):
            raise ValueError(f"exchange: expected one for {ranks} ranks of axis {mesh.axis_names[0]!r}, got {exchange}")
        _check_parameters(params, global_parameters(net.config, mesh, params.engram_place))
        super().__init__(dataclasses.replace(net, exchange=exchange), params, gamma)
        mapped = functools.partial(compiled_over, mesh, self._treedef, tuple(flat_paths(params)), net=self.net)
        self._mtp = mapped(step=mtp_step, gamma=self.gamma)
        self._prefill = mapped(step=prefill_step)
        self._forward = mapped(step=_forward_logits, dump=False)
        self._forward_dump = mapped(step=_forward_logits, dump=True)

    def reload(self, params: Transformer) -> None:
        """Replace the parameters; shapes, dtypes and shardings must match. Raises ValueError."""
        _check_parameters(params, global_parameters(self.net.config, self.mesh, params.engram_place))
        super().reload(params)

    def decode(self, state, batch):
        """`mtp_step` on all ranks; `state` is donated. Raises ValueError for a batch that R does not divide."""
        self._check_rows("batch", batch.slots)
        return super().decode(state, batch)

    def prefill(self, state, batch):
        """`prefill_step` on all ranks; `state` is donated. Raises ValueError for a batch that R does not divide."""
        self._check_rows("batch", batch.chunk.slots)
        return super().prefill(state, batch)

    def forward(self, state, chunk, dump: bool = False):
        """Teacher-forced chunk on all ranks; `state` is donated. Raises ValueError for a chunk that R does not divide."""
        self._check_rows("chunk", chunk.slots)
        return super().forward(state, chunk, dump)

    def _check_rows(self, what: str, slots):
        if slots.shape[0] % self.mesh.size:
            raise ValueError(f"{what}: expected the rows of {self.mesh.size} ranks end to end, got {slots.shape[0]} requests")


def _check_parameters(params: Transformer, expected: Transformer) -> None:
    got, want = flat_paths(params), flat_paths(expected)
    if list(got) != list(want):
        odd = sorted(set(got) ^ set(want))
        raise ValueError(f"params: expected the parameters of this network, these differ: {odd[:5]}")
    for path, w in hyper_parts.as_held(expert_order.as_held(want, got), got).items():
        g = got[path]
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            raise ValueError(f"params: {path} expected {w.dtype}{list(w.shape)} over all ranks, got {g.dtype}{list(g.shape)}")
        sharding = getattr(g, "sharding", None)
        if sharding is None or not sharding.is_equivalent_to(w.sharding, len(w.shape)):
            raise ValueError(f"params: {path} expected {w.sharding.spec} over {w.sharding.mesh.shape}, got {sharding}")


def stack_ranks(batches: Sequence):
    """One batch (DecodeBatch, PrefillBatch, Chunk, SamplingBatch, ...) of host arrays from one per rank, rank 0 first.

    Raises ValueError if their shapes differ: every rank pads to the same rows."""
    flat = [jax.tree.flatten(b) for b in _share_draws(batches)]
    if any(treedef != flat[0][1] for _, treedef in flat):
        raise ValueError("stack_ranks: expected batches of one structure")
    out = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        shapes = {np.shape(x) for x in leaves}
        if len(shapes) > 1:
            raise ValueError(f"stack_ranks: expected arrays of one shape on all ranks, got {sorted(shapes)}")
        out.append(np.concatenate([np.asarray(x) for x in leaves]))
    return jax.tree.unflatten(flat[0][1], out)


def _share_draws(batches: Sequence) -> list:
    """The batches with `draws` set in all if it is set in any: the ranks run one executable."""
    is_sampling = lambda x: isinstance(x, SamplingBatch)
    draws = any(is_sampling(x) and x.draws for b in batches for x in jax.tree.leaves(b, is_leaf=is_sampling))
    share = lambda x: dataclasses.replace(x, draws=draws) if is_sampling(x) else x
    return [jax.tree.map(share, b, is_leaf=is_sampling) for b in batches]


def of_rank(tree, rank: int, ranks: int):
    """The host arrays of one rank out of a stacked tree (state, batch or output)."""

    def cut(x):
        n = x.shape[0] // ranks
        return np.asarray(x)[rank * n : (rank + 1) * n]

    return jax.tree.map(cut, tree)
