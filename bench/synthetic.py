"""Random parameters and a random decode state, made on the device in their stored formats.

Every byte is a hash of its position and a seed, computed in one elementwise pass: nothing larger than the array itself is
ever held, so a rank of 85 GB is made where it will stay. Matrices have deviation 1/sqrt(inputs), so that activations of
any depth stay near unit size and every sum is finite.
"""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import hyper_parts
from dsv41_jax.cache import CacheGeometry, State, init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.precision import RELEASED
from pallas_kernels import codecs
from pallas_kernels.experts.layout import shuffled_shapes
from sharding.rules import global_parameters

_UNIFORM = 12.0**0.5  # a uniform value of width 1 has deviation 1/sqrt(12)


def _hash(shape, seed):
    """u32[shape]: a well-mixed word per element (the finaliser of MurmurHash3 on position and seed)."""
    h = jnp.uint32(seed)
    for axis, stride in enumerate(_strides(shape)):
        h = h + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
    h = h * jnp.uint32(0x9E3779B1)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _strides(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def uniform(shape, seed, mean: float = 0.0, deviation: float = 1.0):
    """f32[shape] uniform around `mean`."""
    unit = (_hash(shape, seed) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) - 0.5
    return mean + deviation * jnp.float32(_UNIFORM) * unit


def fp8_bytes(shape, seed):
    """u8[shape]: random e4m3 codes, none a NaN."""
    b = _hash(shape, seed).astype(jnp.uint8)
    return jnp.where((b & 0x7F) == 0x7F, 0, b)


def byte_range(shape, seed, low: int, high: int):
    """u8[shape] uniform in low..high-1."""
    return (low + _hash(shape, seed) % jnp.uint32(high - low)).astype(jnp.uint8)


def _rms_e4m3() -> float:
    codes = np.arange(256, dtype=np.uint8)
    values = codes[(codes & 0x7F) != 0x7F].view(jnp.float8_e4m3fn.dtype).astype(np.float64)
    return float(np.sqrt(np.mean(values**2)))


_RMS = {"f8": _rms_e4m3(), "f4": 8.5625**0.5}  # of the finite codes of each format, equally likely


def _scale_byte(inputs: int, payload: str) -> int:
    """e8m0 byte that gives a matrix of random codes the deviation 1/sqrt(inputs), to the nearest power of two."""
    return 127 + round(math.log2(inputs**-0.5 / _RMS[payload]))


# leaf name -> (mean, deviation) where it is not a matrix of deviation 1/sqrt(inputs)
_MOMENTS = {
    "embed": (0.0, 1.0),
    "sink": (0.0, 0.7),
    "bias": (0.0, 0.02),
    "q_weight": (1.0, 0.3),
    "k_weight": (1.0, 0.3),
    "base": (0.0, 0.7),
    "scale_f32": (0.9, 0.25),
}
_EXPERT_INPUTS = {"w13": 2, "w2": 2, "s13": 32, "s2": 32}  # inputs per stored byte of the last axis


@functools.lru_cache
def _maker(sharding):
    """`_values`, jitted: every device makes its own part of a sharded array."""
    placed = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(_values, static_argnames=("shape", "dtype", "kind", "arguments"), **placed)


def _values(seed, *, shape, dtype, kind, arguments):
    if kind == "uniform":
        return uniform(shape, seed, *arguments).astype(dtype)
    if kind == "below":
        return (_hash(shape, seed) % jnp.uint32(arguments[0])).astype(dtype)
    if kind == "words":
        return jax.lax.bitcast_convert_type(_hash(shape, seed), jnp.int32)
    if kind == "row scales":
        return _shuffled_scales(shape, seed, *arguments)
    if kind == "fp8":
        return jax.lax.bitcast_convert_type(fp8_bytes(shape, seed), jnp.float8_e4m3fn)
    return byte_range(shape, seed, *arguments)


def _shuffled_scales(shape, seed, low: int):
    """i32[E, blocks, n + 2, 128] scales in the order of experts.shuffle_weights: exponents low + 1 .. low + 3 of n words of
    four, then the rows' factors."""
    words = _hash((*shape[:2], shape[2] - 2, shape[3]), seed)
    levels = sum(((words >> (8 * i)) % 3 + 2) << (8 * i) for i in range(4))
    factor = codecs.e8m0_to_f32(jnp.full((*shape[:2], 2, shape[3]), low, jnp.uint8)) * 32.0
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.concatenate([bits(levels), bits(factor)], 2)


def _recipe(path: str, leaf, inputs: int, c: ModelConfig):
    """(kind, arguments) of one parameter; `inputs`: inputs of the matrix a scale belongs to."""
    name = path.split(".")[-1]
    if path == "token_map":
        return "below", (c.engram_compressed_vocab_size,)
    if leaf.dtype == jnp.float8_e4m3fn:
        return "fp8", ()
    if leaf.dtype == jnp.uint8:
        if name in ("w13", "w2"):
            return "bytes", (0, 256)
        if name == "table_scale":
            return "bytes", (117, 121)  # embedding values of order 1
        top = _scale_byte(inputs, "f4" if name in _EXPERT_INPUTS else "f8")
        return "bytes", (top - 1, top + 2)
    if name.endswith("norm"):
        return "uniform", (1.0, 0.15)
    if name == "scale":  # of a hyper-connection site: the only f32 scales
        return "uniform", _MOMENTS["scale_f32"]
    return "uniform", _MOMENTS.get(name, (0.0, leaf.shape[-1] ** -0.5))


def _matrix_inputs(path: str, leaves: dict) -> int:
    """Inputs of the matrix that a parameter is, or whose scales it is."""
    stem, _, name = path.rpartition(".")
    if name in _EXPERT_INPUTS:
        return leaves[path].shape[-1] * _EXPERT_INPUTS[name]
    weight = leaves.get(f"{stem}.weight") if name == "scale" else None
    return (weight if weight is not None else leaves[path]).shape[-1]


def random_parameters(
    c: ModelConfig, seed: int = 0, shuffled: bool = False, mesh: jax.sharding.Mesh | None = None
) -> Transformer:
    """A Transformer of one rank (its config's experts are all local) with every leaf filled on the default device, or one
    over all ranks of a mesh.

    shuffled: routed experts in the order of experts.shuffle_weights, which the Hopper kernel takes. Sites' weights are in
    parts where a loaded checkpoint's are (`hyper_parts`)."""
    module = Transformer(c) if mesh is None else global_parameters(c, mesh)
    leaves = flat_paths(module)
    made = []
    for path, leaf in leaves.items():
        leaf_seed = jnp.uint32(zlib.crc32(f"{seed}.{path}".encode()))
        name = path.rpartition(".")[2]
        if shuffled and ".experts." in path:
            shape = shuffled_shapes(leaf.shape[0], c.hidden_size, c.moe_intermediate_size)[name]
            low = _scale_byte(c.hidden_size if name.endswith("13") else c.moe_intermediate_size, "f4") - 2
            kind, arguments = ("words", ()) if name in ("w13", "w2") else ("row scales", (low,))
            dtype = jnp.dtype(jnp.int32)
        else:
            shape, dtype = leaf.shape, leaf.dtype
            kind, arguments = _recipe(path, leaf, _matrix_inputs(path, leaves), c)
        make = _maker(None if mesh is None else leaf.sharding)
        made.append(make(leaf_seed, shape=shape, dtype=dtype, kind=kind, arguments=arguments))
    arrays = dict(zip(leaves, made, strict=True))
    if hyper_parts.wanted(None if mesh is None else mesh.devices.flat[0]):
        hyper_parts.to_parts(arrays)
    return jax.tree.unflatten(jax.tree.structure(module), list(arrays.values()))


def random_state(c: ModelConfig, g: CacheGeometry, context: int, seed: int = 0, sharding=None) -> State:
    """A state in precision `released` as it would be after `context` tokens per slot: all records valid, values of order 1.

    Nothing was prefilled: keys of neighbouring positions are unrelated. sharding: of every array; `g` is that of all ranks.
    """
    shapes = jax.eval_shape(lambda: init_state(c, g, RELEASED))

    def fill(seed):
        salt = iter(range(1 << 20))
        next_seed = lambda: seed + jnp.uint32(next(salt)) * jnp.uint32(0x85157AF5)
        d, j = c.head_dim, c.index_head_dim

        def window(leaf):
            lead = leaf.shape[:-1]
            return jnp.concatenate([fp8_bytes((*lead, d), next_seed()),
                                    byte_range((*lead, d // codecs.GROUP), next_seed(), 119, 122)], -1)  # fmt: skip

        def entries(leaf):
            lead = leaf.shape[:-1]  # e4m3 scales 2^-3 .. 0.47
            return jnp.concatenate([byte_range((*lead, d // 2), next_seed(), 0, 256),
                                    byte_range((*lead, d // codecs.NV_GROUP), next_seed(), 0x20, 0x30)], -1)  # fmt: skip

        def keys(leaf):
            per_page = leaf.shape[1] // codecs.index_record_bytes(j)
            return jnp.concatenate([byte_range((leaf.shape[0], per_page * j // 2), next_seed(), 0, 256),
                                    byte_range((leaf.shape[0], per_page * j // codecs.GROUP), next_seed(), 124, 127)], -1)  # fmt: skip

        ids = lambda leaf: (_hash(leaf.shape, next_seed()) % jnp.uint32(c.vocab_size)).astype(jnp.int32)
        return State(
            window=tuple(map(window, shapes.window)),
            draft_window=tuple(map(window, shapes.draft_window)),
            global_kv={k: entries(v) for k, v in shapes.global_kv.items()},
            index={k: keys(v) for k, v in shapes.index.items()},
            pending={k: uniform(v.shape, next_seed()) for k, v in shapes.pending.items()},
            length=jnp.full(shapes.length.shape, context, jnp.int32),
            anchor=ids(shapes.anchor),
            history=ids(shapes.history),
            draft_from=jnp.zeros(shapes.draft_from.shape, jnp.int32),
        )

    placed = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(fill, **placed)(jnp.uint32(zlib.crc32(f"{seed}.state".encode())))


def permuted_table(batch: int, columns: int, seed: int = 0) -> np.ndarray:
    """i32[batch, columns]: page ids 1..batch*columns, each once, in random order."""
    rng = np.random.default_rng(seed)
    return (1 + rng.permutation(batch * columns)).reshape(batch, columns).astype(np.int32)
