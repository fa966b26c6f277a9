"""What the README says works: its Python runs, its commands run (trainings for a few steps), its files exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines() if line.startswith("regard ")]


@pytest.mark.parametrize("snippet", blocks("python"))
def test_python_runs(snippet: str) -> None:
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", README):
        assert target in targets, target


def test_links_have_targets() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_commands_run(tmp_path: Path, demo_run: Path) -> None:
    """In their order in the README, with a smaller model or less data; `serve` and `chat` have tests of their own."""
    from tests.cli.conftest import regard

    places = {"runs/mine": "mine", "exported": "exported", "models/mine": "imported"}
    folders = {"runs/demo": str(demo_run), **{word: str(tmp_path / name) for word, name in places.items()}}
    smaller = {
        "train": ("--train.steps=2", "--data.rows=2", "--data.length=64", "--tokenizer.documents=50"),
        "verify": ("--model.width=48", "--tokenizer.by=byte", "--length=24"),
    }
    for words in map(shlex.split, COMMANDS):
        if words[1] in ("serve", "chat"):
            continue
        options = () if "--resume" in words else smaller.get(words[1], ())
        done = regard(*(folders.get(word, word) for word in words[1:]), *options)
        assert done.exit_code == 0, f"{shlex.join(words)}: {done.output} {done.exception}"
