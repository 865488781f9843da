"""Reading the JSON side files of a checkpoint folder."""

import json
import pathlib


def parse_json(text: str):
    """The parsed text. Raises ValueError for every text that is no JSON, one nested beyond reason included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path):
    """What a UTF-8 file holds. Raises ValueError (file, why) if that is no JSON, OSError if it cannot be read."""
    try:
        return parse_json(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not JSON ({e})") from None


def read_json_object(path) -> dict:
    """`read_json` of a file that must hold an object. Raises ValueError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
