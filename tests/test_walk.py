"""One generated token passes through few files of the package, and the maintainers' page lists exactly these."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import regard
from regard import language_model
from regard.cli import app
from regard.engine.engine import Engine
from tests.training.tiny import TOKENIZER

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "src" / "regard") + "/"
MAX_FILES = 32


@contextmanager
def trace_files() -> Iterator[set[str]]:
    """The files of the package whose functions are called inside the block."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_filename.removeprefix(str(ROOT) + "/"))

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(previous)


def small_llama(folder: Path) -> Path:
    mixer = regard.Attention(4, kv_heads=2, position=regard.Rope())
    block = regard.Block((regard.Sublayer(mixer), regard.Sublayer(regard.SwiGLU(64))))
    spec = regard.Decoder(TOKENIZER.vocab_size, 32, (regard.Repeat((block,), 2),), context=128)
    regard.save(spec.build(seed=0), folder, TOKENIZER)
    return folder


def test_one_token_passes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The last decode step of `regard generate`: from the engine's step to the text that is printed."""
    folder = small_llama(tmp_path / "llama")
    steps: list[set[str]] = []
    step, push = Engine.step, language_model.TextStream.push

    def traced_step(self: Engine) -> object:
        with trace_files() as files:
            produced = step(self)
        steps.append(files)
        return produced

    def traced_push(self: object, token: object) -> str:
        with trace_files() as files:
            text = push(self, token)
        steps[-1] |= files
        return text

    monkeypatch.setattr(Engine, "step", traced_step)
    monkeypatch.setattr(language_model.TextStream, "push", traced_push)
    arguments = ["generate", str(folder), "--prompt", "Anna is", "--max-new", "6", "--temperature", "0"]
    app(arguments, standalone_mode=False)
    assert "Anna is" in capsys.readouterr().out
    outer_files = {
        f"src/regard/{name}.py" for name in ("cli/__init__", "cli/generate", "language_model", "text_generation")
    }
    files = steps[-1] | outer_files
    listed = listed_files()
    assert files == listed, f"differs from docs/maintainers/walk.md in {sorted(files ^ listed)}"
    assert len(files) <= MAX_FILES, sorted(files)


def listed_files() -> set[str]:
    text = (ROOT / "docs" / "maintainers" / "walk.md").read_text(encoding="utf-8")
    section = text.partition("## One token")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(src/regard/[\w/]+\.py)`", section, re.MULTILINE))
