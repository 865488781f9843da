"""Where XLA puts the transfers of a sharded MoE layer, at released widths, compiled for GPUs that are not there."""

import pytest
from deviceless import with_plugin

from bench import hlo_report
from bench.compile_report import ARCHES, TARGETS
from dsv41_jax.presets import FLASH
from sharding.exchange import GatherExchange, RingExchange

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]


def compiled_layer(target: str, exchange) -> str:
    """Scheduled HLO of one MoE layer with 384 rows a rank."""
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
    x = jax.ShapeDtypeStruct((384 * ranks, FLASH.hidden_size), jnp.bfloat16,
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
