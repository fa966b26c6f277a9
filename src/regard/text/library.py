"""The faults of the `tokenizers` library, as one kind of error.

It raises bare Exception for whatever is wrong with a file or a text, and panics where it foresaw nothing, as when a
file's pattern tries too many ways on a text. A panic is no Exception to Python, and would end a whole server.
"""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def faults(meaning: str) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # which no module exports
            raise ValueError(f"{meaning} ({error})") from error
        raise
