"""Folders with something changed at random: a typed error or a valid reading of valid bytes, never anything else.

Every one takes less than two seconds and 200 MB above the idle process.
"""

import shutil
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from regard.checkpoint import CheckpointError, load, save
from regard.checkpoint.safetensors_header import tensors
from regard.families import FAMILIES, FamilyError
from regard.spec import SpecError
from regard.weights.table import WeightsError
from tests.checkpoint.mutations import TENSOR_FILES, change_bytes, folders, mutated
from tests.checkpoint.test_model import shard

TYPED = (CheckpointError, WeightsError, FamilyError, SpecError)
SOME = ("llama", "gpt2", "bert", "t5", "mixtral", "mamba", "vit")
PROCESS = Path("/proc/self")


def resident(field: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def judged(folder: Path) -> bool:
    """Whether the folder is refused; it must be refused or read in time, and in little memory."""
    (PROCESS / "clear_refs").write_text("5")  # VmHWM is the peak from here on
    idle, start, refused = resident("VmRSS"), time.process_time(), False
    try:
        load(folder)
    except TYPED:
        refused = True
    assert time.process_time() - start < 2
    assert resident("VmHWM") - idle < 200e6
    return refused


@pytest.mark.parametrize(
    ("families", "trials"),
    [(SOME, 1500), pytest.param((*FAMILIES,), 7500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["some", "all"],
)
def test_every_change_is_understood_or_refused(families: tuple[str, ...], trials: int, tmp_path: Path) -> None:
    whole = folders(tmp_path / "whole", families)
    shutil.copytree(tmp_path / "whole" / "llama", tmp_path / "whole" / "shards")
    shard(tmp_path / "whole" / "shards")
    save(load(whole[0]), tmp_path / "whole" / "own")
    (tmp_path / "whole" / "own" / "manifest.json").unlink()
    whole = sorted((tmp_path / "whole").iterdir())
    for folder in whole:
        load(folder)  # what is imported on first use is no part of a trial
    random, refused = Random(0), 0
    for trial in range(trials):
        folder = whole[trial % len(whole)]
        file = random.choice(sorted(folder.iterdir()))
        content = file.read_bytes()
        file.write_bytes(mutated(file, random))
        try:
            refused += judged(folder)
        except BaseException as error:
            raise AssertionError(f"trial {trial}: {file}") from error
        file.write_bytes(content)
    assert refused > trials / 2


@pytest.mark.parametrize("trials", [600, pytest.param(6000, marks=pytest.mark.slow)])
def test_what_is_read_is_what_the_library_reads(trials: int, tmp_path: Path) -> None:
    """A header that passes here passes there, and holds the same numbers."""
    (folder,) = folders(tmp_path, ("gpt2",))
    file, random, read = folder / "model.safetensors", Random(1), 0
    content = file.read_bytes()
    for _ in range(trials):
        file.write_bytes(random.choice((*TENSOR_FILES, change_bytes))(content, random))
        try:
            found = tensors(file, lambda stored: stored)
        except CheckpointError:
            continue
        theirs = load_file(file)
        assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {n: t.shape for n, t in found.items()}
        floats = [name for name, tensor in theirs.items() if tensor.is_floating_point() and tensor.itemsize > 1]
        assert all(torch.equal(bits(found[name].read()), bits(theirs[name])) for name in floats)
        read += 1
    assert read > trials / 50


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
