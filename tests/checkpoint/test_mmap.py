"""A memory-mapped model equals a loaded one, uses the pages of its file, and never writes to the file."""

from pathlib import Path

import pytest
import torch

from regard.checkpoint import load, save
from tests.laws import MODELS, assert_equal_weights, build, error, random_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(build(MODELS["grouped-query"], torch.float32), tmp_path / "model")
    return tmp_path / "model"


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is a map of a safetensors file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(".safetensors")
    return False


def test_mapped_equals_loaded(folder: Path) -> None:
    loaded, mapped = load(folder), load(folder, mmap=True)
    assert_equal_weights(mapped, loaded)
    assert error(mapped(random_ids(2, 9)), loaded(random_ids(2, 9))) <= 1e-5
    assert all(is_mapped(parameter) for parameter in mapped.parameters())
    assert not any(is_mapped(parameter) for parameter in loaded.parameters())


def test_cast_tensors_are_not_mapped(folder: Path) -> None:
    model = load(folder, dtype=torch.float64, mmap=True)
    assert not any(is_mapped(parameter) for parameter in model.parameters())


def test_updates_do_not_change_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder, mmap=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(model(random_ids(1, 5)), load(folder)(random_ids(1, 5)))
