"""A mapped model is the same model: its pages are the file's until they are written to, and the file stays as it is."""

from pathlib import Path

import pytest
import torch

from regard.checkpoint import load, save
from tests.laws import MODELS, build, text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(build(MODELS["grouped-query"], torch.float32), tmp_path / "model")
    return tmp_path / "model"


def mapped(tensor: torch.Tensor) -> bool:
    """Does its memory lie in a file?"""
    place = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= place < last:
            return line.endswith(".safetensors")
    return False


def test_the_same_numbers_out_of_the_file(folder: Path) -> None:
    own, lent = load(folder), load(folder, mapped=True)
    assert torch.equal(own(text(2, 9)), lent(text(2, 9)))
    assert all(mapped(parameter) for parameter in lent.parameters())
    assert not any(mapped(parameter) for parameter in own.parameters())


def test_what_is_cast_is_owned(folder: Path) -> None:
    assert not any(mapped(parameter) for parameter in load(folder, dtype=torch.float64, mapped=True).parameters())


def test_training_does_not_write_into_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder, mapped=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(model(text(1, 5)), load(folder)(text(1, 5)))
