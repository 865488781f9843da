"""The decode benchmark: its protocol's arithmetic, its workloads, its floors, its checks, and one run on the CPU."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bench import checks, decode, floors, presets, synthetic
from bench.common import Peaks
from bench.hlo_report import pool_copies
from dsv41_jax.cache import CacheGeometry
from dsv41_jax.engram import engram_constants
from dsv41_jax.params import flat_paths
from dsv41_jax.presets import FLASH, TINY

SPEC_PEAKS = Peaks(4200, 790, 1500)  # the H200 column of spec/performance.md


def test_token_time_leaves_the_first_step_out():
    r = decode.Round(done=[5.0, 5.02, 5.04, 5.06], dispatch=[0.0] * 4, outputs=[])
    assert r.token_ms(6) == pytest.approx(60 / 18)


def test_floor_of_a_full_size_rank_is_the_specifications():
    w = presets.workload("flash-rank")
    rows = {r.op: r for r in floors.step_rows(w, 5)}
    total = floors.step_floor(w, 5, SPEC_PEAKS)
    assert total["ms"] == pytest.approx(26.2, rel=0.03)
    assert total["gbytes"] == pytest.approx(98.8, rel=0.03)
    for op, us in (("wq_a + wkv", 4.7), ("wq_b", 21.5), ("wo_a", 17), ("wo_b", 21.5), ("attention, window + selected", 41),
                   ("dense score FULL2", 34), ("dense score FULL1", 69), ("sparse score", 37), ("mHC site", 12),
                   ("routed experts", 445), ("shared expert", 18), ("engram", 80), ("lm_head", 644)):  # fmt: skip
        assert rows[op].us(SPEC_PEAKS) == pytest.approx(us, rel=0.04), op


def test_floor_scales_with_the_layers_and_without_a_drafter():
    whole, cut = presets.workload("flash-rank"), presets.workload("flash-rank", layers=6)
    count = lambda w, gamma, op: sum(r.count for r in floors.step_rows(w, gamma) if r.op == op)
    assert (count(whole, 5, "wq_b"), count(cut, 5, "wq_b"), count(cut, 0, "draft wq_b")) == (40, 6, 0)
    assert count(whole, 5, "sparse score") == 4 and count(whole, 5, "mHC site") == 80


def test_flash_rank_is_the_release_but_for_experts_and_engram_rows():
    c = presets.workload("flash-rank").config
    other = {f.name for f in dataclasses.fields(c) if getattr(c, f.name) != getattr(FLASH, f.name)}
    assert other == {"n_routed_experts", "dspark_n_routed_experts", "engram_vocab_size", "engram_num_embeddings"}
    assert (c.n_routed_experts, c.dspark_n_routed_experts) == (96, 32)
    assert tuple(k.rows for k in engram_constants(c)) == c.engram_num_embeddings


@pytest.mark.parametrize("layers", [4, 6, 13, 40])
def test_cut_keeps_the_layer_classes(layers):
    w = presets.workload("flash-rank", layers=layers)
    kinds = [s.kind for s in w.config.layers]
    assert len(kinds) == layers and {"SWA", "FULL2", "FULL1", "REINDEX"} <= set(kinds)
    assert layers < 6 or "REUSE" in kinds
    assert (layers == 40) == (not any("cut to" in n and "layers" in n for n in w.notes))
    assert any(s.restricted for s in w.config.layers) and any(s.publishes_candidates for s in w.config.layers)


def test_workload_errors_name_the_field():
    for kwargs, word in (({"preset": "flsh"}, "preset"), ({"preset": "tiny", "layers": 2}, "layers"),
                         ({"preset": "tiny", "context": 1 << 20}, "context"),
                         ({"preset": "tiny", "capacity": 100}, "capacity"),
                         ({"preset": "tiny", "capacity": 1 << 20}, "capacity")):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            presets.workload(**kwargs)


def test_capacity_widens_the_page_tables_alone():
    w, wide = presets.workload("flash-rank"), presets.workload("flash-rank", capacity=1 << 20)
    assert (w.capacity, wide.capacity, wide.context) == (33792, 1 << 20, w.context)
    assert floors.step_floor(wide, 5, SPEC_PEAKS) == floors.step_floor(w, 5, SPEC_PEAKS)


def test_random_parameters_fill_every_leaf_in_its_format():
    c = presets.workload("tiny").config
    leaves = flat_paths(synthetic.random_parameters(c))
    for path, leaf in leaves.items():
        x = np.asarray(leaf)
        assert np.isfinite(x.astype(np.float32)).all(), path
        assert x.size < 8 or len(np.unique(x.reshape(-1)[:4096])) > 1, path
    assert np.asarray(leaves["token_map"]).max() < c.engram_compressed_vocab_size
    other = flat_paths(synthetic.random_parameters(c, seed=1))
    assert not np.array_equal(np.asarray(leaves["head"]), np.asarray(other["head"]))


def test_random_matrices_have_unit_gain():
    from dsv41_jax.params import Transformer
    from pallas_kernels import codecs

    leaves = flat_paths(synthetic.random_parameters(TINY))
    wo_b = leaves["layers.0.attn.wo_b.weight"], leaves["layers.0.attn.wo_b.scale"]
    w13 = leaves["layers.0.ffn.experts.w13"], leaves["layers.0.ffn.experts.s13"]
    assert jax.tree.structure(Transformer(TINY)).num_leaves == len(leaves)
    for matrix in (codecs.dequantize_weight_fp8(*wo_b), codecs.dequantize_weight_mxfp4(*w13)):
        gain = float(np.std(np.asarray(matrix, np.float32))) * matrix.shape[-1] ** 0.5
        assert 0.5 < gain < 2.5


def test_random_state_holds_valid_records():
    from pallas_kernels import codecs

    g = CacheGeometry(2, 9, 16, span=6)
    state = synthetic.random_state(TINY, g, 48)
    assert np.all(np.asarray(state.length) == 48) and np.asarray(state.anchor).max() < TINY.vocab_size
    for pool, decode_record in ((state.window[0], codecs.decode_window), (state.global_kv[4], codecs.decode_global)):
        values = np.asarray(decode_record(pool, TINY.head_dim))
        assert np.isfinite(values).all() and 0.1 < values.std() < 10
    table = synthetic.permuted_table(2, 4)
    assert sorted(table.reshape(-1)) == list(range(1, 9))


def test_pool_copies_are_found():
    pool = jax.numpy.zeros((300, 40), jax.numpy.uint8)
    compiled = jax.jit(lambda p: p.at[3].set(1)).lower(pool).compile()  # not donated: the result is a copy
    in_place = jax.jit(lambda p: p.at[3].set(1), donate_argnums=0).lower(pool).compile()
    assert pool_copies(compiled.as_text(), {("u8", pool.size)})
    assert not pool_copies(in_place.as_text(), {("u8", pool.size)})


def test_wrong_outputs_stop_the_run():
    good = dataclasses.make_dataclass("Out", ["finite", "count"])
    ok = good(np.array([True, True]), np.array([6, 6]))
    checks.outputs([decode.Round([], [], [ok])], 2, 5)
    for bad, word in ((good(np.array([True, False]), ok.count), "finite"), (good(ok.finite, np.array([6, 2])), "forced")):
        with pytest.raises(SystemExit, match=word):
            checks.outputs([decode.Round([], [], [bad])], 2, 5)


class _Steps:
    """`decode` adds one to the state, and does with it what `extra` says."""

    def __init__(self, extra=lambda state: None):
        self.extra, self.add = extra, jax.jit(lambda state, one: (state + one, state * one))

    def decode(self, state, one):
        self.extra(state)
        return self.add(state, one)


def test_a_round_that_sends_from_the_host_raises():
    # On a CPU the guard says nothing of arrays that the host reads: only what is sent can be shown here.
    state, one = jax.device_put((np.ones(3, np.float32), np.ones(3, np.float32)))
    assert len(decode.run_round(_Steps(), state, one, 2)[1].outputs) == 2
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        decode.run_round(_Steps(lambda s: s + np.ones(3, np.float32)), state, one, 2)


def test_a_compilation_after_warm_up_stops_the_run(monkeypatch):
    monkeypatch.setattr(checks, "outputs", lambda *a: None)
    watch, state = decode.CompileWatch(), jax.device_put(np.ones(3, np.float32))

    def bench(extra):
        b = dataclasses.make_dataclass("Bench", ["args", "workload", "ranks", "round"])
        steps = _Steps(extra)
        args = decode.parse(["--steps", "2", "--warmup", "1", "--rounds", "1"])
        return b(args, presets.workload("tiny"), 1, lambda n: decode.run_round(steps, state, state, n)[1])

    assert len(decode.measure(bench(lambda s: None), watch)) == 1
    calls = []

    def recompiles(s):
        calls.append(s)
        if len(calls) > 2:  # after the warm-up round's two steps
            jax.jit(lambda x: x * len(calls))(s)

    with pytest.raises(SystemExit, match="2 compilations after warm-up, expected none"):
        decode.measure(bench(recompiles), watch)


@pytest.mark.slow
def test_tiny_runs_and_writes_its_result(tmp_path):
    out = tmp_path / "folder" / "tiny.json"
    flags = ["--preset", "tiny", "--layers", "4", "--steps", "3", "--warmup", "1", "--rounds", "2", "--out", str(out)]
    decode.main(flags)
    got = json.loads(out.read_text())
    r, p = got["result"], got["protocol"]
    assert r["step_ms"] > 0 and r["ratio"] == pytest.approx(r["step_ms"] / r["floor_ms"], rel=1e-2)
    assert r["tps_aggregate"] == pytest.approx(2 * 6e3 / r["step_ms"], rel=1e-2)
    assert len(r["rounds_step_ms"]) == 2 and p["acceptance"] == "forced" and p["tokens_per_round"] == 18
    assert set(p["implementations"]) >= {"experts", "sparse_attention"} and p["notes"]
    assert {"device", "versions", "commit", "seed", "utc"} <= set(got["environment"])
    assert sum(row["count"] * row["us"] for row in r["floor"]["rows"]) / 1e3 == pytest.approx(r["floor_ms"], rel=1e-2)
