"""Index query: the definition against numpy, the kernel's bytes against the definition's, every code and tie, rows alone,
the product of QB read where it lies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import model_harness as harness
import numpy as np
import pytest

from dsv41_jax import attention, indexer
from dsv41_jax.cache import PageTables, entry_slots, init_state
from dsv41_jax.options import DecodeOptions
from dsv41_jax.plan import plan_step
from dsv41_jax.precision import RELEASED
from pallas_kernels import codecs
from pallas_kernels.index_query import api, explain, index_query, one_kernel, reference
from pallas_kernels.index_query.specs import BY_NAME, SPECS
from pallas_kernels.index_score.api import reads_packed
from pallas_kernels.select_tokens.reference import physical_slots
from tests import deviceless

TINY, VALUES = BY_NAME["tiny"], BY_NAME["tiny_values"]


def numpy_query(projected, product, cos, sin, *, heads, dim, form):
    """In float64 with the rounding points of spec/model.md: bf16 after the rotation, e2m1; bf16 before the scaling."""
    bf16 = lambda x: np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)
    q = np.asarray(projected, np.float64)[:, : heads * dim].reshape(-1, heads, dim).copy()
    turn = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    tail = q[..., -2 * turn.shape[1] :]
    pairs = (tail[..., 0::2] + 1j * tail[..., 1::2]) * turn[:, None]
    tail[...] = bf16(np.stack([pairs.real, pairs.imag], -1).reshape(tail.shape))
    weights = (bf16(product) * dim**-0.5 * heads**-0.5).astype(ml_dtypes.bfloat16)
    groups = q.reshape(*q.shape[:2], -1, 32)
    exponent = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), 6 * 2.0**-126) / 6))
    codes = (groups / 2.0 ** exponent[..., None]).astype(ml_dtypes.float4_e2m1fn)
    if form == "values":
        values = codes.astype(np.float64) * 2.0 ** exponent[..., None]
        return values.reshape(q.shape).astype(ml_dtypes.bfloat16), weights
    codes = codes.view(np.uint8).reshape(q.shape)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent + 127).astype(np.uint8)), weights


@functools.cache
def compiled(**static):
    return jax.jit(functools.partial(reference.index_query, **static))


def defined(inputs, spec):
    return jax.tree.map(np.asarray, compiled(**spec.options)(*inputs))


def interpreted(inputs, spec):
    return jax.tree.map(np.asarray, one_kernel.index_query(*inputs, **spec.options, interpret=True))


def assert_same_bytes(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g.view(np.uint8), w.view(np.uint8))


@pytest.mark.parametrize("run", [defined, interpreted], ids=["reference", "one_kernel"])
@pytest.mark.parametrize("spec", [TINY, VALUES], ids=lambda s: s.name)
def test_equals_numpy(run, spec):
    inputs = spec.make_inputs(3)
    got, want = run(inputs, spec), numpy_query(*inputs, **spec.options)
    # a fused multiply-add may move a value over a bf16 midpoint, and that over an e2m1 one
    differing = sum((g != w).sum() for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    assert differing <= 1
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("form", ["packed", "values"])
def test_kernel_has_the_bytes_of_the_definition(form):
    wide = dict(heads=32, dim=128, rotary=64, behind=64)
    for spec in (dataclasses.replace(TINY, form=form), dataclasses.replace(TINY, form=form, rows=3, **wide)):
        inputs = spec.make_inputs(1)
        for factor in (1.0, 2.0**100, 2.0**-119, 0.0):  # of the last but one, most groups are below the smallest scale
            projected, *rest = inputs
            scaled = (projected * jnp.bfloat16(factor), *rest)
            assert_same_bytes(interpreted(scaled, spec), defined(scaled, spec))


def test_every_code_and_tie():
    """All bf16 numbers from 2**-6 to 6 beside a 6, with both signs, and both zeros; not rotated."""
    values = np.arange(0x3C80, 0x40C1, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.resize(np.concatenate([values, -values, [0.0, -0.0]]), (-(-2 * len(values) // 31) + 1, 31))
    x = np.concatenate([x, np.full((len(x), 1), 6)], 1)
    spec = dataclasses.replace(TINY, rows=len(x), heads=1, dim=32, rotary=16, behind=0)
    _, product, cos, sin = spec.make_inputs(0)
    inputs = (jnp.asarray(x, jnp.bfloat16), product, jnp.ones_like(cos), jnp.zeros_like(sin))
    codes = x.astype(ml_dtypes.float4_e2m1fn)
    (payload, scales), _ = interpreted(inputs, spec)
    assert (scales == 127).all()
    # a rotation by 0 adds a zero of the other sign: signs of rotated zeros are those of the definition, not of x
    got = np.asarray(codecs.unpack_nibbles(payload))[:, 0]
    turned = np.arange(32) >= 16
    np.testing.assert_array_equal(got[:, ~turned], codes.view(np.uint8)[:, ~turned])
    assert_same_bytes((payload, scales), defined(inputs, spec)[0])
    values, _ = interpreted(inputs, dataclasses.replace(spec, form="values"))
    np.testing.assert_array_equal(values[:, 0].astype(np.float32), codes.astype(np.float32))
    assert_same_bytes(values, np.asarray(codecs.decode_index(payload, scales).astype(jnp.bfloat16)))


@pytest.mark.parametrize("run", [defined, interpreted], ids=["reference", "one_kernel"])
def test_rows_are_alone_and_columns_behind_are_not_read(run):
    inputs = TINY.make_inputs(5)
    clean = run(inputs, TINY)
    projected, *rest = inputs
    poisoned = projected.at[:, TINY.heads * TINY.dim :].set(jnp.nan).at[1].set(jnp.nan)
    product, cos, sin = (x.at[1].set(jnp.inf) for x in rest)
    others = np.array([0, 2, 3, 4])
    pick = lambda x: jax.tree.map(lambda y: y[others], x)
    assert_same_bytes(pick(run((poisoned, product, cos, sin), TINY)), pick(clean))
    alone = run(tuple(x[2:3] for x in inputs), dataclasses.replace(TINY, rows=1))
    assert_same_bytes(alone, jax.tree.map(lambda x: x[2:3], clean))


def test_exact_form_is_the_rotation_alone():
    projected, *rest = TINY.make_inputs(2)
    q, weights = index_query(projected.astype(jnp.float32), *rest, heads=4, dim=64, form="exact")
    assert q.dtype == weights.dtype == jnp.float32
    x = np.asarray(projected, np.float64)[:, :256].reshape(5, 4, 64)
    np.testing.assert_array_equal(q[..., :48], x[..., :48])
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(weights, np.asarray(rest[0]) / 16, rtol=1e-6)


# --------------------------------------------------------------------------------------------------------- the model


def test_the_model_selects_and_attends_the_same_with_the_kernel(monkeypatch):
    """A FULL1 layer of a real step: outputs and selection, the definition's queries packed and the kernel's decoded."""
    c, params = harness.config("all_kinds"), harness.params("all_kinds")
    tables = harness.page_tables([3, 2, 3], c, shuffle=1)
    chunk = harness.chunk_of(np.ones((3, 6)), [20, 30, 0], [6, 6, 4], [2, -1, 4], tables)
    state = init_state(c, harness.GEOMETRY, RELEASED)
    layer = next(s for s in c.layers if s.publishes_candidates)
    u = jnp.asarray(np.random.default_rng(0).standard_normal((18, c.hidden_size)), jnp.bfloat16)

    def attend(options):
        pools = attention.Pools(list(state.window), dict(state.global_kv), dict(state.index), dict(state.pending))
        carry, plan = attention.Carry(), plan_step(c, harness.GEOMETRY, state, chunk)
        out = attention.attention(u, params.layers[layer.index].attn, layer, pools, carry, plan, c, RELEASED, options)
        return out, carry.selection

    kernel, rest = api.IMPLEMENTATIONS
    run = functools.partial(one_kernel.index_query, interpret=True)
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (dataclasses.replace(kernel, run=run), rest))

    def traced(packed, options):
        monkeypatch.setattr(indexer, "reads_packed", lambda *a, **k: packed)
        return jax.jit(lambda: attend(options)).lower()

    named = DecodeOptions(implementations=(("index_query", "one_kernel"),))
    want = traced(True, DecodeOptions()).compile()()
    assert (np.asarray(want[1].indices) >= 0).any() and np.asarray(want[0]).astype(np.float32).any()
    lowered = traced(False, named)
    assert "/index_query" in lowered.as_text(debug_info=True)
    for g, w in zip(jax.tree.leaves(lowered.compile()()), jax.tree.leaves(want), strict=True):
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


def test_selections_find_no_slot_on_pages_outside_the_pool():
    """The step's slot map against the rule that the stores follow, with ids that would wrap round to a live page."""
    c, pages = harness.config("all_kinds"), harness.GEOMETRY.pages
    table = np.array([[3, 0, -7, 5, pages - 1], [pages, 2**31 - 1, 2**28 + 1, -(2**31), 4]], np.int32)
    chunk = harness.chunk_of(np.ones((2, 3)), [20, 30], [3, 3], [0, 1], PageTables.shared(jnp.asarray(table), c))
    plan = plan_step(c, harness.GEOMETRY, init_state(c, harness.GEOMETRY, RELEASED), chunk)
    for ratio, of in plan.ratios.items():
        per_page = harness.GEOMETRY.page_tokens // ratio
        entries = np.tile(np.arange(-2, 6 * per_page, dtype=np.int32), (2, 1))
        want = np.repeat(entry_slots(table, entries, per_page, pages), 3, axis=0)
        got = np.asarray(physical_slots(jnp.asarray(np.repeat(entries, 3, axis=0)), of.slot_map))
        np.testing.assert_array_equal(got, want)
        assert (got >= 0).sum() == 3 * 4 * per_page


def test_queries_come_packed_where_the_scorer_multiplies_them_so():
    shape = jax.ShapeDtypeStruct
    weights, pool, table = shape((12, 32), jnp.bfloat16), shape((9, 128 * 68), jnp.uint8), shape((2, 4), jnp.int32)
    for blocks in (0, 16):
        ask = functools.partial(reads_packed, index_pool=pool, table=table, dim=128, blocks=blocks)
        assert [ask(weights, arch=a) for a in ("sm_90", "sm_100", "sm_103", "cpu")] == [False, True, True, False]
        assert not ask(shape((12, 32), jnp.float32), arch="sm_100") and not ask(weights, arch="sm_100", impl="reference")


# -------------------------------------------------------------------------------------------------- choice and errors


def test_auto_takes_the_kernel_where_there_is_a_gpu():
    inputs = TINY.make_inputs(0)
    for arch in one_kernel.ARCHES:
        assert explain(*inputs, **TINY.options, arch=arch)["chosen"] == "one_kernel"
    told = explain(*inputs, **TINY.options, arch="cpu")
    assert told["chosen"] == "reference" and "is for sm_90" in told["one_kernel"]


def test_refusals_name_the_reason():
    inputs = TINY.make_inputs(0)
    call = lambda *inputs, **static: index_query(*inputs, **TINY.options | static, impl="one_kernel")
    with pytest.raises(ValueError, match="float32"):
        call(inputs[0].astype(jnp.float32), *inputs[1:])
    with pytest.raises(ValueError, match="rounds them to MXFP4"):
        call(*inputs, form="exact")
    with pytest.raises(ValueError, match="3 heads of 64 channels"):
        call(inputs[0], inputs[1][:, :3], *inputs[2:], heads=3)
    channels = TINY.heads * TINY.dim
    huge = jax.ShapeDtypeStruct((2**33 // channels, channels), jnp.bfloat16)  # of 4 GiB of codes
    options = TINY.options | {"form": "packed"}
    assert "2147483648" in one_kernel.refuses(huge, *inputs[1:], **options)
    assert one_kernel.refuses(huge, *inputs[1:], **options | {"form": "values"}) is None


def test_errors_name_the_shapes():
    projected, product, cos, sin = TINY.make_inputs(0)
    call = lambda *inputs, **static: index_query(*inputs, **TINY.options | static)
    with pytest.raises(ValueError, match=r"\[T, 512 or more\]"):
        call(projected, product, cos, sin, heads=8)
    with pytest.raises(ValueError, match=r"product f32\[5, 4\]"):
        call(projected, product.astype(jnp.bfloat16), cos, sin)
    with pytest.raises(ValueError, match="cos and sin"):
        call(projected, product, cos[:, :-1], sin)
    with pytest.raises(ValueError, match="form one of"):
        call(projected, product, cos, sin, form="fp4")


def consumers_case(name: str):
    """The readers of QB's product, the index query in both forms and the attention of an architecture ("sm_90", ...), at
    released widths, for a compile without a GPU."""
    from pallas_kernels.registry import compiling_for
    from pallas_kernels.sparse_attention import specs
    from pallas_kernels.sparse_attention.api import sparse_attention

    spec, query = dataclasses.replace(specs.M384, batch=2, context=300), BY_NAME["verify"]
    inputs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in spec.make_inputs(0).items()}
    q, first = inputs.pop("q"), query.heads * query.dim
    qb = jax.ShapeDtypeStruct((*q.shape[:2], first + spec.heads * spec.dim), q.dtype)

    def read(qb, product, inputs):
        rows = qb.reshape(spec.rows, -1), product, *(inputs[k].reshape(spec.rows, -1) for k in ("cos", "sin"))
        queries = [index_query(*rows, **query.options | {"form": f}, impl="one_kernel") for f in ("packed", "values")]
        with compiling_for(name):
            return queries, sparse_attention(q=qb, **inputs, **spec.options, rotate_query=True, first=first)

    return read, (qb, jax.ShapeDtypeStruct((spec.rows, query.heads), jnp.float32), inputs)


@pytest.mark.deviceless
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_compiles_without_spills_and_nobody_copies_the_product(target):
    every = deviceless.compile_for(target, "tests.test_index_query:consumers_case", target.removesuffix("a"))
    assert len(every.kernels) == 3 and not any(f" {op}(" in every.hlo for op in ("copy", "fusion", "slice"))
    kernel = every.matching("index_query")
    assert len(kernel.kernels) == 2 and kernel.spill_bytes == 0 and kernel.registers <= 64
    assert kernel.ptx.count("griddepcontrol.wait") == 2
    # 16 channels a thread: queries, angles; values, payload
    assert kernel.ptx.count("ld.global.v4.b32") == 8 and kernel.ptx.count("st.global.v4.b32") == 2
    assert kernel.ptx.count("st.global.v2.b32") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_kernel_equals_definition_on_the_gpu(spec):
    inputs = spec.make_inputs(5)
    got, want = index_query(*inputs, **spec.options, impl="one_kernel"), defined(inputs, spec)
    np.testing.assert_array_equal(np.asarray(got[1]), want[1])
    for g, w in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        # products and sums of the rotation may be fused there: a bf16 rounding, and with it a code, may go the other way
        assert (np.asarray(g) != w).mean() < 2e-3
    alone = index_query(*(x[2:3] for x in inputs), **spec.options, impl="one_kernel")
    assert_same_bytes(jax.tree.map(np.asarray, alone), jax.tree.map(lambda x: np.asarray(x[2:3]), got))
