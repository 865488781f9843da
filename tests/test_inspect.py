"""Inspect: the published totals, the cache bytes of the specification, per-rank weights, and what it says about options."""

import dataclasses

import jax
import pytest

from dsv41_jax.explain import explain_operators
from dsv41_jax.inspect import (
    DEVICES,
    cache_bytes,
    parameter_kinds,
    rank_weights,
    report,
)
from dsv41_jax.options import OPERATORS, DecodeOptions
from dsv41_jax.params import Transformer
from dsv41_jax.presets import FLASH, TINY
from dsv41_jax.safetensors_io import tensor_bytes
from dsv41_jax.tensors import released_tensors


@pytest.fixture(scope="module")
def flash():
    return report(FLASH, batch=64, context=32768, ranks=4)


def test_the_release_has_552_billion_backbone_and_197_billion_engram_parameters(flash):
    p = flash["parameters"]
    assert round(p["backbone"] / 1e9) == 552
    assert round(p["engram"] / 1e9) == 197
    assert p["engram"] == (384006168 + 384016682) * 256
    assert p["backbone"] + p["engram"] + p["draft"] == sum(row["parameters"] for row in p["by_kind"].values())


def test_every_tensor_belongs_to_one_kind():
    for config in (FLASH, TINY):
        total = sum(tensor_bytes(t.dtype, t.shape) for s in released_tensors(config).values() for t in s.tensors())
        assert sum(row["bytes"] for row in parameter_kinds(config).values()) == total


def test_kinds_of_the_release_by_hand():
    kinds = parameter_kinds(FLASH)
    assert kinds["routed experts"]["parameters"] == 40 * 384 * 3 * 5120 * 2304
    assert kinds["routed experts"]["bytes"] == 40 * 384 * 3 * 5120 * 2304 * 17 // 32  # 4 bits and a byte per 32
    assert kinds["shared experts"]["parameters"] == 40 * 3 * 5120 * 2304
    assert kinds["embedding and head"]["bytes"] == 2 * 2 * 129280 * 5120
    assert kinds["compressors"]["parameters"] == 4 * (512 * 5120 + 512) + 3 * 512 * 5120
    assert kinds["hyper-connections"]["parameters"] == 80 * (24 * 20480 + 24 + 3)


def test_a_context_token_costs_890_bytes_however_many_there_are():
    for batch, context in ((1, 128), (3, 1000), (64, 32768)):
        assert cache_bytes(FLASH, batch=batch, context=context)["per_context_token"] == 890
    # tiny: ratio 2 and ratio 1, global (64/2 + 64/16) and index (64/2 + 64/32) bytes an entry
    assert cache_bytes(TINY, batch=2, context=256)["per_context_token"] == (36 + 34) * 1.5


def test_request_bytes_are_rings_pending_rows_and_registers():
    cache = cache_bytes(FLASH, batch=8, context=1024)
    ring = 128 + 128  # window, and a chunk of the default span
    assert cache["window_rings_per_request"] == 43 * ring * 528
    assert cache["pending_rows_per_request"] == 3 * 8 * 2 * 512 * 4
    registers = 4 + 4 + 3 * 4 + 4
    assert cache["per_request"] == cache["window_rings_per_request"] + cache["pending_rows_per_request"] + registers
    assert cache["total"] == cache["paged"] + 8 * cache["per_request"]


def test_weights_of_a_rank():
    one, four = rank_weights(FLASH, 1), rank_weights(FLASH, 4)
    assert four["replicated"] == one["replicated"]
    assert four["routed experts"] * 4 == one["routed experts"]
    assert round(four["engram tables"] / 1e9, 1) == 50.7  # spec/serving.md
    assert round(four["routed experts"] / 1e9) == 74
    with pytest.raises(ValueError, match="divisor of n_routed_experts"):
        rank_weights(FLASH, 5)


def test_one_rank_has_the_whole_checkpoint_and_the_token_map():
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(Transformer(TINY)))
    stored = sum(row["bytes"] for row in parameter_kinds(TINY).values())
    assert held == sum(rank_weights(TINY, 1).values()) == stored + 4 * TINY.vocab_size


def test_what_fits_where(flash):
    assert set(flash["devices"]) == {"h200", "b200", "b300"}
    assert all(d["fits"] for d in flash["devices"].values())
    alone = report(FLASH, batch=64, context=32768, ranks=1)
    assert not any(d["fits"] for d in alone["devices"].values())
    total = sum(flash["rank_weights"].values()) + flash["cache"]["total"] + sum(flash["working"].values())
    assert flash["gpu_total"] == total
    assert flash["devices"]["b300"]["free"] == DEVICES["b300"] - total


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="context: expected at most 4096"):
        report(TINY, batch=1, context=4097, ranks=1)


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_103"])
@pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny"])
def test_every_operator_tells_what_it_uses(config, arch):
    told = explain_operators(config, DecodeOptions(), batch=4, context=2048, ranks=2, arch=arch)
    assert set(told) == set(OPERATORS)
    for operator, reasons in told.items():
        assert reasons["chosen"] not in {n for n in reasons if n != "chosen"}, operator
        assert all(reasons.values()), operator
        if arch == "cpu":
            assert reasons["chosen"] == "reference"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_every_operator_has_a_kernel_at_a_million_tokens(arch):
    """Whatever the batch: pools of one byte an element on either side of 2 GiB, of 4 and of 8, and between them."""
    pytest.importorskip("triton")
    for batch in (1, 2, 4, 8, 12, 14, 16, 28, 32, 48, 60, 64, 96, 120, 128):
        told = explain_operators(FLASH, DecodeOptions(), batch=batch, context=1 << 20, ranks=4, arch=arch)
        left = {operator: why for operator, why in told.items() if why["chosen"] == "reference"}
        if arch == "sm_90":  # minds the order of the weights, which `explain` cannot know
            assert "shuffle_weights" in left.pop("experts")["hopper"]
        assert not left, (batch, left)


def test_options_by_name_are_reported_as_such():
    options = DecodeOptions(default_implementation="reference", implementations=(("router", "auto"),))
    told = explain_operators(TINY, options, batch=1, context=128, arch="cpu")
    assert told["experts"] == {"chosen": "reference", "auto": "the options ask for this implementation by name"}
    assert "auto" not in told["router"]
    rows = {r["option"]: r["value"] for r in report(TINY, batch=1, context=128, ranks=1, options=options)["options"]}
    assert rows["default_implementation"] == "reference"
    assert {f.name for f in dataclasses.fields(DecodeOptions)} | set(OPERATORS) == set(rows)
