"""What a request keeps outside its pages, taken out of the state and put back: with shared pages it restores a prefix.

At position h that is: the last `window` rows of every layer's ring and of every draft stage's, the pending row h-1 of the
ratio-2 compressors, the n-gram history, and the first position of the draft window. Nothing else of earlier positions is
read by later ones (spec/serving.md; `cache.State`), so a restored prefix is exact.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dsv41_jax.cache import State
from sharding.mesh import mesh_ranks
from sharding.rules import state_spec

_RINGS = ("window", "draft_window")


def _window_rows(length, window: int, ring: int):
    """i32[window] ring rows of positions length-window..length-1; those before the text are never read."""
    return (length - window + jnp.arange(window, dtype=jnp.int32)) % ring


def take(state: State, where, *, window: int):
    """A snapshot of slot where[0, 0] at position where[0, 1]; every leaf [1, ...]. A negative slot gives any contents."""
    slot, length = jnp.maximum(where[0, 0], 0), where[0, 1]

    def rows(pool):
        return pool[slot, _window_rows(length, window, pool.shape[1])][None]

    return {
        **{name: jax.tree.map(rows, getattr(state, name)) for name in _RINGS},
        "pending": {i: p[slot, (length - 1) % p.shape[1]][None] for i, p in state.pending.items()},
        "history": state.history[slot][None],
        "draft_from": state.draft_from[slot][None],
    }


def put(state: State, snapshot, where, *, window: int) -> State:
    """`state` with the snapshot in slot where[0, 0] at position where[0, 1]; a negative slot changes nothing."""
    slot, length = where[0, 0], where[0, 1]
    held = state.length.shape[0]
    at = jnp.where(slot < 0, held, slot)

    def rows(pool, values):
        return pool.at[at, _window_rows(length, window, pool.shape[1])].set(values[0], mode="drop")

    rings = {name: jax.tree.map(rows, getattr(state, name), snapshot[name]) for name in _RINGS}
    pending = {i: p.at[at, (length - 1) % p.shape[1]].set(snapshot["pending"][i][0], mode="drop")
               for i, p in state.pending.items()}  # fmt: skip
    registers = {k: getattr(state, k).at[at].set(snapshot[k][0], mode="drop") for k in ("history", "draft_from")}
    length = state.length.at[at].set(length, mode="drop")
    return dataclasses.replace(state, **rings, pending=pending, length=length, **registers)


@functools.lru_cache(maxsize=16)
def _compiled(mesh, window: int):
    taking, putting = functools.partial(take, window=window), functools.partial(put, window=window)
    if mesh is None:
        return jax.jit(taking), jax.jit(putting, donate_argnums=0)
    spec = state_spec()
    place = NamedSharding(mesh, spec)
    over = functools.partial(jax.shard_map, mesh=mesh, out_specs=spec, check_vma=False)
    taking, putting = over(taking, in_specs=(spec, spec)), over(putting, in_specs=(spec, spec, spec))
    return jax.jit(taking, out_shardings=place), jax.jit(putting, donate_argnums=0, out_shardings=place)


class Snapshots:
    """Takes and puts snapshots of one engine's state, over a mesh's ranks if there is one.

    A snapshot is a pytree of arrays [1, ...] on the device of its rank, or of numpy arrays (`on_host`).
    """

    def __init__(self, window: int, mesh: jax.sharding.Mesh | None = None):
        self._mesh, self._ranks = mesh, 1 if mesh is None else mesh_ranks(mesh)
        self._take, self._put = _compiled(mesh, window)
        self._sharding = None if mesh is None else NamedSharding(mesh, state_spec())
        self._blank: list | None = None  # per rank: what the others pass while one rank puts

    def nbytes(self, state: State) -> int:
        """Bytes of one snapshot."""
        where = jax.ShapeDtypeStruct((self._ranks, 2), jnp.int32, sharding=self._sharding)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(self._take, state, where))) // self._ranks

    def take(self, state: State, rank: int, slot: int, length: int):
        """The snapshot of a slot after `length` positions. Enqueued behind the steps dispatched so far; waits for nothing."""
        out = self._take(state, self._where(rank, slot, length))
        if self._mesh is not None:
            out = jax.tree.map(lambda x: self._shards(x)[rank], out)
        return out

    def put(self, state: State, snapshot, rank: int, slot: int, length: int) -> State:
        """The state (donated) with the snapshot in a slot."""
        return self._put(state, self._placed(snapshot, rank), self._where(rank, slot, length))

    def warm_up(self, state: State) -> State:
        """Compile both, from the device and from host memory; nothing changes."""
        snapshot = self.take(state, 0, -1, 0)
        for x in (snapshot, on_host(snapshot)):
            state = self.put(state, x, 0, -1, 0)
        return state

    def _where(self, rank: int, slot: int, length: int):
        where = np.full((self._ranks, 2), -1, np.int32)
        where[rank] = slot, length
        return jax.device_put(where, self._sharding)

    def _placed(self, snapshot, rank: int):
        if self._mesh is None:
            return jax.device_put(snapshot)
        devices = list(self._mesh.devices.flat)
        if self._blank is None:
            self._blank = [jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), snapshot), d) for d in devices]
        shards = [jax.device_put(snapshot, devices[rank]) if r == rank else self._blank[r] for r in range(self._ranks)]

        def joined(*parts):
            shape = (self._ranks, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._sharding, list(parts))

        return jax.tree.map(joined, *shards)

    def _shards(self, x):
        shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
        return [s.data for s in shards]


def start_copy(snapshot) -> None:
    """Begin the copy to the host; waits for nothing."""
    for x in jax.tree.leaves(snapshot):
        x.copy_to_host_async()


def on_host(snapshot):
    """The snapshot as numpy arrays; waits for the copy."""
    return jax.device_get(snapshot)
