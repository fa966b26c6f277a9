"""`regard serve` of a tiny model as a process, as users run it."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import regard
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.train import byte


def save_tiny(folder: Path) -> Path:
    """A random model with a tokenizer of bytes."""
    block = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    model = Decoder(vocab=261, width=32, layers=(Repeat((block,), 2),), context=1024).build(seed=3)
    regard.save(LanguageModel(model, byte(), context=64, rows=1), folder)
    return folder


def read_url(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The URL of a server that is starting, and what it has printed to stderr until then."""
    assert process.stderr is not None
    printed = ""
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", printed)):
        line = process.stderr.readline()
        assert line, f"the server did not start: {printed}"
        printed += line
    return found[0], printed


@contextmanager
def serve_process(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL; the model's name is tiny. It is killed at the end if it is still running."""
    command = [sys.executable, "-m", "regard", "serve", f"tiny={folder}", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        messages = process.stderr
        assert messages is not None
        try:
            url, _ = read_url(process)
            log: deque[str] = deque(maxlen=50)  # read all the time, because a full pipe would block the server
            reading = threading.Thread(target=lambda: log.extend(messages), daemon=True)
            reading.start()
            try:
                yield process, url
            except Exception as error:
                error.add_note(f"the server's status is {process.poll()} and its log ends:\n{''.join(log)}")
                raise
            finally:
                process.kill()
                reading.join()  # before the pipe is closed
        finally:
            process.kill()


def resident_bytes(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def open_sockets(process: subprocess.Popen[str]) -> int:
    """Not all files: torch opens some when it first needs them."""
    links = [os.path.realpath(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()]
    return sum(Path(link).name.startswith("socket:") for link in links)


def children(process: subprocess.Popen[str]) -> list[str]:
    """The processes that this one has started; none if it has ended."""
    found: list[str] = []
    for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found += task.read_text().split()
    return found
