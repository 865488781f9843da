"""What the benches refuse before they measure anything, and that a result file is whole or not there."""

import argparse
import json

import pytest

from bench import command_line, common, decode, exchange, layers, ranks_check, sweep


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
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_by_name(capsys, parse, argv, why):
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    assert why in capsys.readouterr().err


def test_an_unwritable_out_is_refused_before_the_run(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for path in (tmp_path, blocked / "x.json"):
        with pytest.raises(SystemExit) as end:
            decode.parse(["--out", str(path)])
        assert end.value.code == 2
        assert str(path) in capsys.readouterr().err
    assert decode.parse(["--out", str(tmp_path / "new" / "x.json")]).out == str(tmp_path / "new" / "x.json")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # asking left nothing behind


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
