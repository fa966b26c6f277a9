"""Read tokenizer files that are not trusted: their size is bounded, and every fault is a ValueError naming the file."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 256 << 20  # the largest published tokenizer files have about 30 MB


def read_bytes(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes; files of more than {MAX_FILE_BYTES} bytes are not read")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The file as UTF-8, with `\\n` for all line endings."""
    try:
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); download or save it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download or save it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object; download or save it again")
    return value


@contextmanager
def library_errors(message: str) -> Generator[None]:
    """Convert every error of the `tokenizers` library to a ValueError with this message."""
    try:
        yield
    except BaseException as error:
        raise library_error(error, message) from error


def library_error(error: BaseException, message: str) -> BaseException:
    """The ValueError for an error of the `tokenizers` library; an interrupt or exit is returned unchanged.

    The library raises bare `Exception` for bad files and strings, and panics on states that it does not expect, such
    as a regular expression that exceeds its retry limit. A Rust panic is not an `Exception` in Python and would end a
    server.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # exported by no module
        return ValueError(f"{message} ({error})")
    return error
