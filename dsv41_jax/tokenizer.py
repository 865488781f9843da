"""Text to ids and back, and the Engram token map that is derived from a tokenizer (spec/model.md section 10)."""

import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import normalizers

from dsv41_jax.config import ModelConfig
from dsv41_jax.json_files import read_json_object

_IMAGE_IDS = 5  # image spans of the release reserve this many ids from image_token_id on
_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"  # private use: keeps a token that is one space through the strip


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or text that it cannot take."""


def reserved_ids(c: ModelConfig) -> range:
    """Ids that a text prompt must never contain: the image sentinels (spec/serving.md). Empty for a model without any."""
    if c.image_token_id < 0:
        return range(0)
    return range(c.image_token_id, min(c.image_token_id + _IMAGE_IDS, c.vocab_size))


def check_prompt(ids: Sequence[int], c: ModelConfig, where: str = "prompt") -> None:
    """Raises ValueError (where, expected, got) for an empty prompt, an id out of the vocabulary or a reserved image id."""
    if len(ids) == 0:
        raise ValueError(f"{where}: expected at least one token, got none")
    reserved = reserved_ids(c)
    for position, token in enumerate(ids):
        if not 0 <= token < c.vocab_size:
            raise ValueError(f"{where}: expected ids 0..{c.vocab_size - 1}, got {token} at position {position}")
        if token in reserved:
            raise ValueError(f"{where}: id {token} at position {position} is a reserved image id; only text is decoded")


class Tokenizer:
    """A tokenizer.json with the begin-of-text rule of its tokenizer_config.json.

    raw: the `tokenizers.Tokenizer`. bos: id put before every prompt, or None.
    """

    def __init__(self, raw: tokenizers.Tokenizer, bos: int | None = None):
        self.raw, self.bos = raw, bos

    @classmethod
    def from_folder(cls, folder) -> "Tokenizer":
        """From tokenizer.json, and tokenizer_config.json where there is one. Raises TokenizerError."""
        folder = pathlib.Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder}: no tokenizer.json, so text prompts are not possible (give token ids)")
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the binding raises bare Exception
            raise TokenizerError(f"{path}: {e}") from None
        raw.no_padding()
        raw.no_truncation()
        return cls(raw, _bos(folder / "tokenizer_config.json", raw))

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, begin-of-text first if the tokenizer asks for it, exactly once. Raises TokenizerError if the
        text is no valid Unicode."""
        try:
            ids = self.raw.encode(text).ids
        except (UnicodeEncodeError, TypeError) as e:
            raise TokenizerError(f"prompt: not encodable ({e})") from None
        if self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.raw.decode(ids)

    def stream(self) -> "StreamDecoder":
        """A decoder for one request's output as it arrives."""
        return StreamDecoder(self)


def _bos(path: pathlib.Path, raw: tokenizers.Tokenizer) -> int | None:
    if not path.is_file():
        return None
    try:
        settings = read_json_object(path)
    except ValueError as e:
        raise TokenizerError(str(e)) from None
    if not settings.get("add_bos_token", False):
        return None
    token = settings.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    bos = raw.token_to_id(token) if isinstance(token, str) else None
    if bos is None:
        raise TokenizerError(f"{path}: add_bos_token is set, but bos_token {token!r} is not in the vocabulary")
    return bos


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces put together are `decode` of all ids.

    A character whose bytes have not all arrived is held back, so no piece ends in half a character.
    """

    _HELD = 3  # a UTF-8 character lacks at most three bytes, shown as at most three replacement characters
    _CONTEXT = 8  # ids kept when the window is cut: decoders may look at neighbours

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # characters of decode(window) already handed out

    def push(self, ids: list[int]) -> str:
        """The text that became certain with these ids; may be empty."""
        self._window += ids
        text = self._tokenizer.decode(self._window)
        end = len(text)
        while end > len(text) - self._HELD and text[:end].endswith(_REPLACEMENT):
            end -= 1
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if end == len(text) and len(self._window) > 4 * self._CONTEXT:
            self._window = self._window[-self._CONTEXT :]
            self._emitted = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """What was held back; a broken character comes as U+FFFD. The decoder starts over."""
        rest = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return rest


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(tokenizers.Regex(r"\A \z"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ])  # fmt: skip


def derive_token_map(
    raw: tokenizers.Tokenizer,
    vocab_size: int,
) -> np.ndarray:
    """i32[vocab_size]: raw id -> Engram id; tokens that normalise alike share one, numbered by first appearance.

    A token's key is its text after NFKC, NFD, accent stripping, lower case and collapsing of white space, its plain text
    if nothing is left, or its vocabulary entry if its bytes are no whole characters. Ids that the tokenizer does not
    know get 0 and add nothing to the count. Raises TokenizerError if the tokenizer has ids beyond `vocab_size`.
    """
    largest = max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise TokenizerError(f"tokenizer: expected ids below vocab_size {vocab_size}, got id {largest}")
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    out = np.zeros(vocab_size, np.int32)
    for token in range(vocab_size):
        entry = raw.id_to_token(token)
        if entry is None:
            continue
        text = raw.decode([token], skip_special_tokens=False)
        key = entry if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        out[token] = numbers.setdefault(key, len(numbers))
    return out
