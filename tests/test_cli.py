# ruff: noqa: F401, F811 (fixtures are imported by name)
"""generate and score at the command line: real runs on a two-layer checkpoint, and every kind of bad input: one line, exit
code 2, no remains."""

import json
import os
import shutil

import numpy as np
import pytest
from cli_harness import SHORT, assert_refused, broken, run, scripted, short

from dsv41_jax.checkpoint_listing import SINGLE
from dsv41_jax.tokenizer import Tokenizer

# generate -------------------------------------------------------------------------------------------------------------


def test_generate_streams_text_and_reports_on_stderr(run, short, scripted):
    tokenizer = Tokenizer.from_folder(short)
    ids = tokenizer.encode("a 🙂 by the sea")[1:]
    calls = scripted([ids])
    code, out, err = run("generate", "--checkpoint", short, "--prompt", "the house", "--max-new-tokens", 9, "--seed", 3,
                         "--ignore-eos", "--temperature", 0.5, "--stop-id", 7, "--no-progress")  # fmt: skip
    assert code == 0 and out == "a 🙂 by the sea\n"
    assert f"{len(ids)} tokens; " in err and "4 of 10 drafts accepted (40%)" in err
    (prompts, options), sampling = calls[0], calls[0][1]["sampling"]
    assert prompts == [tokenizer.encode("the house")] and prompts[0][0] == SHORT.bos_token_id
    assert (options["max_new_tokens"], options["gamma"], options["precision"]) == (9, None, "released")
    assert (sampling.seed, sampling.temperature, sampling.stop_ids, sampling.ignore_eos) == (3, 0.5, (7,), True)


def test_generate_json_to_stdout_and_to_a_file(run, short, scripted, tmp_path):
    lines = [{"prompt": "the sea"}, {"prompt_ids": [0, 40, 41]}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    calls = scripted([[35, 36, 37, 38], [40]])
    argv = ["generate", "--checkpoint", short, "--prompts", tmp_path / "in.jsonl", "--json", "--draft", "off", "--no-progress"]
    code, out, err = run(*argv)
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "drafts" not in err and calls[0][1]["gamma"] == 0
    assert [r["index"] for r in records] == [0, 1]
    assert records[1]["prompt_ids"] == [0, 40, 41] and records[1]["token_ids"] == [40]
    assert records[0]["text"] == Tokenizer.from_folder(short).decode([35, 36, 37, 38])
    scripted([[35, 36, 37, 38]])
    code, nothing, _ = run(*argv[:3], "--prompt", "the sea", *argv[5:], "--out", tmp_path / "out.json")
    assert code == 0 and nothing == ""
    assert json.loads((tmp_path / "out.json").read_text()) == records[0]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.json"]


def test_generate_without_a_tokenizer_shows_ids(run, broken, scripted):
    (broken / "tokenizer.json").unlink()
    np.save(broken / "engram_token_map.npy", (np.arange(512) * 411 // 512).astype(np.int32))
    scripted([[35, 36]])
    code, out, _ = run("generate", "--checkpoint", broken, "--prompt-ids", "1,2,3", "--no-progress")
    assert code == 0 and out == "35,36\n"
    (broken / "in.jsonl").write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2]}')
    scripted([[35, 36], [40]])
    code, out, _ = run("generate", "--checkpoint", broken, "--prompts", broken / "in.jsonl", "--no-progress")
    assert code == 0 and out == "[0] 35,36\n[1] 40\n"


def test_sampling_defaults_come_from_the_checkpoint(run, broken, scripted):
    (broken / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9, "do_sample": true}')
    calls = scripted([[35]])
    assert run("generate", "--checkpoint", broken, "--prompt", "a", "--no-progress")[0] == 0
    assert run("generate", "--checkpoint", broken, "--prompt", "a", "--no-progress", "--top-p", 0.5, "--gamma", 2)[0] == 0
    first, second = calls[0][1], calls[1][1]
    assert (first["sampling"].temperature, first["sampling"].top_p) == (0.7, 0.9)
    assert (second["sampling"].temperature, second["sampling"].top_p, second["gamma"]) == (0.7, 0.5, 2)


def test_a_request_that_failed_while_running_gives_exit_code_1(run, short, scripted):
    scripted([[35, 36]], reason="error")
    code, out, err = run("generate", "--checkpoint", short, "--prompt", "a", "--no-progress")
    assert code == 1 and out != "" and "--prompt: stopped, a logit that decided a token was not finite" in err


PROMPT_LINES = {
    "not JSON": ("{", ":1: not JSON"),
    "a list": ("[1]", ":1: expected an object"),
    "neither": ('{"text": "x"}', ":1: expected an object"),
    "both": ('{"prompt": "x", "prompt_ids": [1]}', ":1: expected an object"),
    "a number": ('{"prompt": 3}', ":1: prompt expected a string"),
    "floats": ('{"prompt_ids": [1.5]}', ":1: prompt_ids expected a list of integers"),
    "empty text": ('{"prompt": "a"}\n{"prompt": ""}', ":2: the prompt is empty"),
    "empty ids": ('{"prompt_ids": []}', ":1: prompt: expected at least one token"),
    "id out of range": ('{"prompt_ids": [5]}\n\n{"prompt_ids": [5, 512]}', ":3: prompt: expected ids 0..511, got 512"),
    "no lines": ("\n", "no prompts in it"),
}


@pytest.mark.parametrize("case", PROMPT_LINES)
def test_bad_prompt_files(run, short, tmp_path, case):
    text, message = PROMPT_LINES[case]
    (tmp_path / "in.jsonl").write_text(text)
    out = tmp_path / "out.jsonl"
    assert_refused(run("generate", "--checkpoint", short, "--prompts", tmp_path / "in.jsonl", "--out", out), message)
    assert not out.exists()


BAD_GENERATE = {
    "nothing to continue": ([], "one of the arguments --prompt --prompt-ids --prompts is required"),
    "two prompts": (["--prompt", "a", "--prompt-ids", "1"], "not allowed with argument"),
    "empty prompt": (["--prompt", ""], "--prompt: the prompt is empty"),
    "no ids": (["--prompt-ids", ""], "expected at least one token"),
    "ids that are none": (["--prompt-ids", "1,x"], "expected comma-separated token ids"),
    "id out of vocabulary": (["--prompt-ids", "1,512"], "expected ids 0..511, got 512 at position 1"),
    "reserved image id": (["--prompt-ids", "1,507"], "reserved image id"),
    "a missing id": (["--prompt-ids", "1,,2"], "expected comma-separated token ids, got '1,,2'"),
    "image placeholder": (["--prompt", "<|image_2|>"], "reserved image id"),
    "longer than the context": (["--prompt-ids", ",".join(["5"] * 64)], "expected fewer tokens than the context of 64, got 64"),
    "context beyond the model": (["--prompt", "a", "--max-context", "65"], "--max-context: expected at most 64, got 65"),
    "gamma too large": (["--prompt", "a", "--gamma", "6"], "--gamma: expected 0..5, got 6"),
    "gamma without drafts": (["--prompt", "a", "--gamma", "2", "--draft", "off"], "--gamma 2 asks for drafts"),
    "no tokens": (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: expected an integer >= 1, got '0'"),
    "temperature": (["--prompt", "a", "--temperature", "-1"], "temperature expected a finite float32 >= 0"),
    "top-p": (["--prompt", "a", "--top-p", "0"], "top_p expected in (0, 1]"),
    "stop id": (["--prompt", "a", "--stop-id", "512"], "--stop-id: expected ids 0..511, got 512"),
    "precision": (["--prompt", "a", "--precision", "bf16"], "invalid choice: 'bf16'"),
    "missing file": (["--prompts", "/nowhere/x.jsonl"], "No such file"),
    "missing out folder": (["--prompt", "a", "--out", "/nowhere/x"], "its folder does not exist"),
}


@pytest.mark.parametrize("case", BAD_GENERATE)
def test_bad_generate_arguments(run, short, case):
    argv, message = BAD_GENERATE[case]
    assert_refused(run("generate", "--checkpoint", short, "--no-progress", *argv), message)


def test_a_bad_switch_in_the_environment(run, short, monkeypatch):
    monkeypatch.setenv("FAKE_BALANCE_EXPERT", "maybe")
    assert_refused(run("inspect", "--checkpoint", short), "FAKE_BALANCE_EXPERT: expected 0 or 1, got 'maybe'")


# broken checkpoints ---------------------------------------------------------------------------------------------------


def test_text_needs_a_tokenizer(run, broken):
    (broken / "tokenizer.json").unlink()
    assert_refused(run("generate", "--checkpoint", broken, "--prompt", "a"), "no tokenizer.json, so text prompts")


@pytest.mark.parametrize("command", ["generate", "score"])
def test_broken_checkpoints(run, broken, tmp_path, command):
    np.save(tmp_path / "ids.npy", np.zeros((1, 4), np.int32))
    rest = {"generate": ["--prompt", "a"], "score": ["--ids", tmp_path / "ids.npy"]}[command]
    argv = [command, "--checkpoint", broken, *rest, "--out", tmp_path / "out"]
    whole = (broken / SINGLE).read_bytes()
    (broken / SINGLE).write_bytes(whole[:-1])
    assert_refused(run(*argv), "model.safetensors: truncated")
    # a wrong shape and a missing tensor, of the same length: both in the one line
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length].replace(b'"norm.weight":{"dtype":"BF16","shape":[128]', b'"norm.weighs":{"dtype":"BF16","shape":[128]')
    header = header.replace(b'"embed.weight":{"dtype":"BF16","shape":[512,128]', b'"embed.weight":{"dtype":"BF16","shape":[128,512]')
    (broken / SINGLE).write_bytes(whole[:8] + header + whole[8 + length :])
    result = run(*argv)
    assert_refused(result, "embed.weight: expected BF16 [512, 128], got BF16 [128, 512]")
    assert "norm.weight: missing" in result[2] and "norm.weighs: unexpected" in result[2]
    (broken / SINGLE).unlink()
    assert_refused(run(*argv), "neither model.safetensors nor")
    (broken / "config.json").write_text("{}")
    assert_refused(run(*argv), "must name every size")
    (broken / "config.json").unlink()
    assert_refused(run(*argv), "no config.json")
    shutil.rmtree(broken)
    assert_refused(run(*argv), "no such checkpoint folder")
    assert os.listdir(tmp_path) == ["ids.npy"]


# score ----------------------------------------------------------------------------------------------------------------


def test_score_writes_logits_and_drafts(run, short, tmp_path):
    ids = np.random.default_rng(0).integers(3, 500, (2, 6))
    np.save(tmp_path / "ids.npy", ids)
    out = tmp_path / "out.npz"
    code, text, err = run("score", "--checkpoint", short, "--ids", tmp_path / "ids.npy", "--out", out, "--prefill", 4,
                          "--precision", "float32", "--drafts", "--no-progress")  # fmt: skip
    assert code == 0 and text == "" and "logits float32[2, 6, 512]" in err
    with np.load(out) as f:
        assert f["logits"].shape == (2, 6, 512) and np.isfinite(f["logits"]).all()
        np.testing.assert_array_equal(f["anchor_pos"], [[4, 5]] * 2)
        np.testing.assert_array_equal(f["draft_ids"][..., 0], ids[:, 4:])
        assert f["draft_logits"].shape == (2, 2, 5, 512) and f["draft_confidence"].shape == (2, 2, 5)
    assert sorted(os.listdir(tmp_path)) == ["ids.npy", "out.npz"]


BAD_IDS = {
    "one row": (np.zeros(4, np.int32), "expected a non-empty int [B, L] array, got int32 [4]"),
    "floats": (np.zeros((1, 4)), "got float64 [1, 4]"),
    "none": (np.zeros((1, 0), np.int32), "non-empty"),
    "out of vocabulary": (np.full((1, 4), 512), "expected ids 0..511, got 512 at [0, 0]"),
    "reserved image id": (np.full((1, 4), 507), "expected no reserved image id; only text is decoded, got 507 at [0, 0]"),
    "negative": (np.array([[3, -1]]), "got -1 at [0, 1]"),
    "too long": (np.zeros((1, 65), np.int32), "at most 64 positions, got 65"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids(run, short, tmp_path, case):
    ids, message = BAD_IDS[case]
    np.save(tmp_path / "ids.npy", ids)
    argv = ["score", "--checkpoint", short, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz", "--no-progress"]
    assert_refused(run(*argv), message)
    assert os.listdir(tmp_path) == ["ids.npy"]


def test_files_that_hold_no_ids(run, short, tmp_path):
    argv = ["score", "--checkpoint", short, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz"]
    assert_refused(run(*argv), "No such file")
    (tmp_path / "ids.npy").write_bytes(b"not numpy")
    assert_refused(run(*argv), "not a .npy array")
    np.savez(tmp_path / "ids.npz", ids=np.zeros((1, 2), np.int32))
    argv[4] = tmp_path / "ids.npz"
    assert_refused(run(*argv), "expected one .npy array")
    np.save(tmp_path / "ids.npy", np.zeros((1, 4), np.int32))
    argv[4] = tmp_path / "ids.npy"
    assert_refused(run(*argv, "--prefill", 5, "--no-progress"), "prefill")
    assert_refused(run(*argv, "--chunk", 0), "--chunk: expected an integer >= 1")
