"""What the compiled steps do with memory: pools updated in place, nothing copied, nothing read by the host,
nothing compiled twice.

The pools are made large and of sizes that nothing else has, so that a pool-sized array in the compiled HLO is
a pool. That no instruction but in-place updates produces one is why a step's time cannot grow with the number of pages.
"""

import re

import jax
import jax.numpy as jnp
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax.cache import CacheGeometry
from dsv41_jax.step import PrefillBatch, compiled, mtp_step

NAME, GAMMA, ROWS = "all_kinds", 5, 3
LARGE = CacheGeometry(slots=251, pages=16381, page_tokens=16, span=13)
PROMPTS = [harness.prompt(n, seed=n) for n in (9, 13, 4)]
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(?[a-z0-9]+\[.*?) ([a-z][\w\-]*)\((.*)$")
SHAPE = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
# what may yield a whole pool without touching it, and the in-place updates
PASSES = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier"}
UPDATES = {"scatter", "dynamic-update-slice"}


def steps_of(precision: str):
    return harness.compiled(NAME, precision, GAMMA, LARGE)


def tables_of(steps, shuffle=None, rest=0):
    return harness.page_tables([20] * ROWS, steps.net.config, shuffle=shuffle, rest=rest, pages=LARGE.pages)


def arguments(steps, which: str):
    state, tables = harness.blank_state(steps), tables_of(steps)
    if which == "decode":
        return state, harness.decode_batch([3, 1, 2], tables)
    chunk = harness.chunk_of(np.ones((ROWS, 13)), [0] * ROWS, [13] * ROWS, [3, 1, 2], tables)
    return state, PrefillBatch(
        chunk, harness.greedy_sampling(ROWS), jnp.ones(ROWS, bool), jnp.full(ROWS, -1, jnp.int32)
    )


@pytest.fixture(scope="module", params=["released", "float32"])
def precision(request):
    return request.param


@pytest.fixture(scope="module", params=["decode", "prefill"])
def built(request, precision):
    """(steps, the executable of one step, its HLO text)."""
    steps = steps_of(precision)
    jitted = {"decode": steps._mtp, "prefill": steps._prefill}[request.param]
    executable = jitted.lower(steps._leaves, *arguments(steps, request.param)).compile()
    return steps, executable, executable.as_text()


def pools_of(state):
    """All arrays of the state that grow with pages or slots and have more than 10 kB."""
    return [x for x in jax.tree.leaves(state) if x.nbytes > 10_000]


def shapes(text: str):
    """[(elements, bytes)] of the array shapes in an HLO type."""
    out = []
    for dtype, dims in SHAPE.findall(text):
        count = int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))
        out.append((count, count * WIDTH.get(dtype, 1)))
    return out


def computations(hlo: str) -> dict[str, list]:
    """{computation: [(is root, name, type, opcode, operands)]}."""
    out, current = {}, None
    for line in hlo.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            current = out.setdefault(header.group(1), [])
        found = INSTRUCTION.match(line)
        if found and current is not None:
            current.append((bool(found.group(1)), *found.groups()[1:]))
    return out


def updates_in_place(comps: dict, operands: str) -> bool:
    """Whether the fusion called in `operands` ends in scatters or dynamic-update-slices (bitcasts and tuples
    of them)."""
    body = comps[re.search(r"calls=%?([\w.\-]+)", operands).group(1)]
    by_name = {name: (opcode, rest) for _, name, _, opcode, rest in body}
    todo = [name for root, name, *_ in body if root]
    while todo:
        opcode, rest = by_name[todo.pop()]
        if opcode in ("bitcast", "tuple"):
            todo += re.findall(r"%([\w.\-]+)", rest.split(")")[0])
        elif opcode not in UPDATES | {"parameter"}:
            return False
    return True


def test_no_instruction_makes_a_pool(built):
    """Whole pools come out of parameters, control flow and in-place updates only: no copy, convert, select or
    broadcast."""
    steps, _, hlo = built
    sizes = {x.size for x in pools_of(harness.blank_state(steps))}
    comps = computations(hlo)
    fused = {m for text in re.findall(r"calls=%?([\w.\-]+)", hlo) for m in [text]}
    seen, wrong = 0, []
    for name, body in comps.items():
        if name in fused:
            continue  # inside a fusion nothing is materialised but its root
        for _, instruction, kind, opcode, rest in body:
            if not any(count in sizes for count, _ in shapes(kind)):
                continue
            seen += 1
            allowed = opcode in PASSES | UPDATES or (opcode == "fusion" and updates_in_place(comps, rest))
            if not allowed:
                wrong.append(f"{name}: {instruction} = {kind} {opcode}")
    assert seen > len(sizes)  # the parser finds the pools at all
    assert wrong == []


def test_the_parser_finds_a_copy():
    """The check above, on a program that does copy its pool: it is not donated."""
    pool = jnp.zeros((1021, 16, 64))
    hlo = jax.jit(lambda p: p.at[3, 2].set(1.0)).lower(pool).compile().as_text()
    found = [
        op
        for body in computations(hlo).values()
        for _, _, kind, op, _ in body
        if (pool.size, pool.nbytes) in shapes(kind)
    ]
    assert "copy" in found


def test_the_state_is_updated_in_place(built):
    """Every array of the state is aliased to an output; temporaries together are smaller than one pool."""
    steps, executable, hlo = built
    state = harness.blank_state(steps)
    leaves = jax.tree.leaves(state)
    aliases = re.findall(r"\{\d*\}: \(\d+, \{\}, (?:may|must)-alias\)", hlo.splitlines()[0])
    assert len(aliases) == len(leaves)
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in leaves)
    assert memory.temp_size_in_bytes < min(x.nbytes for x in state.global_kv.values())


def test_nothing_leaves_the_device(built):
    hlo = built[2]
    opcodes = {op for body in computations(hlo).values() for *_, op, _ in body}
    assert opcodes & {"scatter", "dynamic-update-slice", "fusion"}
    assert not opcodes & {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
    assert "callback" not in hlo


# ----------------------------------------------------------------------------------------------------- running them


@pytest.fixture(scope="module")
def ready(precision):
    """(steps, state after three prompts as host arrays, batch)."""
    steps = steps_of(precision)
    tables = tables_of(steps)
    state, _ = harness.prefill(steps, harness.blank_state(steps), PROMPTS, [3, 1, 2], tables)
    steps.decode(jax.tree.map(jnp.copy, state), harness.decode_batch([3, 1, 2], tables))
    return steps, jax.tree.map(lambda x: np.array(x), state), jax.device_put(harness.decode_batch([3, 1, 2], tables))


def run(steps, state, batch, count: int):
    """tokens i32[count, B, G+1] of `count` steps."""
    out = []
    for _ in range(count):
        state, output = steps.decode(state, batch)
        out.append(output)
    return np.stack([np.asarray(o.tokens) for o in out]), state


def test_first_call_equals_second(ready):
    steps, state, batch = ready
    first, end = run(steps, jax.tree.map(jnp.asarray, state), batch, 3)
    second, again = run(steps, jax.tree.map(jnp.asarray, state), batch, 3)
    np.testing.assert_array_equal(first, second)
    for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_steady_state_moves_nothing_between_host_and_device(ready):
    """Steps n+1, n+2, ... are dispatched before any token is read; the donated state is gone."""
    steps, state, batch = ready
    state = jax.tree.map(jnp.asarray, state)
    before = jax.tree.leaves(state)
    with jax.transfer_guard("disallow"):
        for _ in range(4):
            state, out = steps.decode(state, batch)
    assert all(x.is_deleted() for x in before)
    assert (np.asarray(out.count) >= 1).all()
    assert (np.asarray(state.length)[[3, 1, 2]] >= np.array([9, 13, 4]) + 4).all()


def test_nothing_is_compiled_again(ready):
    """Other positions, tables, slots, validity and weights run in the same executables, and the weights do count."""
    steps, state, batch = ready
    fresh = lambda: jax.tree.map(jnp.asarray, state)
    tokens, later = run(steps, fresh(), batch, 4)
    compiled = steps._mtp._cache_size(), steps._prefill._cache_size()
    assert compiled[0] >= 1 and compiled[1] >= 1
    run(steps, later, jax.device_put(harness.decode_batch([1, -1, 3], tables_of(steps, shuffle=3, rest=-7))), 2)
    harness.prefill(steps, fresh(), [None, PROMPTS[0], None], [-1, 17, -1], tables_of(steps, shuffle=5))
    try:
        steps.reload(harness.params(NAME, 1))
        other, _ = run(steps, fresh(), batch, 4)
    finally:
        steps.reload(harness.params(NAME, 0))
    back, _ = run(steps, fresh(), batch, 4)
    assert (steps._mtp._cache_size(), steps._prefill._cache_size()) == compiled
    np.testing.assert_array_equal(back, tokens)
    assert (other != tokens).any()


def test_changed_inputs_equal_fresh_compiles(ready):
    """Two consecutive steps, the second with other slots, pages and padding: in one executable, and each in one that has
    run nothing before."""
    steps, state, batch = ready
    batches = batch, jax.device_put(harness.decode_batch([1, -1, 3], tables_of(steps, shuffle=3, rest=-7)))
    warm, cold = (jax.tree.map(jnp.array, state) for _ in range(2))
    for inputs in batches:
        warm, got = steps.decode(warm, inputs)
        fresh = compiled.__wrapped__(mtp_step, steps._treedef, net=steps.net, gamma=GAMMA)
        cold, want = fresh(steps.leaves, cold, inputs)
        for a, b in zip(jax.tree.leaves((warm, got)), jax.tree.leaves((cold, want)), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert np.asarray(got.count)[1] == 0 and (np.asarray(got.count)[[0, 2]] > 0).all()


def test_reload_refuses_other_shapes(ready):
    steps = ready[0]
    with pytest.raises(ValueError, match="same structure, shapes and dtypes"):
        steps.reload(harness.params("few_candidates"))
