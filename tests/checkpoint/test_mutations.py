"""Folders with something changed at random: a typed error or a valid reading of valid bytes, never anything else."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from regard.checkpoint import CheckpointError, export, load, save
from regard.families import FamilyError, family
from regard.spec import SpecError
from regard.weights.table import WeightsError
from tests.checkpoint.test_model import LLAMA, shard
from tests.laws import build

TYPED = (CheckpointError, WeightsError, FamilyError, SpecError)
VALUES = [0, -1, 1, 3, 1 << 31, 1 << 63, 10**30, 1e308, -0.5, float("nan"), "", None, True, [], {}, [1], "xyz"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Foreign, foreign in shards, and our own without the sums that would find every change at once."""
    base, model = tmp_path_factory.mktemp("good"), build(family("llama").spec(LLAMA), torch.float32)
    export(model, base / "single", "llama")
    export(model, base / "shards", "llama")
    shard(base / "shards")
    save(model, base / "own")
    for manifest in base.rglob("manifest.json"):
        manifest.unlink()
    return sorted(base.iterdir())


def change_a_value(content: bytes, random: Random) -> bytes:
    tree, spots = json.loads(content), []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            spots.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    node, key = random.choice(spots)
    if isinstance(node, dict) and random.random() < 0.2:
        del node[key]
    else:
        node[key] = random.choice(VALUES)
    return json.dumps(tree).encode()


def change_bytes(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice([1, 3])):
        changed[random.randrange(min(len(changed), random.choice([8, 600])))] = random.randrange(256)
    return bytes(changed[: random.randrange(len(changed))] if random.random() < 0.1 else changed)


@pytest.mark.parametrize("trials", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_every_change_is_understood_or_refused(trials: int, folders: list[Path], tmp_path: Path) -> None:
    random, refused = Random(0), 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        shutil.copytree(random.choice(folders), folder)
        file = random.choice(sorted(folder.iterdir()))
        change = change_a_value if file.suffix == ".json" and random.random() < 0.8 else change_bytes
        file.write_bytes(change(file.read_bytes(), random))
        try:
            load(folder)
        except TYPED:
            refused += 1
        shutil.rmtree(folder)
    assert refused > trials / 2
