"""The compile report: reading scheduled HLO, sizes of the full preset on four GPUs, and one small deviceless compile."""

import json

import pytest
from deviceless import with_plugin

from bench import compile_report, hlo_report

pytestmark = pytest.mark.deviceless

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %g = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %mul = f32[8,4]{1,0} fusion(%g), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%g, %mul)
}

%short (a: f32[8,4]) -> f32[8,4] {
  ROOT %a = f32[8,4]{1,0} parameter(0)
}

%long (b: f32[8,4]) -> f32[8,4] {
  %b = f32[8,4]{1,0} parameter(0)
  ROOT %neg = f32[8,4]{1,0} fusion(%b), kind=kLoop, calls=%fused
}

ENTRY %main (x: u8[20,148], pool: u8[6,1024]) -> u8[80,148] {
  %x = u8[20,148]{1,0} parameter(0)
  %pool = u8[6,1024]{1,0} parameter(1)
  %gather = ((u8[20,148]{1,0}), u8[80,148]{1,0}) all-gather-start(%x), dimensions={0}, metadata={op_name="jit(f)/experts/all_gather"}
  %moved = u8[6,1024]{1,0} copy(%pool)
  %done = u8[80,148]{1,0} all-gather-done(%gather)
  %loop = (s32[], f32[8,4]{1,0}) while(%init), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"19"}}
  %pick = f32[8,4]{1,0} conditional(%flag, %y, %y), true_computation=%short, false_computation=%long
  %send = ((f32[4,20,128]{2,1,0}), f32[4,20,128]{2,1,0}) all-to-all-start(%z), dimensions={0}
  %back = f32[4,20,128]{2,1,0} all-to-all-done(%send)
  %scatter = f32[20,128]{1,0} reduce-scatter(%w), dimensions={0}, to_apply=%add
  %gemm = (bf16[8,8]{1,0}, s8[1024]{0}) custom-call(%x), custom_call_target="__cublas$lt$matmul"
  ROOT %out = u8[80,148]{1,0} bitcast(%done)
}
"""


def test_reads_a_schedule():
    rows = {r["kind"]: r for r in hlo_report.collectives(HLO, 4)}
    assert rows["all-gather"] == {"kind": "all-gather", "count": 1, "bytes_each": 60 * 148, "bytes": 60 * 148}
    assert rows["all-to-all"]["bytes"] == 3 * 20 * 128 * 4
    assert rows["reduce-scatter"]["bytes"] == 3 * 20 * 128 * 4
    launched = hlo_report.launches(HLO)
    # 19 turns of the loop and the longer branch
    assert launched == {"fusion": 20, "all-gather-start": 1, "copy": 1, "all-to-all-start": 1, "reduce-scatter": 1,
                        "custom-call __cublas$lt$matmul": 1}  # fmt: skip
    copies = hlo_report.pool_copies(HLO, {("u8", 6 * 1024)})
    assert len(copies) == 1 and "%moved" in copies[0]
    assert not hlo_report.pool_copies(HLO, {("f32", 6 * 1024), ("u8", 80 * 148)})
    assert hlo_report.overlapped(HLO) == {"asynchronous": 1, "exposed": 2}
    beside = [(kind, [op.name for op in ops]) for kind, ops in hlo_report.transfers(HLO)]
    assert beside == [("all-gather", ["moved"]), ("all-to-all", []), ("reduce-scatter", [])]


@with_plugin
def test_sizes_of_the_release_on_four_gpus():
    """Per GPU: experts about 74 GB, engram tables 50.7 GB, the rest replicated (spec/serving.md, "Engram")."""
    from dsv41_jax.cache import CacheGeometry
    from dsv41_jax.precision import RELEASED
    from dsv41_jax.presets import FLASH
    from sharding.mesh import topology_mesh
    from sharding.rules import abstract_state, global_parameters

    mesh = topology_mesh(compile_report.TARGETS / "b300.textproto", 4)
    weights = compile_report.weight_bytes(global_parameters(FLASH, mesh))
    experts = 40 * 96 * 3 * 5120 * 2304 * 17 // 32
    assert weights["routed experts"] == experts
    assert weights["draft routed experts"] == 3 * 32 * 3 * 5120 * 2304 * 17 // 32
    assert weights["engram tables"] == sum(-(-n // 4) for n in FLASH.engram_num_embeddings) * (256 + 8)
    assert abs(weights["engram tables"] / 1e9 - 50.7) < 0.05
    state = abstract_state(FLASH, CacheGeometry(64, 1 + 64 * 264, 128, 6), RELEASED, mesh)
    pools = compile_report.pool_bytes(state)
    pages = 1 + 64 * 264
    assert pools["global_kv"] == pages * 288 * (3 * 64 + 128) and pools["index"] == pages * 68 * (3 * 64 + 128)


@with_plugin
def test_defects_are_named():
    fine = {"memory_bytes": {"aliased": 10, "peak": 5, "card": 6}, "pools_bytes": {"total": 10}, "pool_copies": [],
            "recomputed": 0}  # fmt: skip
    assert compile_report.defects(fine) == []
    bad = {"memory_bytes": {"aliased": 9, "peak": 7, "card": 6}, "pools_bytes": {"total": 10}, "pool_copies": ["%moved"],
           "recomputed": 7}  # fmt: skip
    assert len(compile_report.defects(bad)) == 4
    with pytest.raises(SystemExit, match="expected one of"):
        compile_report.main(["--target", "b100"])
    with pytest.raises(SystemExit, match="divisor of n_routed_experts"):
        compile_report.main(["--preset", "tiny", "--ranks", "3"])


@pytest.mark.slow
@with_plugin
def test_compiles_the_release_for_four_gpus(tmp_path):
    """All 40 layers and 3 draft stages at released widths, with the target's kernels."""
    out = tmp_path / "report.json"
    compile_report.main(["--preset", "flash", "--target", "b300", "--ranks", "4", "--batch", "64", "--context", "32768",
                         "--out", str(out)])  # fmt: skip
    r = json.loads(out.read_text())
    counts = dict.fromkeys(("all-gather", "all-to-all"), 0)
    for row in r["collectives"]:
        counts[row["kind"]] += row["count"]
    # every layer and stage gathers and sends back; so do the two engram layers, whose gathers of row numbers XLA may put
    # into one with that of the layer before
    assert counts["all-to-all"] == 40 + 3 + 2 and 40 + 3 <= counts["all-gather"] <= 40 + 3 + 2 and len(counts) == 2
    assert r["collective_overlap"]["asynchronous"] >= 2 * (40 + 3)  # of every exchange, both ways beside other work
    assert r["pool_copies"] == [] and r["memory_bytes"]["aliased"] >= r["pools_bytes"]["total"]
