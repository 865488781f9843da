"""The decode step under any DecodeOptions at one narrow geometry that every Hopper kernel takes; what it resolves to, and
how far two of its runs are apart.

Use: `run(options)` gives a `Run` of fixed tokens from a random state; `distance(a, b)` and `check(a, b, BOUNDS)` compare two.
"""

import contextlib
import dataclasses
import functools
import importlib
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

from bench import synthetic
from bench.presets import with_engram_vocab
from dsv41_jax import dspark, expert_order, hyper_parts, model
from dsv41_jax.cache import CacheGeometry, PageTables
from dsv41_jax.config import ModelConfig
from dsv41_jax.model import Network
from dsv41_jax.options import OPERATORS, DecodeOptions
from dsv41_jax.params import Transformer, flat_paths
from dsv41_jax.plan import Chunk
from dsv41_jax.precision import RELEASED
from dsv41_jax.step import _commit_features
from pallas_kernels import registry

HOPPER = "sm_90"
# the released heads, index keys and window, which the Hopper kernels are written for; all else as narrow as they take it
NARROW = with_engram_vocab(
    ModelConfig(
        vocab_size=512,
        hidden_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        q_lora_rank=256,
        o_lora_rank=128,
        max_position_embeddings=4096,
        original_max_position_embeddings=256,
        n_routed_experts=16,
        num_experts_per_tok=3,
        compress_ratios=(2, 1, 1, 1, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        index_topk=64,
        candidate_source_layer_id=1,
        candidate_topk_blocks=32,
        engram_layer_ids=(1,),
        engram_num_embeddings=(1 << 20,),
        engram_vocab_size=60,
        engram_n_heads=2,
        engram_head_dim=64,
        engram_compressed_vocab_size=411,
        num_nextn_predict_layers=1,
        dspark_noise_token_id=511,
        dspark_target_layer_ids=(2, 3),
        dspark_markov_rank=32,
        dspark_n_routed_experts=16,
        dspark_num_experts_per_tok=2,
        image_token_id=506,
    ),
    60,
)
GAMMA, CONTEXT, CAPACITY = 5, 500, 768  # beyond the 256 entries that the candidate blocks cover


def implementations(op: str) -> dict[str, registry.Implementation]:
    """{name: implementation} of an operator of DecodeOptions, fastest first."""
    folder, table = ("index_score", "BLOCK_IMPLEMENTATIONS") if op == "index_score_blocks" else (op, "IMPLEMENTATIONS")
    return {i.name: i for i in getattr(importlib.import_module(f"pallas_kernels.{folder}.api"), table)}


@contextlib.contextmanager
def resolving(resolve):
    """`resolve` in place of registry.resolve, for every operator."""
    plain, folders = registry.resolve, [op for op in OPERATORS if op != "index_score_blocks"]
    modules = [registry, *(importlib.import_module(f"pallas_kernels.{folder}.api") for folder in folders)]
    jax.clear_caches()  # a function traced before would not ask again
    with contextlib.ExitStack() as stack:
        for module in modules:
            if getattr(module, "resolve", None) is plain:
                stack.enter_context(unittest.mock.patch.object(module, "resolve", resolve))
        yield
    jax.clear_caches()


@contextlib.contextmanager
def recorded():
    """Yields {operator: {implementation: {implementation passed over: reason}}}, filled by what is traced inside."""
    taken: dict[str, dict[str, dict]] = {}
    plain = registry.resolve

    def resolve(op, *args, **kwargs):
        chosen, against = plain(op, *args, **kwargs)
        taken.setdefault(op, {}).setdefault(chosen.name, {}).update(against)
        return chosen, against

    with resolving(resolve):
        yield taken


@contextlib.contextmanager
def changed(change):
    """Every operator traced inside returns `change(operator, its implementation, arguments, keywords)`."""
    plain = registry.resolve

    def resolve(op, *args, **kwargs):
        chosen, against = plain(op, *args, **kwargs)
        return dataclasses.replace(chosen, run=lambda *a, **k: change(op, chosen.run, a, k)), against

    with resolving(resolve):
        yield


def kernels(op: str) -> list[str]:
    """Names of the operator's implementations for Hopper, the definition aside."""
    return [name for name, i in implementations(op).items() if name != "reference" and HOPPER in i.arches]


def picked() -> list[str]:
    """Operators that have a kernel which `auto` may pick on Hopper."""
    return [op for op in OPERATORS if any(not implementations(op)[name].by_name_only for name in kernels(op))]


def left_to_xla(taken: dict[str, dict[str, dict]]) -> dict[str, dict]:
    """{operator: reasons} of the `picked` ones that a recorded step took no kernel for, or took the definition too."""
    at = {op: taken.get(op, {"reference": {"step": "does not ask"}}) for op in picked()}
    return {op: told["reference"] for op, told in at.items() if "reference" in told}


def alone(op: str, name: str) -> DecodeOptions:
    """One operator on one implementation, every other on its definition. A plan of experts is only made for the kernel."""
    with_experts = (("experts", "hopper"),) if op == "expert_plan" else ()
    return DecodeOptions("reference", ((op, name), *with_experts))


def geometry(batch: int, capacity: int = CAPACITY) -> CacheGeometry:
    return CacheGeometry(batch, 1 + batch * capacity // 128, page_tokens=128, span=GAMMA + 1)


def abstract_parameters(c: ModelConfig = NARROW) -> Transformer:
    """Shapes of the parameters as a Hopper GPU holds them: experts shuffled, sites' weights in parts."""
    module = Transformer(c)
    leaves = hyper_parts.as_parts(expert_order.as_shuffled(flat_paths(module)))
    return jax.tree.unflatten(jax.tree.structure(module), list(leaves.values()))


@functools.lru_cache(maxsize=3)
def parameters(seed: int = 0, c: ModelConfig = NARROW) -> Transformer:
    """Random parameters in that form, on any device."""
    params = synthetic.random_parameters(c, seed, shuffled=True)
    leaves = flat_paths(params)
    hyper_parts.to_parts(leaves, set(hyper_parts.of_sites(leaves)) - set(hyper_parts.held(leaves)))
    return jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))


def tables(c: ModelConfig, batch: int, capacity: int = CAPACITY, seed: int = 0) -> PageTables:
    """Every pool's own permutation of the pages."""
    ratios = sorted({s.ratio for s in c.layers if s.owns_kv})
    made = iter(jnp.asarray(synthetic.permuted_table(batch, capacity // 128, seed + 10 * i)) for i in range(2 * len(ratios)))
    return PageTables({r: next(made) for r in ratios}, {r: next(made) for r in ratios})


@contextlib.contextmanager
def at_sublayers(given):
    """Yields the list of (residual that a sublayer was handed, its output dtype[T, H]) of all sublayers traced inside: the
    draft stages' first. given: residuals that the sublayers read in place of those, so that each is seen alone."""
    plain, seen = model.sublayer, []

    def sublayer(at, *rest):
        after, y = plain(at if given is None else given[len(seen)], *rest)
        seen.append((at, y))
        return after, y

    with unittest.mock.patch.object(model, "sublayer", sublayer):
        yield seen


def forced(leaves, state, chunk: Chunk, given, *, treedef, net: Network):
    """Draft, verify and commit like `step.mtp_step`, but along given tokens, so that no near tie changes what is computed
    after it: (state, logits f32[B, S, V], draft logits f32[B, G, V], i32[B, G] the tokens that a greedy step drafts, the list
    of `at_sublayers`)."""
    params = jax.tree.unflatten(treedef, leaves)
    token = lambda logits, i: chunk.tokens[:, min(i + 1, chunk.tokens.shape[1] - 1)]
    drafting = params, state, chunk.tokens[:, 0], chunk.start, chunk.slots, net
    greedy = dspark.propose(*drafting, None)[1].tokens
    with at_sublayers(given) as seen:
        state, proposal = dspark.propose(*drafting, token)
        state, features = model.forward(params, state, chunk, net)
    logits = model.head(params, features.hidden).reshape(*chunk.tokens.shape, -1)
    state = _commit_features(params, state, features, chunk, chunk.count, net)
    return state, logits, proposal.logits, greedy, seen


@dataclasses.dataclass(frozen=True)
class Run:
    """Host arrays of one `forced` step, of the rows that are not padding. streams f32[rows, M, H] handed to every sublayer
    and outputs f32[rows, H] of every sublayer, by its place; logits f32[rows, V]; draft f32[rows, V]; greedy i32[B, G]; state: its
    arrays by name. residuals: as `given` takes them, on the device."""

    streams: list[np.ndarray]
    outputs: list[np.ndarray]
    logits: np.ndarray
    draft: np.ndarray
    greedy: np.ndarray
    state: dict[str, np.ndarray]
    residuals: list


def chunk_of(c: ModelConfig, batch: int, context: int = CONTEXT, capacity: int = CAPACITY, seed: int = 0) -> Chunk:
    """Random tokens after contexts of different lengths, in permuted slots and pages. The last request is padding, the one
    before it verifies three rows only."""
    rng = np.random.default_rng(seed)
    count, slots = np.full(batch, GAMMA + 1), rng.permutation(batch)
    count[-2:], slots[-1] = (3, 0), -1
    start = context - rng.integers(0, 300, batch)
    as_i32 = lambda x: jnp.asarray(x, jnp.int32)
    tokens = rng.integers(3, min(c.vocab_size, c.image_token_id if c.image_token_id > 0 else c.vocab_size), (batch, GAMMA + 1))
    return Chunk(as_i32(tokens), as_i32(start), as_i32(count), as_i32(slots), tables(c, batch, capacity, seed))


def network(options: DecodeOptions, batch: int, c: ModelConfig = NARROW, capacity: int = CAPACITY) -> Network:
    return Network(c, geometry(batch, capacity), RELEASED, options)


def program(options: DecodeOptions, batch: int, params, c: ModelConfig = NARROW, capacity: int = CAPACITY):
    """(`forced` jitted, its flat parameters)."""
    leaves, treedef = jax.tree.flatten(params)
    net = network(options, batch, c, capacity)
    return jax.jit(functools.partial(forced, treedef=treedef, net=net), donate_argnums=1), leaves


def random_state(batch: int, c: ModelConfig = NARROW, context: int = CONTEXT, capacity: int = CAPACITY, seed: int = 0):
    return synthetic.random_state(c, geometry(batch, capacity), context, seed)


def run(options: DecodeOptions, given=None, c: ModelConfig = NARROW, batch: int = 4, context: int = CONTEXT,
        capacity: int = CAPACITY) -> Run:  # fmt: skip
    """One `forced` step from the random state."""
    step, leaves = program(options, batch, parameters(0, c), c, capacity)
    chunk = chunk_of(c, batch, context, capacity)
    return on_host(step(leaves, random_state(batch, c, context, capacity), chunk, given), chunk)


def named(state) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}


def on_host(out, chunk: Chunk) -> Run:
    state, logits, draft, greedy, seen = out
    count, slots = np.asarray(chunk.count), np.asarray(chunk.slots)
    verified = (np.arange(logits.shape[1]) < count[:, None]) & (slots >= 0)[:, None]
    drafted = np.broadcast_to((slots >= 0)[:, None], draft.shape[:2])
    draft_rows = draft.shape[0] * draft.shape[1]
    live = lambda x: np.asarray(x.astype(jnp.float32))[(drafted if x.shape[0] == draft_rows else verified).ravel()]
    residuals = [at for at, _ in seen]
    return Run([live(at.streams) for at in residuals], [live(y) for _, y in seen], np.asarray(logits)[verified],
               np.asarray(draft)[drafted], np.asarray(greedy)[slots >= 0], named(state), residuals)  # fmt: skip


def off(a, b) -> np.ndarray:
    """f32[rows]: RMS of the difference of a row's values, relative to the RMS of a's."""
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    return np.sqrt(np.mean((a - b) ** 2, -1) / np.mean(a**2, -1))


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a run is from another. Of each kind of array the worst place's: `typical`, the median of its rows' `off`, and
    `far`, the share of rows beyond FAR (of greedy drafts: of tokens that differ); state: {pool: share of the bytes that either wrote in which they differ}."""

    typical: dict[str, float]
    far: dict[str, float]
    state: dict[str, float]

    def __str__(self):
        told = lambda values: ", ".join(f"{k} {v:.2g}" for k, v in values.items())
        return f"typical: {told(self.typical)}; rows beyond {FAR}: {told(self.far)}; bytes of {told(self.state)}"

    def check(self, bounds: "Distance") -> None:
        for part in ("typical", "far", "state"):
            most = getattr(bounds, part)
            wrong = {k: v for k, v in getattr(self, part).items() if v > most[k]}
            assert not wrong, f"{part} beyond {most}: {self}"


FAR = 0.1  # of a row's RMS


def distance(a: Run, b: Run, before: dict[str, np.ndarray]) -> Distance:
    """b's distance from a; before: the state's arrays before both. Every second sublayer is attention, the others experts."""
    kinds = {"streams": (a.streams, b.streams), "attention": (a.outputs[::2], b.outputs[::2]),
             "experts": (a.outputs[1::2], b.outputs[1::2]), "logits": ([a.logits], [b.logits]),
             "draft": ([a.draft], [b.draft])}  # fmt: skip
    rows = {kind: [off(x, y) for x, y in zip(*pair, strict=True)] for kind, pair in kinds.items()}
    assert all(np.isfinite(r).all() for places in rows.values() for r in places)
    state: dict[str, float] = {}
    for name, old in before.items():
        x, y, old = (np.ascontiguousarray(v).view(np.uint8) for v in (a.state[name], b.state[name], old))
        written = (x != old) | (y != old)
        if written.any():
            kind = name.split(".")[1].split("[")[0]
            state[kind] = max(state.get(kind, 0.0), float((x != y).sum() / written.sum()))
    far = {k: float(max(np.mean(r > FAR) for r in places)) for k, places in rows.items()}
    far["greedy"] = float(np.mean(a.greedy != b.greedy))
    return Distance({k: float(max(np.median(r) for r in places)) for k, places in rows.items()}, far, state)
