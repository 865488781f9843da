"""The agreement benchmark: its prompts, its sides, its distances, and runs of a small network on the CPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import agreement, distances, presets, retrieval, synthetic
from dsv41_jax.byte_tokenizer import byte_tokenizer
from dsv41_jax.presets import FLASH, TINY
from dsv41_jax.tokenizer import Tokenizer, check_prompt

ENCODERS = {"words": retrieval.WordIds(TINY), "text": retrieval.Text(Tokenizer(byte_tokenizer(TINY), TINY.bos_token_id))}


@pytest.mark.parametrize("name", ENCODERS)
def test_prompts_fill_their_context_and_follow_from_the_seed(name):
    encoder, context = ENCODERS[name], 500
    made = retrieval.prompts(encoder, 8, context, seed=3)
    assert [p.task for p in made] == [*retrieval.KINDS] * 2
    for p in made:
        check_prompt(p.ids, TINY)
        assert 0.85 * context < len(p.ids) <= context and p.ids[0] == TINY.bos_token_id
    again, other = retrieval.prompts(encoder, 8, context, seed=3), retrieval.prompts(encoder, 8, context, seed=4)
    assert [p.ids for p in made] == [p.ids for p in again]
    assert all(p.ids != q.ids for p, q in zip(made, other, strict=True))
    assert made[0].ids != made[4].ids


@pytest.mark.parametrize("name", ENCODERS)
def test_answers_stand_in_the_prompt_and_are_found(name):
    encoder = ENCODERS[name]
    for kind in retrieval.KINDS:
        text, answer = retrieval._text(kind, 30, [0, 1])
        before, _, question = text.rpartition("Once more: " if kind == "verbatim" else "Question: ")
        assert answer and answer in before and answer not in question
        (prompt,) = retrieval.prompts(encoder, 1, 400, kinds=(kind,))
        assert not prompt.found([5, 6, 7])
    text, answer = retrieval._text("latest", 30, [0, 1])
    assert text.rfind(answer) == text.rfind("is", 0, text.rfind("Question")) + 3  # the last of four values


def test_an_answer_in_the_output_counts():
    for encoder in ENCODERS.values():
        ids = encoder.encode("the code is 12345 .")
        assert encoder.holds(ids, "12345") and not encoder.holds(ids, "54321")


def test_released_vocabulary_takes_hashed_words():
    for p in retrieval.prompts(retrieval.WordIds(FLASH), 4, 300):
        check_prompt(p.ids, FLASH)


def test_prompt_files_may_name_tasks_and_answers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    tokenizer = Tokenizer(byte_tokenizer(TINY))
    path.write_text('{"prompt": "abc", "task": "letters", "answer": "d"}\n\n{"prompt_ids": [1, 2, 3]}\n')
    first, second = retrieval.from_file(path, "folder", tokenizer)
    assert (first.task, second.task, second.ids, second.found) == ("letters", "prompt", [1, 2, 3], None)
    assert first.found(tokenizer.encode("xdx")) and not first.found(tokenizer.encode("xyz"))
    with pytest.raises(ValueError, match="needs the checkpoint's tokenizer"):
        retrieval.from_file(_line(path, '{"prompt_ids": [1, 2], "answer": "d"}'), "folder", None)
    with pytest.raises(ValueError, match=r"jsonl:1: task expected a string, got 3"):
        retrieval.from_file(_line(path, '{"prompt_ids": [1, 2], "task": 3}'), "folder", None)
    with pytest.raises(ValueError, match=r"prompt 0: expected 2\.\."):
        retrieval.check_prompts([retrieval.Prompt("x", [5])], TINY, 16)


def _line(path, text):
    path.write_text(text + "\n")
    return path


def test_sides_are_parsed():
    side = agreement.parse_side("reference,router=auto,gamma=3,precision=float32,chunk=24", TINY)
    assert (side.gamma, side.precision, side.chunk, side.options.impl("router"), side.options.impl("experts")) == (
        3, "float32", 24, "auto", "reference")  # fmt: skip
    assert agreement.parse_side("draft=off", TINY).gamma == 0 and agreement.parse_side("", TINY).gamma == 5
    for text, word in (("refrence", "refrence"), ("gamma=9", r"0\.\.5, got '9'"), ("gamma=2,draft=off", "draft=off"),
                       ("draft=maybe", "on or off"), ("chunk=0", "at least 1"), ("precision=fp8", "precision"), ("rooter=auto", "rooter"),
                       ("router=pairwise", "pairwise"), ("router=one_kernel", "this device is cpu")):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            agreement.parse_side(text, TINY)


def test_distances_are_those_of_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2, 3, 7)).astype(np.float32)
    ids = a.argmax(-1).astype(np.int32)
    ids[0, 0] = (ids[0, 0] + 1) % 7
    parted, other = np.array([0, 2], np.int32), np.array([4, 5], np.int32)
    got = {k: np.asarray(v) for k, v in distances.distances(*map(jnp.asarray, (a, b, ids, parted, other))).items()}
    log = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(got["rms"], np.sqrt(((a - b) ** 2).mean(-1)), rtol=1e-5)
    np.testing.assert_allclose(got["max"], abs(a - b).max(-1), rtol=1e-6)
    np.testing.assert_allclose(got["deviation"], a.std(-1), rtol=1e-5)
    np.testing.assert_allclose(got["kl"], (np.exp(log(a)) * (log(a) - log(b))).sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(got["same_top"], a.argmax(-1) == b.argmax(-1))
    assert got["own_top"].tolist() == [[False, True, True], [True, True, True]]
    np.testing.assert_allclose(got["margin"], [a[0, 0, ids[0, 0]] - a[0, 0, 4], a[1, 2, ids[1, 2]] - a[1, 2, 5]], rtol=1e-5)


def test_divergence_is_the_first_difference():
    assert distances.first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert distances.first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert distances.first_divergence([1, 2], [1, 2, 3]) == 2


@pytest.mark.slow
def test_drafting_agrees_and_other_weights_do_not(tmp_path, capsys):
    """In float32, greedy outputs with and without drafts are the same and logits differ by rounding alone; a network with
    other weights shares nothing. Three prompts in groups of two: the second group holds a padding row."""
    path, sides = tmp_path / "agreement.json", ["precision=float32,draft=off", "precision=float32,chunk=24"]
    shape = {"batch": 2, "context": 120, "max-new-tokens": 8, "chunk": 32, "capacity": 1}
    flags = [x for k, v in shape.items() for x in (f"--{k}", str(v))]
    agreement.main(["--preset", "tiny", "--layers", "3", "--count", "3", "--a", sides[0], "--b", sides[1], "--seed", "1",
                    "--out", str(path), *flags])  # fmt: skip
    assert "3 of 3 raw outputs identical" in capsys.readouterr().out
    out = json.loads(path.read_text())
    got, p = out["result"], out["protocol"]
    assert got["statement"] == "3 of 3 raw outputs identical" and got["total"]["positions"] <= 24
    assert p["capacity"] == p["prompt_tokens"][1] + 8 + 5 + 1
    assert got["total"]["logits_rms"]["max"] < 1e-4
    assert got["total"]["same_largest"] == got["total"]["a_repeats_itself"] == 1
    assert [q["task"] for q in got["prompts"]] == list(retrieval.KINDS[:3]) == list(got["tasks"])
    assert (p["a"]["prefill_chunk"], p["b"]["prefill_chunk"]) == (32, 24)
    assert p["a"]["drafted"] == 0 and p["b"]["drafted"] >= 5 * 2 * 3 and p["b"]["implementations"] is None
    assert any("random weights" in n for n in p["notes"]) and not any("same program" in n for n in p["notes"])
    assert {"device", "versions", "commit", "seed", "utc"} <= set(out["environment"])

    # the same executables, other weights
    config = presets.workload("tiny", layers=3).config
    prompts = retrieval.prompts(retrieval.WordIds(config), 2, 120, seed=1)
    side, capacity = agreement.parse_side(sides[1], config), out["protocol"]["capacity"]
    own, foreign = (
        agreement.Runner(side, config, synthetic.random_parameters(config, seed), 2, capacity, 8, 32) for seed in (1, 2)
    )
    records, _ = agreement.run_group([own, foreign], prompts, jax.jit(distances.distances), None)
    apart = distances.summary(records)
    assert apart["identical"] < 2 and apart["logits_rms"]["median"] > 0.1 and apart["same_largest"] < 1
    assert len(apart["first_divergence"]) == len(apart["margins_at_divergence"]) == 2 - apart["identical"]


def test_one_program_twice_is_said(monkeypatch):
    """On a CPU the kernels' side and the definitions' side share their executables."""
    a, b = (agreement.parse_side(text, TINY) for text in ("reference", "auto"))
    assert (a.options, a.gamma, a.precision) == (b.options, b.gamma, b.precision)
    monkeypatch.setattr("pallas_kernels.registry.current_arch", lambda: "sm_90")
    assert agreement.parse_side("auto", TINY).options.impl("experts") == "auto"


def test_layers_of_a_checkpoint_are_its_own(tmp_path):
    with pytest.raises(ValueError, match="--layers"):
        agreement.main(["--checkpoint", str(tmp_path), "--layers", "3"])
