"""Where XLA puts the transfers of a sharded MoE layer, at released widths, compiled for GPUs that are not there."""

import re

import pytest
from deviceless import with_plugin

from bench import hlo_report
from bench.compile_report import ARCHES, TARGETS
from dsv41_jax.presets import FLASH
from sharding.exchange import AllToAllExchange, GatherExchange, RingExchange, row_bytes

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]


ROWS = 384  # of a rank


def compiled_layer(target: str, exchange) -> str:
    """Scheduled HLO of one MoE layer with ROWS rows a rank."""
    import jax
    import jax.numpy as jnp

    from bench.presets import cut_layers
    from dsv41_jax.expert_order import as_shuffled
    from dsv41_jax.moe import moe
    from dsv41_jax.options import DecodeOptions
    from dsv41_jax.params import flat_paths
    from dsv41_jax.precision import RELEASED
    from pallas_kernels import registry
    from sharding.mesh import compiling_for, topology_mesh
    from sharding.rules import batch_spec, global_parameters, parameter_spec

    ranks = exchange.ranks
    mesh = topology_mesh(TARGETS / f"{target}.textproto", ranks)
    params = global_parameters(cut_layers(FLASH, 3), mesh)
    held = flat_paths(params) if target != "h200" else as_shuffled(flat_paths(params))
    leaves = {path: leaf for path, leaf in held.items() if path.startswith("layers.0.ffn.")}
    treedef = jax.tree.structure(params.layers[0].ffn)

    def layer(x, leaves):
        return moe(x, jax.tree.unflatten(treedef, leaves), FLASH.num_experts_per_tok, exchange, FLASH, RELEASED,
                   DecodeOptions())  # fmt: skip

    specs = batch_spec(), [parameter_spec(path) for path in leaves]
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=batch_spec(), check_vma=False)
    x = jax.ShapeDtypeStruct((ROWS * ranks, FLASH.hidden_size), jnp.bfloat16,
                             sharding=jax.sharding.NamedSharding(mesh, batch_spec()))  # fmt: skip
    with compiling_for(mesh), registry.compiling_for(ARCHES[target]):
        options = dict(exchange.compiler_options)
        return jax.jit(mapped, compiler_options=options).lower(x, list(leaves.values())).compile().as_text()


def check_schedule(target: str, exchange) -> None:
    hlo, ranks, parts = compiled_layer(target, exchange), exchange.ranks, exchange.parts
    moved = hlo_report.transfers(hlo)
    products = lambda ops, scope: sum(op.opcode == "custom-call" and scope in op.scope for op in ops)
    there, back, sends = "all-gather", "all-to-all", 1
    if isinstance(exchange, RingExchange):
        there, back, sends = "collective-permute", "collective-permute", ranks - 1
    assert [kind for kind, _ in moved] == [there] * sends + [back] * (sends * parts)
    rows, early, last = moved[:sends], moved[sends:-sends], moved[-sends:]
    assert all(products(beside, "/shared_expert/") > 0 for _, beside in rows)
    assert [products(beside, "/jit(_experts)/") for _, beside in early] == [1] * (sends * (parts - 1))
    assert all(products(beside, "/shared_expert/") > 0 and products(beside, "/jit(_experts)/") == 0 for _, beside in last)
    # every part's product reads w2 where it lies: nothing makes an array as large as a part of it
    handles = ("parameter", "bitcast", "tuple", "get-tuple-element", "opt-barrier")
    made = [max(op.sizes, default=0) for _, op in hlo_report.walk(hlo) if op.opcode not in handles]
    part = FLASH.n_routed_experts // ranks * FLASH.hidden_size * FLASH.moe_intermediate_size // 2 // parts
    assert max(made) < part


@with_plugin
def test_parts_travel_beside_the_next_product_on_two_hopper():
    check_schedule("h200", GatherExchange(2, parts=2))


@with_plugin
def test_parts_travel_beside_the_next_product_on_four_blackwell():
    check_schedule("b300", GatherExchange(4, parts=4))


@with_plugin
def test_contributions_in_one_part_travel_beside_the_shared_expert():
    check_schedule("h200", GatherExchange(4))


@with_plugin
def test_every_permute_of_a_ring_travels_beside_a_product():
    check_schedule("h200", RingExchange(4, parts=2))


@with_plugin
def test_ragged_exchange_has_room_for_every_row_on_four_hopper():
    """Rows and contributions move by ragged-all-to-all, to and from buffers of ROWS rows for each of the ranks: all rows of
    all ranks may want experts of one rank. Contributions travel beside the shared expert, nothing is computed again."""
    exchange = AllToAllExchange(4, ragged=True)
    hlo, capacity = compiled_layer("h200", exchange), exchange.ranks * ROWS
    assert hlo_report.recomputed(hlo) == 0
    assert [kind for kind, _ in hlo_report.transfers(hlo)] == ["all-to-all", "ragged-all-to-all", "ragged-all-to-all"]
    arrays = {op.name: op.arrays for ops in hlo_report.computations(hlo)[1].values() for op in ops}
    moves = [op for _, op in hlo_report.walk(hlo) if op.opcode.removesuffix("-start") == "ragged-all-to-all"]
    rows = ("u8", capacity * row_bytes(FLASH.hidden_size, FLASH.num_experts_per_tok, "bfloat16"))
    contributions = ("f32", capacity * FLASH.hidden_size)
    for op, buffer in zip(moves, (rows, contributions), strict=True):
        operands = re.findall(r"%([\w.\-]+)", op.line.split(f" {op.opcode}(", 1)[1].split(")", 1)[0])
        sizes = [arrays[name][-1] for name in operands]
        assert op.arrays[-1] == buffer and sizes[:2] == [buffer] * 2  # the result, the operand, what the result starts as
        assert [n for _, n in sizes[2:]] == [exchange.ranks] * 4  # offsets and row counts by rank
    (_, beside) = hlo_report.transfers(hlo)[-1]
    assert any(op.opcode == "custom-call" and "/shared_expert/" in op.scope for op in beside)
