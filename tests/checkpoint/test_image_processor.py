"""Pixels equal those of the image processors of `transformers`, for images that need no resizing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checkpoint import CheckpointError
from regard.checkpoint.image_processor import PREPROCESSOR_CONFIG, ImageProcessor, load_image_processor
from regard.families import FamilyError
from tests.laws import error

PROCESSORS = {
    "ViT": {"size": {"height": 12, "width": 16}},
    "CLIP": {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 16}},
    "Siglip": {"size": {"height": 12, "width": 16}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 2.0]},
    "DeiT": {"size": {"height": 12, "width": 16}, "crop_size": {"height": 12, "width": 16}, "do_normalize": False},
}


def random_images() -> torch.Tensor:
    return torch.randint(256, (2, 12, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    module = pytest.importorskip(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}")
    theirs = getattr(module, f"{name}ImageProcessorPil")(**PROCESSORS[name])
    theirs.save_pretrained(tmp_path)
    expected = theirs([image.numpy() for image in random_images()], return_tensors="pt").pixel_values
    found = load_image_processor(tmp_path)(random_images())
    assert found.shape == expected.shape == (2, 3, 12, 16)
    assert found.dtype == expected.dtype
    assert error(found, expected) <= 1e-6


def processor(folder: Path, **settings: Any) -> ImageProcessor:
    content = json.dumps({"image_mean": [0.5], "image_std": [0.5], **settings})
    (folder / PREPROCESSOR_CONFIG).write_text(content)
    return load_image_processor(folder)


def test_absent_settings_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    assert processor(tmp_path) == ImageProcessor((0.5,), (0.5,), 1 / 255)
    assert processor(tmp_path, do_rescale=False).scale == 1.0
    assert torch.equal(processor(tmp_path)(torch.tensor([[[0], [255]]])), torch.tensor([[[-1.0, 1.0]]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_std": [0.0]}, r"image_std=\(0.0,\) must have one positive number for each of 1"),
        ({"image_std": [1, 1]}, "must have one positive number for each of 1"),
        ({"image_mean": ["a"]}, "image_mean=.* must be a"),
        ({"image_mean": None}, "the config has no 'image_mean'"),
        ({"do_rescale": 1}, "do_rescale=1 must be bool"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, FamilyError), match=message):
        processor(tmp_path, **settings)


def test_images_with_other_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"images of shape \(2, 12, 16, 3\) must end in 1 channels"):
        processor(tmp_path)(random_images())
    with pytest.raises(CheckpointError, match="is missing"):
        load_image_processor(tmp_path / "elsewhere")
