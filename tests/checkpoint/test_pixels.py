"""Images become the numbers that `transformers` makes of them, where they need no resizing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checkpoint import CheckpointError
from regard.checkpoint.image_processor import FILE, Pixels, pixels
from regard.families import FamilyError
from tests.laws import error

PROCESSORS = {
    "ViT": {"size": {"height": 12, "width": 16}},
    "CLIP": {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 16}},
    "Siglip": {"size": {"height": 12, "width": 16}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 2.0]},
    "DeiT": {"size": {"height": 12, "width": 16}, "crop_size": {"height": 12, "width": 16}, "do_normalize": False},
}


def values() -> torch.Tensor:
    return torch.randint(256, (2, 12, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_same_numbers(name: str, tmp_path: Path) -> None:
    module = pytest.importorskip(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}")
    theirs = getattr(module, f"{name}ImageProcessorPil")(**PROCESSORS[name])
    theirs.save_pretrained(tmp_path)
    expected = theirs([image.numpy() for image in values()], return_tensors="pt").pixel_values
    found = pixels(tmp_path)(values())
    assert found.shape == expected.shape == (2, 3, 12, 16)
    assert found.dtype == expected.dtype
    assert error(found, expected) <= 1e-6


def told(folder: Path, **settings: Any) -> Pixels:
    (folder / FILE).write_text(json.dumps({"image_mean": [0.5], "image_std": [0.5], **settings}))
    return pixels(folder)


def test_what_is_not_said_is_usual(tmp_path: Path) -> None:
    assert told(tmp_path) == Pixels((0.5,), (0.5,), 1 / 255)
    assert told(tmp_path, do_rescale=False).scale == 1.0
    assert torch.equal(told(tmp_path)(torch.tensor([[[0], [255]]])), torch.tensor([[[-1.0, 1.0]]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_std": [0.0]}, r"image_std=\(0.0,\) should be a positive number for each of 1"),
        ({"image_std": [1, 1]}, "should be a positive number for each of 1"),
        ({"image_mean": ["a"]}, "image_mean=.* must be a"),
        ({"image_mean": None}, "the config has no 'image_mean'"),
        ({"do_rescale": 1}, "do_rescale=1 must be bool"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, FamilyError), match=message):
        told(tmp_path, **settings)


def test_other_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"images of shape \(2, 12, 16, 3\) should end in 1 channels"):
        told(tmp_path)(values())
    with pytest.raises(CheckpointError, match="is missing"):
        pixels(tmp_path / "elsewhere")
