"""The cases of tests/test_sharding.py: pytest functions that need four CPU devices, run by it in a process of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import CHECKPOINT, inputs
from golden_data import load as golden

from dsv41_jax import checkpoint, engram
from dsv41_jax.cache import CacheGeometry, PageTables, init_state
from dsv41_jax.checkpoint import CheckpointError
from dsv41_jax.config import ModelConfig
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.model import Network
from dsv41_jax.params import Experts, flat_paths
from dsv41_jax.plan import Chunk
from dsv41_jax.precision import FLOAT32, RELEASED
from dsv41_jax.presets import TINY
from dsv41_jax.sampling import SamplingParams, pack_sampling
from dsv41_jax.step import DecodeBatch, PrefillBatch, Steps
from pallas_kernels.experts.api import experts_parts
from sharding import load as sharded_load
from sharding import rules
from sharding.exchange import AllToAllExchange, BlockedExchange, GatherExchange, RingExchange, pack_rows, unpack_rows
from sharding.load import load_sharded
from sharding.mesh import RANKS, make_mesh
from sharding.rules import init_sharded_state, is_split, state_spec
from sharding.step import ShardedSteps, of_rank, stack_ranks

R = 4
SPAN, PAGES, PAGE_TOKENS = 16, 6, 16  # per rank
EXCHANGES = {
    "gather": GatherExchange(R), "gather in 2 parts": GatherExchange(R, parts=2),
    "gather in 4 parts": GatherExchange(R, parts=4), "reduce_scatter": GatherExchange(R, combine="reduce_scatter", parts=2),
    "ring": RingExchange(R), "ring in 2 parts": RingExchange(R, parts=2),
    "all_to_all": AllToAllExchange(R), "all_to_all in 2 parts": AllToAllExchange(R, parts=2),
}  # fmt: skip
# every layer class once, and one draft stage
SMALL = dataclasses.replace(
    TINY, num_hidden_layers=5, compress_ratios=(0, 2, 1, 1, 1, 0), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3),
    candidate_source_layer_id=2, candidate_topk_blocks=4, index_topk=8, engram_layer_ids=(0,), engram_num_embeddings=(1172,),
    num_nextn_predict_layers=1, dspark_target_layer_ids=(3, 4), dspark_block_size=3, hc_sinkhorn_iters=3,
)  # fmt: skip
# other heads, experts and widths, ratio 2 scored anew and reused, engram in the middle, no drafter
OTHER = dataclasses.replace(
    TINY, hidden_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=6, o_groups=3, head_dim=32,
    qk_rope_head_dim=16, q_lora_rank=32, n_routed_experts=12, num_experts_per_tok=5, sliding_window=4,
    compress_ratios=(2, 2, 2, 1), kv_source_layer_ids=(0, 3), index_source_layer_ids=(0, 1, 3), index_n_heads=4,
    index_head_dim=32, index_topk=3, candidate_source_layer_id=3, candidate_topk_blocks=2, candidate_block_size=2,
    hc_sinkhorn_iters=3, engram_layer_ids=(2,), engram_n_heads=3, engram_num_embeddings=(1851,),
    num_nextn_predict_layers=0, dspark_target_layer_ids=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(R)


def bits(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def geometry(slots: int, ranks: int = 1) -> CacheGeometry:
    """One rank's caches, or those of `ranks` ranks end to end as one device holds them."""
    return CacheGeometry(slots * ranks, PAGES * ranks, PAGE_TOKENS, SPAN)


def one_device(batches, slots: int):
    """The ranks' batches end to end as one device sees them: slots and page ids counted through all ranks."""

    def through(rank, b):
        if isinstance(b, PrefillBatch):
            return dataclasses.replace(b, chunk=through(rank, b.chunk))
        tables = jax.tree.map(lambda t: np.where(t > 0, t + rank * PAGES, t), b.tables)
        return dataclasses.replace(b, slots=np.where(b.slots < 0, b.slots, b.slots + rank * slots), tables=tables)

    return stack_ranks([through(r, b) for r, b in enumerate(batches)])


def tables(c, rows: int, rank: int) -> PageTables:
    """Pages of a rank dealt to its requests, in another order on every rank."""
    ids = np.random.default_rng(rank).permutation(np.arange(1, PAGES)).astype(np.int32)
    return PageTables.shared(ids[: PAGES - 1 - (PAGES - 1) % rows].reshape(rows, -1), c)


def prefill_batch(c, rank: int, prompts, sampling) -> PrefillBatch:
    """Request i of the rank in slot i; None = a padding row."""
    tokens = np.full((len(prompts), SPAN), 7, np.int32)  # padding tokens must not matter
    count = np.array([0 if p is None else len(p) for p in prompts], np.int32)
    for i, p in enumerate(prompts):
        tokens[i, : count[i]] = p if p is not None else ()
    slots = np.array([-1 if p is None else i for i, p in enumerate(prompts)], np.int32)
    chunk = Chunk(tokens, np.zeros(len(prompts), np.int32), count, slots, tables(c, len(prompts), rank))
    packed = pack_sampling(sampling, [0 if p is None else len(p) for p in prompts], c.eos_token_id)
    return PrefillBatch(chunk, packed, slots >= 0, np.full(len(prompts), -1, np.int32))


def decode_batch(b: PrefillBatch) -> DecodeBatch:
    return DecodeBatch(b.chunk.slots, b.chunk.tables, b.sampling)


def assert_states(single, sharded, atol: float):
    """Every array of the state, page 0 and unused slots included: integers equal, floats to `atol`."""
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(single)[0], jax.tree.leaves(sharded), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.int32:
            np.testing.assert_array_equal(a, b, err_msg=str(path))
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=str(path))


def assert_outputs(single, sharded):
    for f in ("tokens", "count", "accepted", "finite"):
        np.testing.assert_array_equal(getattr(single, f), getattr(sharded, f), err_msg=f)
    np.testing.assert_allclose(single.confidence, sharded.confidence, rtol=1e-4, atol=2e-4)


# the network over four ranks -------------------------------------------------------------------------------------------


def test_golden_logits(mesh):
    c = ModelConfig.from_file(CHECKPOINT)
    g = CacheGeometry(1, 4, 16, 48)
    steps = ShardedSteps(Network(c, g, FLOAT32), load_sharded(CHECKPOINT, mesh, progress=False), mesh, gamma=0)
    ids = inputs()["input_ids"].astype(np.int32)

    def chunk(rank):
        live = rank < len(ids)
        tokens = ids[rank : rank + 1] if live else np.zeros((1, 48), np.int32)
        table = PageTables.shared(np.array([[3, 1, 2]], np.int32), c)
        one = lambda v: np.full(1, v, np.int32)
        return Chunk(tokens, one(0), one(48 if live else 0), one(0 if live else -1), table)

    state = init_sharded_state(c, g, FLOAT32, mesh)
    state, logits, _ = steps.forward(state, stack_ranks([chunk(r) for r in range(R)]))
    want = golden("float32")["logits"]
    np.testing.assert_allclose(np.asarray(logits)[:3], want, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(logits)[:3].argmax(-1), want.argmax(-1))
    np.testing.assert_array_equal(state.length, [48, 48, 48, 0])
    # the empty rank took part and its caches are as they were
    empty = of_rank(state, 3, R)
    for a, b in zip(jax.tree.leaves(empty), jax.tree.leaves(init_state(c, g, FLOAT32)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_golden_steps(mesh):
    """Prefill lengths that differ per rank, an empty rank, a stochastic request; then three speculative steps."""
    c = ModelConfig.from_file(CHECKPOINT)
    ids = inputs()["input_ids"].astype(np.int32)
    single = Steps(Network(c, geometry(1, R), FLOAT32), checkpoint.load(CHECKPOINT, progress=False))
    sharded = ShardedSteps(Network(c, geometry(1), FLOAT32), load_sharded(CHECKPOINT, mesh, progress=False), mesh)
    prompts = [ids[0, :13], ids[1, :4], None, ids[2, :9]]
    params = [SamplingParams(), SamplingParams(temperature=0.9, seed=11, top_p=0.95), None, SamplingParams()]
    batches = [prefill_batch(c, r, [p], [s]) for r, (p, s) in enumerate(zip(prompts, params, strict=True))]
    a = init_state(c, geometry(1, R), FLOAT32)
    a, _ = single.prefill(a, one_device(batches, 1))
    # the ranks' states end to end are one device's state, so the sharded run starts from the same arrays
    b = jax.device_put(a, jax.sharding.NamedSharding(mesh, state_spec()))
    accepted = 0
    for _ in range(3):
        a, want = single.decode(a, one_device([decode_batch(x) for x in batches], 1))
        b, got = sharded.decode(b, stack_ranks([decode_batch(x) for x in batches]))
        assert_outputs(want, got)
        assert_states(a, b, atol=2e-5)
        assert np.asarray(got.finite).all() and np.asarray(got.count)[2] == 0
        accepted += int(np.asarray(got.count).sum())
    assert accepted >= 9


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, folder of the same geometry with other weights)"""
    out = tmp_path_factory.mktemp("small")
    return [make_checkpoint(SMALL, out / str(seed), seed=seed) for seed in (1, 2)]


def biased(params, rank: int):
    """The parameters with gates so biased that every row wants experts of one rank only."""

    def move(path, leaf):
        if not path.endswith("ffn.bias"):
            return leaf
        n = leaf.shape[0] // R
        bias = np.asarray(leaf) + np.where(np.arange(leaf.shape[0]) // n == rank, 100.0, 0.0).astype(np.float32)
        return jax.device_put(jnp.asarray(bias), leaf.sharding)

    leaves = [move(path, leaf) for path, leaf in flat_paths(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@pytest.mark.parametrize("name", ["gather in 2 parts", "ring in 2 parts", "all_to_all"])
def test_random_steps(mesh, small, name):
    """Prefill and decode equal one device that adds in the same order, with balanced routing, with every row on one rank,
    and with other weights, all from the same executables.

    Bits are compared for the exchanges alone (below): a whole network runs its dense products on other row counts here
    than on one device, and the CPU's products do not give a row the same bits in every batch."""
    c = SMALL
    one = Steps(Network(c, geometry(2, R), FLOAT32, exchange=BlockedExchange(R)), checkpoint.load(small[0], progress=False))
    many = ShardedSteps(Network(c, geometry(2), FLOAT32), load_sharded(small[0], mesh, progress=False), mesh,
                        exchange=EXCHANGES[name])  # fmt: skip
    rng = np.random.default_rng(5)
    prompt = lambda n: rng.integers(3, 500, n).astype(np.int32)
    prompts = [[prompt(16), prompt(3)], [None, None], [prompt(1), None], [None, prompt(12)]]
    greedy = [SamplingParams(), SamplingParams(temperature=1.0, seed=3)]
    batches = [prefill_batch(c, r, p, greedy) for r, p in enumerate(prompts)]
    tokens = []
    for routing in ("as trained", "one rank", "other weights"):
        if routing == "one rank":
            one.reload(biased(checkpoint.load(small[0], progress=False), 2))
            many.reload(biased(load_sharded(small[0], mesh, progress=False), 2))
        elif routing == "other weights":
            one.reload(checkpoint.load(small[1], progress=False))
            many.reload(load_sharded(small[1], mesh, progress=False))
        a, b = init_state(c, geometry(2, R), FLOAT32), init_sharded_state(c, geometry(2), FLOAT32, mesh)
        a, want = one.prefill(a, one_device(batches, 2))
        b, got = many.prefill(b, stack_ranks(batches))
        assert_outputs(want, got)
        for _ in range(3):
            a, want = one.decode(a, one_device([decode_batch(x) for x in batches], 2))
            b, got = many.decode(b, stack_ranks([decode_batch(x) for x in batches]))
            assert_outputs(want, got)
        assert_states(a, b, atol=5e-4)
        tokens.append(np.asarray(got.tokens).tolist())
    assert tokens[0] != tokens[1] and tokens[0] != tokens[2]
    assert many._mtp._cache_size() == many._prefill._cache_size() == 1


def test_random_logits(mesh, tmp_path):
    """Logits and caches of prompts in two chunks, on another geometry than test_random_steps, with three requests a rank and
    one rank empty, are those of one device that adds all experts one by one."""
    c, rows = OTHER, 3
    folder = make_checkpoint(c, tmp_path / "other", seed=7)
    one = Steps(Network(c, geometry(rows, R), FLOAT32), checkpoint.load(folder, progress=False))
    many = ShardedSteps(Network(c, geometry(rows), FLOAT32), load_sharded(folder, mesh, progress=False), mesh,
                        exchange=EXCHANGES["reduce_scatter"])  # fmt: skip
    rng = np.random.default_rng(17)
    start = np.zeros((R, rows), np.int32)
    counts = np.array([[[8, 3, 6], [1, 0, 5], [0, 0, 0], [2, 8, 7]], [[8, 7, 0], [4, 8, 1], [0, 0, 0], [5, 2, 8]]], np.int32)
    a, b = init_state(c, geometry(rows, R), FLOAT32), init_sharded_state(c, geometry(rows), FLOAT32, mesh)
    for count in counts:
        slots = np.where(count > 0, np.arange(rows, dtype=np.int32), -1)
        chunks = [Chunk(rng.integers(3, 500, (rows, 8)).astype(np.int32), start[r].copy(), count[r], slots[r],
                        tables(c, rows, r)) for r in range(R)]  # fmt: skip
        a, want, _ = one.forward(a, one_device(chunks, rows))
        b, got, _ = many.forward(b, stack_ranks(chunks))
        start += count
        live = np.arange(8) < count.reshape(-1, 1)
        want, got = np.asarray(want)[live], np.asarray(got)[live]
        assert want.shape == (count.sum(), c.vocab_size) and want.std() > 0.1
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * want.std())
        np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
    np.testing.assert_array_equal(b.length, start.reshape(-1))
    assert_states(a, b, atol=2e-5)


# the exchanges ---------------------------------------------------------------------------------------------------------


E, K, H, F, T = 8, 3, 64, 32, 6


def expert_params(seed):
    """Random packed experts of ordinary size, on one device."""
    rng = np.random.default_rng(seed)
    module = Experts(dataclasses.replace(TINY, hidden_size=H, moe_intermediate_size=F), E)
    draw = lambda a: jnp.asarray(rng.integers(*((120, 124) if a.shape[-1] <= H // 32 else (0, 256)), a.shape, dtype=np.uint8))
    return jax.tree.map(draw, module)


@functools.cache
def compiled_exchange(mesh, exchange, precision):
    """run_experts on four ranks, or on one device for an exchange of one rank, and what it runs beside; jitted."""
    def run(x, ids, weights, e, first, parts=1, spare_sms=0):
        return experts_parts(x, ids, weights, e.w13[...], e.s13[...], e.w2[...], e.s2[...], first_expert=first,
                             precision=precision, parts=parts, spare_sms=spare_sms)  # fmt: skip

    def call(x, ids, weights, params):
        return exchange.run_experts(x, ids, weights, params, run, (lambda: x + 1, lambda y: 2 * y))

    if exchange.ranks > 1:
        spec = jax.sharding.PartitionSpec(RANKS)
        call = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(call)


def run_exchange(mesh, exchange, params, x, ids, weights):
    """f32[R*T, H]: run_experts on four ranks, or on one device for an exchange of one rank."""
    precision = "released" if x.dtype == jnp.bfloat16 else "float32"
    routed, beside = compiled_exchange(mesh, exchange, precision)(x, ids, weights, params)
    np.testing.assert_array_equal(np.asarray(beside, np.float32), np.asarray(2 * (x + 1), np.float32))
    return np.asarray(routed)


def routing(kind: str, rng):
    """i32[R*T, K] distinct ids per row."""
    if kind == "random":
        return np.stack([rng.permutation(E)[:K] for _ in range(R * T)]).astype(np.int32)
    if kind == "two experts":  # all on rank 2, the third expert of a row on rank 3
        return np.tile(np.array([[5, 4, 6]], np.int32), (R * T, 1))
    ids = np.stack([rng.permutation(E // R * 2)[:K] for _ in range(R * T)])  # ranks 0 and 1 alone
    return ids.astype(np.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exchanges_add_in_one_order(mesh, dtype):
    params = expert_params(3)
    for n, kind in enumerate(("random", "two experts", "half the ranks")):
        rng = np.random.default_rng(n)
        x = jnp.asarray(rng.standard_normal((R * T, H)) * np.exp2(rng.integers(-12, 6, (R * T, 1))), dtype)
        ids, weights = routing(kind, rng), rng.random((R * T, K)).astype(np.float32)
        want = run_exchange(mesh, BlockedExchange(R), params, x, ids, weights)
        assert np.abs(want).max() > 0
        for name in set(EXCHANGES) - {"reduce_scatter"}:
            got = run_exchange(mesh, EXCHANGES[name], params, x, ids, weights)
            np.testing.assert_array_equal(bits(want), bits(got), err_msg=f"{kind} {name}")
        # another order, the same terms
        got = run_exchange(mesh, EXCHANGES["reduce_scatter"], params, x, ids, weights)
        np.testing.assert_allclose(want, got, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=kind)


def ragged_by_definition(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which has no CPU implementation, with one slice a rank. A slice whose receiver expects
    another number of rows spoils everything that the receiver holds."""
    here = jax.lax.axis_index(axis_name)
    sent = [jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    for rank in range(R):
        data, start, size, place = sent[0][rank], *(a[rank, here] for a in sent[1:])
        row = jnp.arange(output.shape[0]) - place
        moved = data[jnp.clip(start + row, 0, data.shape[0] - 1)]
        output = jnp.where(((row >= 0) & (row < size))[:, None], moved, output)
        output = jnp.where(recv_sizes[rank] == size, output, jnp.full_like(output, 255))
    return output


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ragged_exchange_adds_in_one_order(mesh, dtype, monkeypatch):
    """Offsets and row counts of the ragged exchange bring every row there and home again, whatever the routing."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_by_definition)
    params, exchange = expert_params(3), AllToAllExchange(R, parts=2, ragged=True)
    for n, kind in enumerate(("random", "two experts", "half the ranks")):
        rng = np.random.default_rng(n)
        x = jnp.asarray(rng.standard_normal((R * T, H)), dtype)
        ids, weights = routing(kind, rng), rng.random((R * T, K)).astype(np.float32)
        want = run_exchange(mesh, BlockedExchange(R), params, x, ids, weights)
        assert np.abs(want).max() > 0
        np.testing.assert_array_equal(bits(want), bits(run_exchange(mesh, exchange, params, x, ids, weights)), err_msg=kind)


def test_one_bad_row_stays_alone(mesh):
    """NaN in a row of one rank reaches no other row of any rank."""
    params, rng = expert_params(4), np.random.default_rng(9)
    x = jnp.asarray(rng.standard_normal((R * T, H)), jnp.float32)
    ids, weights = routing("random", rng), rng.random((R * T, K)).astype(np.float32)
    others = np.arange(R * T) != T + 2
    for name in ("gather", "ring", "all_to_all"):
        clean = run_exchange(mesh, EXCHANGES[name], params, x, ids, weights)
        dirty = run_exchange(mesh, EXCHANGES[name], params, x.at[T + 2].set(jnp.nan), ids, weights)
        assert np.isnan(dirty[T + 2]).all()
        np.testing.assert_array_equal(bits(clean[others]), bits(dirty[others]))


def test_rows_travel_exactly():
    """Packing is the identity in float32, and in bf16 on values that have been through FP8, at every magnitude."""
    rng = np.random.default_rng(0)
    ids, weights = rng.integers(-1, E, (512, K)).astype(np.int32), rng.standard_normal((512, K)).astype(np.float32)
    # groups of 32 channels of every magnitude, and channels within a group down to nothing
    spread = rng.standard_normal((512, H)) * np.exp2(rng.integers(-12, 1, (512, H)))
    spread *= np.repeat(np.exp2(rng.integers(-30, 14, (512, H // 32))), 32, 1)
    x = jnp.asarray(spread, jnp.bfloat16)
    got, *routed = unpack_rows(pack_rows(x, ids, weights), H, K, jnp.bfloat16)
    again, *_ = unpack_rows(pack_rows(got, ids, weights), H, K, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))
    assert np.isfinite(np.asarray(got, np.float32)).all() and (np.asarray(got) != 0).mean() > 0.5
    x = jnp.asarray(spread, jnp.float32)
    same, *routed32 = unpack_rows(pack_rows(x, ids, weights), H, K, jnp.float32)
    np.testing.assert_array_equal(bits(x), bits(same))
    for r in (routed, routed32):
        np.testing.assert_array_equal(bits(ids), bits(r[0]))
        np.testing.assert_array_equal(bits(weights), bits(r[1]))


def test_engram_rows_are_found_on_any_rank(mesh):
    rows, d, n = 434, 32, 5  # 434 = 4 * 109 - 2: the last rank holds two rows of padding
    rng = np.random.default_rng(1)
    table = rng.integers(0, 256, (rows, d)).astype(np.uint8)
    table[(table & 0x7F) == 0x7F] = 0x80  # no NaN, many negative zeros
    table = table.view(jnp.float8_e4m3fn.dtype)
    scale = rng.integers(110, 130, (rows, d // 32)).astype(np.uint8)
    asked = rng.integers(0, rows, (R * T, n)).astype(np.int32)
    asked[0, :3], asked[1, :2], asked[-1] = (0, 433, 109), (-1, 436), 0
    want = np.asarray(engram.lookup(jnp.asarray(table), jnp.asarray(scale), asked, jnp.bfloat16))
    padded = lambda a: np.concatenate([a, np.zeros((2, a.shape[1]), a.dtype)])
    spec = jax.sharding.PartitionSpec(RANKS)
    for name in ("gather", "ring"):
        find = lambda t, s, a, name=name: EXCHANGES[name].lookup(t, s, a, jnp.bfloat16)
        got = jax.jit(jax.shard_map(find, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
            padded(table), padded(scale), asked)  # fmt: skip
        np.testing.assert_array_equal(bits(want), bits(got), err_msg=name)


# loading and errors ----------------------------------------------------------------------------------------------------


def test_sharded_load_is_the_whole_load(mesh):
    whole = flat_paths(checkpoint.load(CHECKPOINT, progress=False))
    sharded = flat_paths(load_sharded(CHECKPOINT, mesh, progress=False))
    assert list(whole) == list(sharded)
    split = 0
    for path, want in whole.items():
        got = sharded[path]
        n = want.shape[0]
        np.testing.assert_array_equal(bits(want), bits(np.asarray(got)[:n]), err_msg=path)
        assert not np.asarray(got)[n:].view(np.uint8).any(), path
        parts = {s.device: s.data.shape[0] for s in got.addressable_shards}
        assert set(parts) == set(mesh.devices.flat), path
        assert set(parts.values()) == {-(-n // R) if is_split(path) else n}, path
        split += is_split(path)
    assert split == 4 * (8 + 3) + 2 * 2


@pytest.fixture
def no_allocation(monkeypatch):
    """Fails the test if a device is touched."""

    def refuse(*a, **k):
        raise AssertionError("a device allocation before everything was checked")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(jnp, "zeros", refuse)


def test_errors_before_any_allocation(mesh, tmp_path, no_allocation):
    with pytest.raises(ValueError, match="at least 5 devices for 5 ranks, got 4"):
        make_mesh(5)
    with pytest.raises(ValueError, match="ranks >= 1, got 0"):
        make_mesh(0)
    with pytest.raises(ValueError, match="divisor of n_routed_experts = 16, got 3"):
        load_sharded(CHECKPOINT, make_mesh(3))
    with pytest.raises(CheckpointError, match="no such folder"):
        load_sharded(tmp_path / "nowhere", mesh, TINY)
    with pytest.raises(CheckpointError, match="problems"):
        load_sharded(CHECKPOINT, mesh, TINY)  # the golden folder is another geometry
    other = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="one axis 'ranks', got"):
        load_sharded(CHECKPOINT, other)
    assert sharded_load.checkpoint is checkpoint


def test_errors_of_steps(mesh):
    c = SMALL
    net = Network(c, geometry(1), RELEASED)
    params = rules.global_parameters(c, mesh)
    with pytest.raises(ValueError, match="expected one for 4 ranks"):
        ShardedSteps(net, params, mesh, exchange=GatherExchange(2))
    with pytest.raises(ValueError, match="expected one for 4 ranks"):
        ShardedSteps(net, params, mesh, exchange=BlockedExchange(4))
    with pytest.raises(ValueError, match="parts >= 1 and spare_sms >= 0, got 0 and 8"):
        GatherExchange(4, parts=0)
    with pytest.raises(ValueError, match="ranks >= 1, got 0"):
        RingExchange(0)
    with pytest.raises(ValueError, match="blocks expected a divisor of 8 experts, got 0"):
        BlockedExchange(0).run_experts(None, None, None, expert_params(0), None)
    with pytest.raises(ValueError, match=r"draft.confidence expected P\(\) over .*4"):
        ShardedSteps(net, rules.global_parameters(c, make_mesh(2)), mesh)
    with pytest.raises(ValueError, match=r"engram.table expected float8_e4m3fn\[1172, 32\] over all ranks"):
        grown = dataclasses.replace(c, engram_num_embeddings=(1300,))
        ShardedSteps(net, rules.global_parameters(grown, mesh), mesh)
    steps = ShardedSteps(net, params, mesh)
    with pytest.raises(ValueError, match="rows of 4 ranks end to end, got 3 requests"):
        steps.decode(None, decode_batch(prefill_batch(c, 0, [None] * 3, [None] * 3)))
    wide = prefill_batch(c, 0, [None] * 4, [None] * 4)
    wide = dataclasses.replace(wide, chunk=dataclasses.replace(wide.chunk, tokens=np.zeros((4, SPAN + 1), np.int32)))
    with pytest.raises(ValueError, match="span = 16 rows a request, got 17"):
        steps.prefill(None, wide)
    with pytest.raises(ValueError, match="one shape on all ranks"):
        stack_ranks([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match="combine expected one of"):
        GatherExchange(4, combine="sum")


def test_rules_refuse_collisions():
    assert rules.spec(("expert", "feature")) == jax.sharding.PartitionSpec(RANKS, None)
    with pytest.raises(ValueError, match="can split only one axis"):
        rules.spec(("expert", "request"))
    with pytest.raises(ValueError, match="expected logical axes among"):
        rules.spec(("head",))
    assert not rules.is_split("layers.3.ffn.gate") and rules.is_split("draft.stages.0.ffn.experts.s2")
