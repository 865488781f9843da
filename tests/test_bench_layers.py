"""Attribution of a trace to the parts of a step."""

import gzip
import json

import pytest

from bench import layers
from bench.layers import Event

NAME = "jit(bound)/layer"
SCOPES = {
    "a": f"{NAME}0_SWA/qb/dot_general",
    "b": f"{NAME}1_REUSE/sparse_attention/pallas_call",
    "c": f"{NAME}2_REUSE/sparse_attention/pallas_call",
    "d": f"{NAME}1_REUSE/experts/while/body/dot_general",
    "e": "jit(bound)/draft_propose/draft_stage2/experts/while/body/dot_general",
    "f": "jit(bound)/lm_head/dot_general",
    "g": "jit(bound)/draft_propose/lm_head/dot_general",
    "h": "",
    "i": f"{NAME}1_REUSE/experts/shared_expert/dot_general",
    "j": "jit(bound)/draft_propose/draft_stage2/experts/shared_expert/dot_general",
}


def events(*rows):
    return [Event(op, op, start, duration) for op, start, duration in rows]


@pytest.mark.parametrize(
    ("op", "part"),
    [("a", "attention: qb"), ("b", "attention: sparse_attention"), ("d", "experts"), ("e", "draft experts"),
     ("f", "lm_head"), ("g", "draft lm_head"), ("h", "unattributed"), ("i", "shared expert"),
     ("j", "draft, the rest")],
)  # fmt: skip
def test_scopes_belong_to_parts(op, part):
    assert layers.part_of(SCOPES[op]) == part


def test_parts_add_up_to_the_busy_time():
    trace = events(("a", 0, 1000), ("b", 1500, 2000), ("d", 3500, 4000), ("h", 9000, 1000))
    got = layers.attribute(trace, SCOPES, steps=1)
    assert got["traced_step_us"] == 10 and got["busy_us"] == 8
    assert sum(got["parts_us"].values()) == pytest.approx(8)
    assert got["parts_us"]["experts"] == 4


def test_overlapping_kernels_count_once():
    trace = events(("a", 0, 1000), ("f", 0, 1000), ("d", 1000, 2000))
    got = layers.attribute(trace, SCOPES, steps=1)
    assert got["busy_us"] == 3
    assert sum(got["parts_us"].values()) == pytest.approx(3, abs=0.02)


def test_attention_is_a_mean_over_the_layers_of_a_class():
    trace = events(("a", 0, 1000), ("b", 1000, 2000), ("c", 3000, 4000), ("d", 7000, 500))
    got = layers.attribute(trace, SCOPES, steps=1)["attention"]
    assert got["classes"]["REUSE"] == {"layers": 2, "us": 3.0, "reference_b300_us": 128.06}
    assert got["classes"]["SWA"]["us"] == 1.0
    assert got["mean_us"] == pytest.approx(7 / 3, abs=0.01)


def test_kernels_of_one_name_are_one_row():
    rows = [("a", "gemm_fusion_3", 0, 1000), ("a", "gemm_fusion_12_1", 1000, 3000), ("b", "hyper_leave", 4000, 500)]
    trace = [Event(*row) for row in rows]
    assert layers.by_kernel(trace, 2) == {"gemm_fusion": {"count": 1.0, "us": 2.0}, "hyper_leave": {"count": 0.5, "us": 0.25}}
    of_parts = layers.attribute(trace, SCOPES, steps=1)["by_kernel"]
    assert of_parts["attention: qb"]["gemm_fusion"] == {"count": 2.0, "us": 4.0} and "hyper_leave" not in of_parts["attention: qb"]


def test_collectives_are_exposed_where_nothing_else_runs():
    rows = [("a", "gemm", 0, 1000), ("d", "ncclDevKernel_AllGather_RING_LL(x)", 500, 1000), ("d", "gemm", 1200, 200),
            ("d", "ncclDevKernel_SendRecv(y)", 3000, 400)]  # fmt: skip
    got = layers.attribute([Event(*row) for row in rows], SCOPES, steps=2)["exchange"]
    assert (got["count"], got["us"], got["hidden_us"], got["exposed_us"]) == (1.0, 0.7, 0.35, 0.35)
    assert got["kernels"]["ncclDevKernel_SendRecv"] == {"count": 0.5, "us": 0.2, "hidden_us": 0.0, "exposed_us": 0.2}
    assert got["waited_us"] == 0  # the second kernel begins before the gather ends, none follows the last transfer
    assert layers.attribute(events(("a", 0, 10)), SCOPES, steps=1)["exchange"] is None


def test_the_wait_for_a_copy_is_its_whole_gap():
    rows = [("a", "gemm", 0, 1000), ("d", "MemcpyP2P", 1500, 200), ("a", "gemm", 2000, 100), ("d", "MemcpyP2P", 2020, 50),
            ("a", "gemm", 2150, 50)]  # fmt: skip
    got = layers.attribute([Event(*row) for row in rows], SCOPES, steps=1)["exchange"]
    assert (got["count"], got["exposed_us"], got["waited_us"]) == (2.0, 0.2, 1.0)


def test_a_wait_for_a_late_rank_is_not_the_transfers():
    early = [("a", "gemm", 0, 1000), ("d", "ncclDevKernel_SendRecv(y)", 1000, 5000), ("a", "gemm", 6000, 100)]
    late = [("a", "gemm", 0, 5000), ("d", "ncclDevKernel_SendRecv(y)", 5000, 1000), ("a", "gemm", 6000, 100)]
    got = layers.waits_of_gpus([[Event(*row) for row in rows] for rows in (early, late)], steps=1)
    assert got == {"waited_us_by_gpu": [5.0, 1.0], "waited_by_all_us": 1.0}


def test_reads_the_perfetto_file(tmp_path):
    name = lambda pid, what: {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": what}}
    kernel = lambda pid, ts, module: {"ph": "X", "pid": pid, "ts": ts, "dur": 2.0, "name": "k",
                                      "args": {"hlo_module": module, "hlo_op": "a"}}  # fmt: skip
    rows = [name(1, "/device:GPU:0"), name(2, "/device:GPU:1"), kernel(1, 5.0, "jit_bound"), kernel(1, 3.0, "jit_bound"),
            kernel(2, 1.0, "jit_bound"), kernel(1, 1.0, "jit_other")]  # fmt: skip
    (tmp_path / "vm.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": rows}).encode()))
    assert layers.read_trace(tmp_path) == [Event("a", "k", 3000.0, 2000.0), Event("a", "k", 5000.0, 2000.0)]
    assert layers.read_trace(tmp_path, gpu=1) == [Event("a", "k", 1000.0, 2000.0)]


def test_missing_trace_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="xplane"):
        layers.read_trace(tmp_path)
