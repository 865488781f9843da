# ruff: noqa: F401, F811 (fixtures are imported by name)
"""Files that the command line reads and writes, and runs that end early."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cli_harness import assert_refused, broken, run, scripted, short

from dsv41_jax.tokenizer import Tokenizer

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
                          (b'{"prompt": "a", "temperature": 0.3}', "expected no other keys than the prompt, got temperature"),
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
