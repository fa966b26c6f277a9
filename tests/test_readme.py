"""The README is correct: its Python runs, its commands run (trainings for a few steps), its files exist."""

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
def test_python_examples_run(snippet: str) -> None:
    result = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", README):
        assert target in targets, target


def test_links_have_targets() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_commands_run(tmp_path: Path, demo_run: Path) -> None:
    """They run in the README's order, with smaller models or less data; other tests run `serve`, `chat` and `agent`."""
    from tests.cli.conftest import regard

    folder_names = {"runs/mine": "mine", "exported": "exported", "models/mine": "imported", "lens.html": "lens.html"}
    folder_names |= {"models/int4": "int4"}
    folder_names |= {name: name for name in ("my.txt", "held_out.txt", "capitals.toml", "docs", "docs.index")}
    for text in ("my.txt", "held_out.txt"):
        (tmp_path / text).write_text("Anna goes to the kitchen. Ben is in the barn.\n" * 100, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "models.md").write_text("# Models\n\nA model is quantized in one step.\n", encoding="utf-8")
    row = '{"prompt": "Capital of France:", "choices": ["Paris", "Rome"], "answer": 0}'
    (tmp_path / "capitals.jsonl").write_text(row, encoding="utf-8")
    (tmp_path / "capitals.toml").write_text('kind = "choice"\ndata = "capitals.jsonl"\n', encoding="utf-8")
    folders = {
        "runs/demo": str(demo_run),
        "smollm2": str(demo_run),
        **{argument: str(tmp_path / name) for argument, name in folder_names.items()},
    }
    smaller = {
        "train": ("--train.steps=2", "--data.rows=2", "--data.length=64", "--tokenizer.documents=50"),
        "verify": ("--model.width=48", "--tokenizer.by=byte", "--length=24"),
        "compare": ("--tokens=64", "--no-speed"),
        "quantize": ("--tokens=256", "--test-tokens=256", "--length=64"),
    }
    for arguments in map(shlex.split, COMMANDS):
        if arguments[1] in ("serve", "chat", "agent"):
            continue
        options = () if "--resume" in arguments else smaller.get(arguments[1], ())
        result = regard(*(folders.get(argument, argument) for argument in arguments[1:]), *options)
        assert result.exit_code == 0, f"{shlex.join(arguments)}: {result.output} {result.exception}"
