"""Damaged checkpoints: truncated, changed, deleted and exchanged files are all detected, the previous one is used."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.training.run import Run
from tests.training.tiny import TOKENIZER, outcome, trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Two equal runs, except for their ids."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        trainer(folder / name, tokenizer=TOKENIZER).train()
    return folder / "a", folder / "b"


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randint(1, 64))


def overwrite(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    zeros = bytes(min(rng.randint(1, 512), len(data) - start))
    return data[:start] + zeros + data[start + len(zeros) :]


CONTENTS: list[Callable[[bytes, random.Random], bytes]] = [flip, truncate, append, overwrite]


def damage(newest: Path, previous: Path, foreign: Path, rng: random.Random) -> str:
    """Damage the newest checkpoint; returns a description. A change that leaves all bytes equal is tried again."""
    kind = rng.choice(["content", "content", "delete", "exchange file", "exchange folder", "two files"])
    if kind == "exchange folder":
        source = rng.choice([previous, foreign])
        shutil.rmtree(newest)
        shutil.copytree(source, newest)
        return f"{kind} with {source}"
    files = rng.sample(sorted(newest.iterdir()), 2 if kind == "two files" else 1)
    before = {file: file.read_bytes() for file in files}
    for file in files:
        if kind == "delete":
            file.unlink()
        elif kind == "exchange file":
            shutil.copy(rng.choice([previous, foreign]) / file.name, file)
        else:
            file.write_bytes(rng.choice(CONTENTS)(before[file], rng))
    if all(file.exists() and file.read_bytes() == before[file] for file in files):
        return damage(newest, previous, foreign, rng)
    return f"{kind} of {', '.join(file.name for file in files)}"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 50))])
def test_every_damage_is_detected_and_the_previous_checkpoint_used(tmp_path: Path, runs, seed: int) -> None:
    """Ten damages per seed; the last one is resumed, and ends like the undisturbed run."""
    rng, (original, foreign) = random.Random(seed), runs
    for trial in range(10):
        path = tmp_path / f"{trial}"
        shutil.copytree(original, path)
        newest, previous = Run(path).checkpoints
        what = damage(newest, previous, foreign / "checkpoints" / newest.name, rng)
        notes: list[str] = []
        assert Run(path).latest(notes.append) == previous, what
        assert len(notes) == 1 and newest.name in notes[0], what
    trainer(path, tokenizer=TOKENIZER).train()
    assert outcome(path) == outcome(original), what
