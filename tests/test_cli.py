"""The command line: real runs on a two-layer checkpoint, and every kind of bad input: one line, exit code 2, no remains."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dsv41_jax import cli
from dsv41_jax.checkpoint import SINGLE
from dsv41_jax.make_checkpoint import make_checkpoint
from dsv41_jax.presets import TINY
from dsv41_jax.tokenizer import Tokenizer

SHORT = dataclasses.replace(
    TINY, num_hidden_layers=2, num_nextn_predict_layers=1, compress_ratios=(0, 1, 0), kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,), candidate_source_layer_id=1, engram_layer_ids=(1,), engram_num_embeddings=(1172,),
    dspark_target_layer_ids=(1,), n_routed_experts=4, num_experts_per_tok=2, dspark_n_routed_experts=4,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return make_checkpoint(SHORT, tmp_path_factory.mktemp("cli") / "short", seed=0)


@pytest.fixture
def broken(short, tmp_path):
    """A copy of the checkpoint that may be broken."""
    return shutil.copytree(short, tmp_path / "broken")


@pytest.fixture
def run(capsys):
    """run(*argv) -> (exit code, stdout, stderr)"""

    def call(*argv):
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as e:
            code = e.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def assert_refused(result, message):
    code, out, err = result
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err
    assert message in err, err


# generate -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the network by a script: request r gets the ids of outputs[r], three a step. Returns the calls it saw."""
    from dsv41_jax import generate as module

    calls = []

    def install(outputs, reason="length"):
        def generate(params, config, prompts, *, on_token, **options):
            calls.append((prompts, options))
            results = []
            for r, ids in enumerate(outputs):
                for i in range(0, len(ids), 3):
                    on_token(r, ids[i : i + 3])
                results.append(module.GenerationResult(ids, reason, drafted=10 * (options["gamma"] != 0), accepted=4))
            return results

        monkeypatch.setattr(module, "generate", generate)
        return calls

    return install


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
    "image placeholder": (["--prompt", "<|image_2|>"], "reserved image id"),
    "longer than the context": (["--prompt-ids", ",".join(["5"] * 64)], "expected fewer tokens than the context of 64, got 64"),
    "context beyond the model": (["--prompt", "a", "--max-context", "65"], "--max-context: expected at most 64, got 65"),
    "gamma too large": (["--prompt", "a", "--gamma", "6"], "--gamma: expected 0..5, got 6"),
    "gamma without drafts": (["--prompt", "a", "--gamma", "2", "--draft", "off"], "--gamma 2 asks for drafts"),
    "no tokens": (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: expected >= 1, got 0"),
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
    "out of vocabulary": (np.full((1, 4), 512), "expected ids 0..511, got 512..512"),
    "negative": (np.array([[3, -1]]), "got -1..3"),
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
    assert_refused(run(*argv, "--chunk", 0), "--chunk: expected >= 1")


# inspect, make-checkpoint, demo ---------------------------------------------------------------------------------------


def test_inspect_names_the_totals_of_the_release(run):
    code, out, err = run("inspect", "--preset", "flash", "--batch", 64, "--context", 32768, "--ranks", 4)
    assert code == 0 and err == ""
    assert "552 B backbone + 197 B engram" in out and "890 B per context token" in out
    for part in ("24", "REINDEX", "within candidates", "routed experts", "73,999,319,040", "h200", "b300", "fits", "sparse_attention"):
        assert part in out, part


def test_inspect_json_of_a_checkpoint(run, short):
    code, out, _ = run("inspect", "--checkpoint", short, "--json", "--batch", 2)
    facts = json.loads(out)
    assert code == 0 and facts["checkpoint_problems"] == []
    assert facts["workload"] == {"batch_per_rank": 2, "context": 64, "ranks": 1}
    assert facts["config"]["num_hidden_layers"] == 2 and [s["kind"] for s in facts["schedule"]] == ["SWA", "FULL1", "SWA"]


def test_inspect_shows_a_broken_checkpoint_and_fails(run, broken):
    (broken / SINGLE).write_bytes((broken / SINGLE).read_bytes()[:-1])
    code, out, err = run("inspect", "--checkpoint", broken)
    assert code == 2 and "Layer schedule" in out and err.count("\n") == 1 and "truncated" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect"], "one of the arguments --checkpoint --preset is required"),
        (["inspect", "--preset", "huge"], "--preset: expected one of ['flash', 'tiny'], got 'huge'"),
        (["inspect", "--preset", "flash", "--ranks", "7"], "ranks: expected a divisor of n_routed_experts = 384, got 7"),
        (["inspect", "--preset", "tiny", "--context", "9999"], "context: expected at most 4096 tokens, got 9999"),
        (["inspect", "--checkpoint", "/nowhere"], "no such checkpoint folder"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_bad_commands(run, argv, message):
    assert_refused(run(*argv), message)


def test_make_checkpoint(run, tmp_path):
    code, out, err = run("make-checkpoint", "--preset", "tiny", "--seed", 4, "--out", tmp_path / "made")
    assert code == 0 and out == "" and "MB" in err
    want = make_checkpoint(TINY, tmp_path / "direct", seed=4)
    assert (tmp_path / "made" / SINGLE).read_bytes() == (want / SINGLE).read_bytes()
    code, _, _ = run("make-checkpoint", "--config", tmp_path / "made" / "config.json", "--seed", 4, "--out", tmp_path / "again")
    assert code == 0 and (tmp_path / "again" / SINGLE).read_bytes() == (want / SINGLE).read_bytes()


def test_bad_make_checkpoint_leaves_nothing(run, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    target = ["--out", tmp_path / "x"]
    assert_refused(run("make-checkpoint", "--preset", "tiny", "--out", tmp_path / "there"), "exists already")
    assert_refused(run("make-checkpoint", "--preset", "none", *target), "--preset: expected one of")
    assert_refused(run("make-checkpoint", "--config", tmp_path / "bad.json", *target), "must name every size")
    assert_refused(run("make-checkpoint", "--preset", "tiny", "--seed", "-1", *target), "--seed: expected >= 0")
    assert_refused(run("make-checkpoint", "--preset", "tiny", "--shard-gb", "0", *target), "--shard-gb: expected > 0")
    assert_refused(run("make-checkpoint", "--preset", "tiny"), "--out")
    assert sorted(os.listdir(tmp_path)) == ["bad.json", "there"]


def test_demo_is_generate_on_a_fresh_tiny_checkpoint(run, monkeypatch):
    from dsv41_jax import make_checkpoint as module

    made = []

    def make_short(config, out, *, seed):
        assert config == TINY
        made.append(make_checkpoint(SHORT, out, seed=seed))
        return made[-1]

    monkeypatch.setattr(module, "make_checkpoint", make_short)  # two layers compile sooner than eight
    code, out, err = run("demo", "--max-new-tokens", 5, "--prompt", "the sea")
    assert code == 0 and out.endswith("\n") and "5 tokens; " in err and "random weights" in err
    assert not made[0].exists()


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "dsv41_jax.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for command in ("generate", "score", "inspect", "make-checkpoint", "demo"):
        assert command in done.stdout


# files that are read and written --------------------------------------------------------------------------------------

GENERATION_CONFIG = {
    "no JSON": ("{", "generation_config.json: not JSON"),
    "no UTF-8": (b"\xff", "generation_config.json: not JSON"),
    "nested deeply": ("[" * 100_000, "nested too deeply"),
    "a list": ("[]", "generation_config.json: expected a JSON object, got list"),
    "text": ('{"temperature": "hot"}', "generation_config.json: sampling: temperature expected a number, got 'hot'"),
    "NaN": ('{"temperature": NaN}', "temperature expected a finite float32 >= 0, got nan"),
    "half a token": ('{"top_k": 1.5}', "generation_config.json: sampling: top_k expected an integer, got 1.5"),
    "too many": ('{"top_k": 99999999999}', "top_k expected in [0, 2^31), got 99999999999"),
    "a switch": ('{"min_p": true}', "min_p expected a number, got True"),
}


@pytest.mark.parametrize("case", GENERATION_CONFIG)
def test_bad_generation_configs(run, broken, case):
    text, message = GENERATION_CONFIG[case]
    (broken / "generation_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(run("generate", "--checkpoint", broken, "--prompt", "a", "--no-progress"), message)


def test_an_argument_takes_the_place_of_a_bad_default(run, broken, scripted):
    (broken / "generation_config.json").write_text('{"temperature": -1}')
    calls = scripted([[35]])
    assert run("generate", "--checkpoint", broken, "--prompt", "a", "--temperature", 0.5, "--no-progress")[0] == 0
    assert calls[0][1]["sampling"].temperature == 0.5


def test_prompt_files_are_utf8_lines_of_json(run, short, scripted, tmp_path):
    """A byte-order mark, Windows line ends, and the line separators that JSON strings may hold as they are."""
    path = tmp_path / "in.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n{"prompt_ids": [5]}\r\n'.encode())
    calls = scripted([[35], [36]])
    assert run("generate", "--checkpoint", short, "--prompts", path, "--no-progress")[0] == 0
    assert calls[0][0] == [Tokenizer.from_folder(short).encode("a\u2028b\u0085c"), [5]]
    for text, message in ((b'{"prompt": "\xff"}', "in.jsonl: expected UTF-8, got byte 0xff at offset 12"),
                          (b"[" * 100_000, "in.jsonl:1: not JSON (nested too deeply)"),
                          (b'{"prompt": "\\ud800"}', "in.jsonl:1: prompt: not encodable")):  # fmt: skip
        path.write_bytes(text)
        assert_refused(run("generate", "--checkpoint", short, "--prompts", path), message)


def test_devices_are_not_replaced_and_links_stay_links(run, short, scripted, tmp_path):
    scripted([[35]])
    os.mkfifo(tmp_path / "pipe")
    argv = ["generate", "--checkpoint", short, "--prompt-ids", "5", "--json", "--no-progress", "--out"]
    assert_refused(run(*argv, tmp_path / "pipe"), "pipe: expected a file or a new name")
    assert_refused(run(*argv, "/dev/null"), "/dev/null: expected a file or a new name")
    (tmp_path / "link").symlink_to("target")
    assert run(*argv, tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "target").read_text())["token_ids"] == [35]
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "target"]


def test_a_broken_archive_of_ids(run, short, tmp_path):
    (tmp_path / "ids.npy").write_bytes(b"PK\x03\x04 and no more")
    argv = ["score", "--checkpoint", short, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz"]
    assert_refused(run(*argv), "not a .npy array")


def test_a_chunk_wider_than_the_text_takes_no_memory(run, short, tmp_path):
    np.save(tmp_path / "ids.npy", np.full((1, 3), 9))
    argv = ["score", "--checkpoint", short, "--ids", tmp_path / "ids.npy", "--precision", "float32", "--no-progress", "--out"]
    assert run(*argv, tmp_path / "wide.npz", "--chunk", 10**12)[0] == 0
    assert run(*argv, tmp_path / "fit.npz", "--chunk", 3)[0] == 0
    with np.load(tmp_path / "wide.npz") as wide, np.load(tmp_path / "fit.npz") as fit:
        np.testing.assert_array_equal(wide["logits"], fit["logits"])


@pytest.mark.parametrize("size", ["0", "nan", "inf"])
def test_shard_sizes(run, tmp_path, size):
    argv = ["make-checkpoint", "--preset", "tiny", "--out", tmp_path / "x", "--shard-gb", size]
    assert_refused(run(*argv), "--shard-gb: expected > 0 and finite")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [(MemoryError("Unable to allocate 3 TiB"), "Unable to allocate"), (RuntimeError("RESOURCE_EXHAUSTED: 3 TiB"), "RESOURCE_EXHAUSTED")],
)
def test_too_little_memory_is_one_line(run, short, monkeypatch, error, message):
    def load(*_, **__):
        raise error

    monkeypatch.setattr("dsv41_jax.checkpoint.load", load)
    assert_refused(run("generate", "--checkpoint", short, "--prompt-ids", "5"), message)


def test_a_program_that_is_told_to_end_leaves_nothing(short, tmp_path):
    """SIGTERM reaches the command while it runs, its unfinished output beside it."""
    script = (
        "import os, signal, sys; from dsv41_jax import checkpoint, cli\n"
        "def load(*_, **__):\n"
        f"    assert len(os.listdir({str(tmp_path)!r})) == 1\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "checkpoint.load = load\n"
        f"sys.argv = ['dsv41', 'generate', '--checkpoint', {str(short)!r}, '--prompt-ids', '5', '--out', {str(tmp_path / 'out')!r}]\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 143 and done.stderr == "" and os.listdir(tmp_path) == []
