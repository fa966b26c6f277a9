"""Reading the files of a tokenizer: none past all measure, and what is no JSON object is named."""

import json
from pathlib import Path
from typing import Any

LARGEST_FILE = 256 << 20  # bytes; the files of the largest vocabularies have some thirty million


def read_bytes(path: Path) -> bytes:
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; more than {LARGEST_FILE} are not read")
    return path.read_bytes()


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); fetch or save it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch or save it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object; fetch or save it again")
    return value
