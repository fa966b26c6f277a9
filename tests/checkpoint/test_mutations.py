"""Model folders with random changes are loaded or refused with a typed error.

Each attempt takes less than two seconds, and less than 200 MB above the idle process.
"""

import shutil
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from regard.checkpoint import CheckpointError, load, save
from regard.checkpoint.safetensors_header import open_tensors
from regard.families import FAMILIES, FamilyError
from regard.spec import SpecError
from regard.weights.table import WeightsError
from tests.checkpoint.mutations import TENSOR_FILES, change_bytes, export_folders, mutate
from tests.checkpoint.test_model_folder import split_into_shards

TYPED_ERRORS = (CheckpointError, WeightsError, FamilyError, SpecError)
FEW_FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral", "mamba", "vit")
PARTS = 5
PROCESS = Path("/proc/self")


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def is_refused(folder: Path) -> bool:
    """Whether loading the folder raises a typed error; asserts the limits on time and memory."""
    (PROCESS / "clear_refs").write_text("5")  # resets VmHWM, the peak
    idle, start, refused = memory("VmRSS"), time.process_time(), False
    try:
        load(folder)
    except TYPED_ERRORS:
        refused = True
    assert time.process_time() - start < 2
    assert memory("VmHWM") - idle < 200e6
    return refused


# A mutated name or number can result in a valid folder that is loaded with one of these warnings.
@pytest.mark.filterwarnings("ignore:.*auto_map in config.json names is never run:UserWarning")
@pytest.mark.filterwarnings("ignore:.*the config ties .* but the files hold different numbers:UserWarning")
@pytest.mark.filterwarnings("ignore:switch_transformers. expert_capacity:UserWarning")
@pytest.mark.parametrize(
    ("families", "trials"),
    [
        (FEW_FAMILIES, 500),
        *(  # all families, in parts that parallel processes share
            pytest.param((*FAMILIES,)[part::PARTS], 7500 // PARTS, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for part in range(PARTS)
        ),
    ],
    ids=["some", *(f"part {part}" for part in range(PARTS))],
)
def test_every_mutation_is_loaded_or_refused(families: tuple[str, ...], trials: int, tmp_path: Path) -> None:
    base = tmp_path / "valid"
    exported = export_folders(base, (*families, "llama"))
    shutil.copytree(base / "llama", base / "shards")
    split_into_shards(base / "shards")
    save(load(exported[0]), base / "saved")
    (base / "saved" / "manifest.json").unlink()
    valid = sorted(base.iterdir())
    for folder in valid:
        load(folder)  # imports on first use are not part of a trial
    random, refused = Random(repr(families)), 0
    for trial in range(trials):
        folder = valid[trial % len(valid)]
        file = random.choice(sorted(folder.iterdir()))
        content = file.read_bytes()
        file.write_bytes(mutate(file, random))
        try:
            refused += is_refused(folder)
        except BaseException as error:
            raise AssertionError(f"trial {trial}: {file}") from error
        file.write_bytes(content)
    assert refused > trials / 2


@pytest.mark.parametrize("trials", [600, pytest.param(6000, marks=pytest.mark.slow)])
def test_an_accepted_file_has_the_tensors_that_safetensors_reads(trials: int, tmp_path: Path) -> None:
    """A header that regard accepts is also accepted by the safetensors library, with the same values."""
    (folder,) = export_folders(tmp_path, ("gpt2",))
    file, random, accepted = folder / "model.safetensors", Random(1), 0
    content = file.read_bytes()
    for _ in range(trials):
        file.write_bytes(random.choice((*TENSOR_FILES, change_bytes))(content, random))
        try:
            found = open_tensors(file, lambda stored: stored)
        except CheckpointError:
            continue
        theirs = load_file(file)
        assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {n: t.shape for n, t in found.items()}
        floats = [name for name, tensor in theirs.items() if tensor.is_floating_point() and tensor.itemsize > 1]
        assert all(torch.equal(bits(found[name].read()), bits(theirs[name])) for name in floats)
        accepted += 1
    assert accepted > trials / 50


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
