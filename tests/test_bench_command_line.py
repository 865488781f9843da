"""What the benches refuse before they measure anything, and that a result file is whole or not there."""

import argparse
import json
import re
import shutil

import pytest
from jax.experimental import topologies

from bench import (
    campaign,
    command_line,
    common,
    compile_report,
    decode,
    exchange,
    experts,
    layers,
    operators,
    options,
    ranks_check,
    report,
    sweep,
    synthetic,
)
from sharding.mesh import topology_mesh


@pytest.mark.parametrize(
    ("parse", "argv", "why"),
    [
        (decode.parse, ["--steps", "1"], "--steps: expected an integer >= 2, got '1'"),  # nothing left beside the first
        (decode.parse, ["--rounds", "0"], "--rounds: expected an integer >= 1, got '0'"),
        (decode.parse, ["--context", "0"], "--context: expected an integer >= 1, got '0'"),
        (decode.parse, ["--batch", "-2"], "--batch: expected an integer >= 1, got '-2'"),
        (decode.parse, ["--ranks", "0"], "--ranks: expected an integer >= 1, got '0'"),
        (decode.parse, ["--gamma", "6"], "--gamma: expected an integer in 0..5, got '6'"),
        (decode.parse, ["--gamma", "x"], "--gamma: expected an integer in 0..5, got 'x'"),
        (sweep.main, ["--batches", "1,0"], "--batches: expected an integer >= 1, got '0'"),
        (exchange.parse, ["--rows", "0"], "--rows: expected an integer >= 1, got '0'"),
        (ranks_check.parse, ["--steps", "-1"], "--steps: expected an integer >= 1, got '-1'"),
        (layers.main, ["--steps", "0"], "--steps: expected an integer >= 1, got '0'"),
        (campaign.main, ["--minutes", "-1"], "--minutes: expected a positive number, got '-1'"),
        (campaign.main, ["--minutes", "nan"], "--minutes: expected a positive number, got 'nan'"),
        (experts.main, ["--variants", "n32_g4,n7"], "expected variants and parts among default, n32_g4, n24_g4, n32_g3_4, n24_g6_5, got 'n7'"),
        (experts.main, ["--parts", "default"], "--parts: expected variants with a tile width, got default"),
        (operators.main, ["router", "--spec", "verify", "--min-rows", "9999"], "no spec of router has at least 9999 rows"),
        (operators.main, ["router", "--out", "bench"], "--out: expected a file, got the folder 'bench'"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(capsys, parse, argv, why):
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("flag, bad", [("out", (".", "file/x.json")), ("profile", ("file", "file/trace"))])
def test_what_cannot_be_written_is_refused_before_the_run(tmp_path, capsys, flag, bad):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / name for name in bad):
        with pytest.raises(SystemExit) as end:
            decode.parse([f"--{flag}", str(path)])
        assert end.value.code == 2
        assert str(path) in capsys.readouterr().err
    new = str(tmp_path / "new" / "x")
    assert getattr(decode.parse([f"--{flag}", new]), flag) == new
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # asking left nothing behind


@pytest.mark.parametrize(
    ("main", "argv", "why"),
    [
        (decode.main, ["--preset", "nope"], "preset: expected one of"),
        (decode.main, ["--layers", "99"], "layers: expected 3..8, got 99"),
        (decode.main, ["--impl", "experts=nope"], "impl: experts: expected one of auto, hopper, blackwell, reference, got 'nope'"),
        (decode.main, ["--impl", "experts=hopper"], "impl: experts: hopper is for sm_90, this device is cpu"),
        (decode.main, ["--exchange", "ring"], "--exchange ring: expected --ranks beside it"),
        (decode.main, ["--ranks", "1", "--exchange-parts", "7"], "expected parts that divide the hidden size 128, got 7 of 'gather'"),
        (decode.main, ["--ranks", "999"], "expected at least 999 devices for 999 ranks"),
        (sweep.main, ["--contexts", "", "--batches", "", "--capacities", ""], "sweep: expected a point on one of"),
        (sweep.main, ["--impl", "nope"], "impl: expected auto or reference"),
        (options.main, ["--only", "nope"], "unknown names ['nope']"),
        (options.main, ["--skip", "experts=nope"], "unknown names ['experts=nope']"),
        (ranks_check.main, ["--ranks", "1", "--exchanges", "gather,gather/7"], "hidden size 128, got 7 of 'gather/7'"),
        (ranks_check.main, ["--ranks", "1", "--exchanges", "gather/x"], "a number of parts behind the slash, got 'gather/x'"),
        (exchange.main, ["--ranks", "5"], "ranks: expected a divisor of --experts 384, got 5"),
        (exchange.main, ["--experts", "8", "--top", "5"], "top: expected at most the 4 experts of one rank, got 5"),
        (exchange.main, ["--hidden", "33"], "hidden: expected a multiple of 32, got 33"),
        (exchange.main, ["--exchanges", "gather,ragged"], "exchange: ragged expected GPUs, the default backend is cpu"),
        (ranks_check.main, ["--ranks", "1", "--exchanges", "ragged/2"], "exchange: ragged/2 expected GPUs, the default backend is cpu"),
        (exchange.main, ["--exchanges", "gather,"], "exchange: expected one of gather"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_is_made(monkeypatch, main, argv, why):
    def made(*_, **__):
        raise AssertionError("something was measured or made first")

    monkeypatch.setattr(common, "measure_peaks", made)
    monkeypatch.setattr(synthetic, "random_parameters", made)
    monkeypatch.setattr(exchange, "exchange_outputs", made)
    with pytest.raises(ValueError, match=re.escape(why)):
        main(argv)


def test_a_compile_report_refuses_what_does_not_fit_before_it_asks_for_a_compiler(monkeypatch):
    network = lambda *argv: compile_report.network(compile_report.parse(argv))
    for argv, why in (
        (("--preset", "nope"), "preset: expected one of"),
        (("--ranks", "5"), "divisor of n_routed_experts = 384, got 5"),
        (("--layers", "41"), "layers: expected 3..40, got 41"),
        (("--exchange-parts", "7"), "hidden size 5120, got 7"),
    ):
        with pytest.raises(ValueError, match=why):
            network(*argv)
    assert network("--layers", "6").num_hidden_layers == 6

    def absent(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", absent)
    with pytest.raises(ValueError, match="expected the CUDA plugin"):
        topology_mesh(compile_report.TARGETS / "b300.textproto", 4)


@pytest.mark.parametrize("name", ["host.xplane.pb", "host.trace.json.gz"])
def test_layers_names_the_trace_that_it_cannot_read(tmp_path, name):
    (tmp_path / name).write_text("not a trace")
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / name))}: expected a "):
        layers.read_trace(tmp_path)


def test_a_report_that_its_readme_cannot_link_to_is_not_written(tmp_path):
    folder, readme = tmp_path / "results", tmp_path / "docs" / "README.md"
    for place in (folder, readme.parent):
        place.mkdir()
    shutil.copy(report.FOLDER / "decode_flash_rank_h200.json", folder)
    readme.write_text("\n".join(report.MARKS))
    with pytest.raises(SystemExit, match="subpath"):
        report.main(["--results", str(folder), "--readme", str(readme)])
    assert [p.name for p in folder.iterdir()] == ["decode_flash_rank_h200.json"]


@pytest.mark.parametrize("impl", ["refrence", "auto,reference", ""])
def test_an_unknown_word_of_impl_is_refused(impl):
    with pytest.raises(ValueError, match="expected auto or reference"):
        decode.decode_options(argparse.Namespace(impl=impl))


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = common.write_json(tmp_path / "new" / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        common.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmark": "sweep"}', '{"benchmark": "decode", "result": {}}'])
def test_layers_names_the_file_that_is_no_decode_result(tmp_path, text):
    path = tmp_path / "decode.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: "):
        layers.read_decode(path)


def test_bad_input_ends_a_bench_with_one_line(capsys, monkeypatch):
    def bad():
        raise ValueError("x: expected 1, got 2")

    def interrupted():
        raise KeyboardInterrupt

    def gone():
        raise BrokenPipeError

    monkeypatch.delenv("DSV41_TRACEBACK", raising=False)
    for main, code, said in ((bad, 2, "bench.x: error: x: expected 1, got 2\n"), (interrupted, 130, "bench.x: interrupted\n")):
        with pytest.raises(SystemExit) as end:
            command_line.run_program("bench.x", main)
        assert (end.value.code, capsys.readouterr().err) == (code, said)
    command_line.run_program("bench.x", gone)
    monkeypatch.setenv("DSV41_TRACEBACK", "1")
    with pytest.raises(ValueError, match="expected 1"):
        command_line.run_program("bench.x", bad)
