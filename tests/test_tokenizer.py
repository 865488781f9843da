"""Tokenizer: round trips, begin-of-text, pieces of text, reserved ids, and the token map on hand-made vocabularies."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from dsv41_jax.byte_tokenizer import byte_tokenizer, special_tokens
from dsv41_jax.presets import FLASH, TINY
from dsv41_jax.tokenizer import (
    Tokenizer,
    TokenizerError,
    check_prompt,
    derive_token_map,
    reserved_ids,
)

TEXTS = ["", "Once upon a time there was a house", "naïve façade", "日本語のテキスト 🙂", "a\n\n b\t c  d", "\x00\x7f\u2028"]


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer(byte_tokenizer(TINY))


def byte_level(pieces: list[str]) -> tokenizers.Tokenizer:
    """A vocabulary of exactly these entries, written as byte-level symbols (Ġ is a space, Ċ a line feed)."""
    raw = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    return raw


# text and ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tiny, text):
    ids = tiny.encode(text)
    assert all(0 <= i < TINY.vocab_size for i in ids)
    assert tiny.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text):
    assert _TINY.decode(_TINY.encode(text)) == text


_TINY = Tokenizer(byte_tokenizer(TINY))


def test_pieces_make_prompts_shorter(tiny):
    text = "The people would walk there in the morning and when they were home"
    assert len(tiny.encode(text)) < 0.6 * len(text)


def test_special_tokens_sit_where_the_config_says(tiny):
    for number, token in special_tokens(TINY).items():
        assert tiny.raw.token_to_id(token) == number
        assert tiny.encode(token) == [number]
        assert tiny.decode([number]) == ""
    assert tiny.raw.get_vocab_size() == TINY.vocab_size
    assert list(reserved_ids(TINY)) == [506, 507, 508, 509, 510]


def test_lone_surrogates_are_refused(tiny):
    with pytest.raises(TokenizerError, match="not encodable"):
        tiny.encode("a\ud800b")


def write(folder, raw: tokenizers.Tokenizer, settings: dict | None):
    raw.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (None, None),
        ({"add_bos_token": False, "bos_token": "<|bos|>"}, None),
        ({"bos_token": "<|bos|>"}, None),
        ({"add_bos_token": True, "bos_token": "<|bos|>"}, 0),
        ({"add_bos_token": True, "bos_token": {"content": "<|bos|>", "special": True}}, 0),
    ],
)
def test_begin_of_text_follows_the_tokenizer_config(tmp_path, settings, first):
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_tokenizer(TINY), settings))
    plain = byte_tokenizer(TINY).encode("hello").ids
    assert tokenizer.encode("hello") == ([first] if first is not None else []) + plain
    assert tokenizer.encode("<|bos|>hello") == [0, *plain]  # never twice
    assert tokenizer.encode("") == ([first] if first is not None else [])


def test_begin_of_text_of_a_post_processor_is_not_doubled(tmp_path):
    raw = byte_tokenizer(TINY)
    raw.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    settings = {"add_bos_token": True, "bos_token": "<|bos|>"}
    tokenizer = Tokenizer.from_folder(write(tmp_path, raw, settings))
    assert tokenizer.encode("hello")[:2] == [0, byte_tokenizer(TINY).encode("hello").ids[0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_bos_token": True, "bos_token": "<nope>"}, "'<nope>' is not in the vocabulary"),
        ({"add_bos_token": True}, "bos_token None"),
        ([], "tokenizer_config.json"),
    ],
)
def test_broken_tokenizer_configs_are_refused(tmp_path, settings, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(write(tmp_path, byte_tokenizer(TINY), settings))


def test_missing_and_broken_tokenizers_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token"),
        ([3, 512], "got 512 at position 1"),
        ([-1], "got -1 at position 0"),
        ([5, 9, 508], "id 508 at position 2 is a reserved image id"),
    ],
)
def test_prompts_are_checked(ids, message):
    with pytest.raises(ValueError, match=message):
        check_prompt(ids, TINY)


def test_the_image_sentinels_of_the_release_are_reserved():
    assert list(reserved_ids(FLASH)) == [129264, 129265, 129266, 129267, 129268]
    check_prompt([129263, 129269, 0], FLASH)


def test_an_image_placeholder_in_text_does_not_get_past_the_check(tiny):
    with pytest.raises(ValueError, match="reserved image id"):
        check_prompt(tiny.encode("look: <|image_0|>"), TINY)


# pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 3, 50])
def test_pieces_put_together_are_the_text_and_end_in_whole_characters(tiny, text, step):
    ids = tiny.encode(text)
    stream = tiny.stream()
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in p for p in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TINY.vocab_size - 1), max_size=120), st.integers(1, 7))
def test_pieces_of_any_ids_are_what_decode_gives(ids, step):
    stream = _TINY.stream()
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + stream.finish() == _TINY.decode(ids)
    assert stream.push(ids) + stream.finish() == _TINY.decode(ids)  # finish starts over


def test_a_character_is_held_until_its_last_byte(tiny):
    ids = [tiny.raw.token_to_id(symbol) for symbol in ("ð", "Ł", "Ļ", "Ĥ")]  # the bytes F0 9F 99 82
    stream = tiny.stream()
    assert [stream.push([i]) for i in ids] == ["", "", "", "🙂"]
    assert stream.push(ids[:2]) == "" and stream.finish() == "\ufffd"


def test_the_window_of_a_long_stream_stays_short(tiny):
    stream = tiny.stream()
    for token in tiny.encode("the house by the sea " * 100):
        stream.push([token])
        assert len(stream._window) <= 40


# the token map --------------------------------------------------------------------------------------------------------


def test_tokens_that_normalise_alike_share_an_id():
    # é and É are their letter without the accent; the ligature is NFKC ff
    raw = byte_level(["the", "Ġthe", "The", "THE", "Ċthe", "thĊ", "th", "Ã©", "e", "Ãī", "ï¬Ģ", "ff", "x"])
    np.testing.assert_array_equal(derive_token_map(raw, 13), [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4])


def test_white_space_collapses_but_does_not_vanish():
    raw = byte_level(["Ġ", "ĠĠ", "Ċ", "ĉ", "čĊ", "aĠb", "aĊĊĉb", "ab", "Ġa", "a"])
    np.testing.assert_array_equal(derive_token_map(raw, 10), [0, 0, 0, 0, 0, 1, 1, 2, 3, 3])


def test_what_normalises_to_nothing_keeps_its_text():
    # a combining accent alone, another one, a vertical tab (stripped), a form feed, NUL
    raw = byte_level(["Ìģ", "ÌĢ", "ċ", "Č", "Ā", "Ìģ" + "Ā"])
    ids = derive_token_map(raw, 6)
    assert len(set(ids[:4])) == 4


def test_parts_of_characters_are_told_apart_by_their_entry():
    raw = byte_level(["Ã", "ð", "aÃ", "AÃ", "\ufffd", "é"])
    # "Ã" and "ð" both decode to U+FFFD; "aÃ" and "AÃ" are not lower-cased either
    ids = derive_token_map(raw, 6)
    assert len(set(ids[:4])) == 4


def test_special_tokens_count_with_their_text():
    raw = byte_level(["a", "b"])
    raw.add_special_tokens(["<S>", "<s>"])
    np.testing.assert_array_equal(derive_token_map(raw, 4), [0, 1, 2, 2])


def test_unknown_ids_add_nothing_and_surplus_ids_are_refused():
    raw = byte_level(["a", "b"])
    ids = derive_token_map(raw, 5)
    assert ids.dtype == np.int32 and list(ids) == [0, 1, 0, 0, 0]
    with pytest.raises(TokenizerError, match="ids below vocab_size 1, got id 1"):
        derive_token_map(raw, 1)


def test_numbers_follow_first_appearance():
    raw = byte_level(["z", "a", "Z", "b", "A"])
    np.testing.assert_array_equal(derive_token_map(raw, 5), [0, 1, 0, 2, 1])


def test_the_tiny_preset_states_the_size_of_its_own_map():
    ids = derive_token_map(byte_tokenizer(TINY), TINY.vocab_size)
    assert len(np.unique(ids)) == ids.max() + 1 == TINY.engram_compressed_vocab_size
    assert ids[TINY.engram_pad_token_id] == 2


def test_byte_tokenizers_of_other_sizes():
    small = dataclasses.replace(TINY, vocab_size=300, image_token_id=290, dspark_noise_token_id=299)
    tokenizer = Tokenizer(byte_tokenizer(small))
    assert tokenizer.raw.get_vocab_size() == 300
    assert tokenizer.decode(tokenizer.encode("déjà vu")) == "déjà vu"
    with pytest.raises(ValueError, match="vocab_size: expected >= 260 for a byte-level tokenizer, got 259"):
        byte_tokenizer(dataclasses.replace(small, vocab_size=259, image_token_id=-1, dspark_noise_token_id=258))


def test_a_vocabulary_that_names_no_image_ids_reserves_none():
    raw = TINY.to_dict()
    del raw["image_token_id"]
    c = type(TINY).from_dict(raw)
    assert c.image_token_id == -1 and not reserved_ids(c)
    check_prompt(list(range(512)), c)
