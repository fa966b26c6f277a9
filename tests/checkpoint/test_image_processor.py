"""Pixels equal those of the image processors of `transformers`, from tensors and from files."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from regard.checkpoint import CheckpointError
from regard.checkpoint.image_processor import (
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    ImageProcessor,
    load_image_processor,
)
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
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(**PROCESSORS[name])
    theirs.save_pretrained(tmp_path)
    expected = theirs([image.numpy() for image in random_images()], return_tensors="pt").pixel_values
    found = load_image_processor(tmp_path)(random_images())
    assert found.shape == expected.shape == (2, 3, 12, 16)
    assert found.dtype == expected.dtype
    assert error(found, expected) <= 1e-6


def processor_with(folder: Path, **settings: Any) -> ImageProcessor:
    content = json.dumps({"image_mean": [0.5], "image_std": [0.5], **settings})
    (folder / PREPROCESSOR_CONFIG).write_text(content)
    return load_image_processor(folder)


def test_absent_settings_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    assert processor_with(tmp_path) == ImageProcessor((0.5,), (0.5,), 1 / 255)
    assert processor_with(tmp_path, do_rescale=False).scale == 1.0
    assert torch.equal(processor_with(tmp_path)(torch.tensor([[[0], [255]]])), torch.tensor([[[-1.0, 1.0]]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_std": [0.0]}, r"image_std=\(0.0,\) must have one positive number for each of 1"),
        ({"image_std": [1, 1]}, "must have one positive number for each of 1"),
        ({"image_mean": ["a"]}, "image_mean=.* must be a"),
        ({"image_mean": None}, "the config has no 'image_mean'"),
        ({"do_rescale": 1}, "do_rescale=1 must be bool"),
        ({"size": {"longest_edge": 3}}, "size=.* must have .'height', 'width'. or .'shortest_edge'"),
        ({"size": 10**9}, "size=1000000000 must have .* from 1 to 8192 pixels"),
        ({"crop_size": {"shortest_edge": 3}}, "crop_size=.* must have"),
        ({"resample": 9}, "resample=9 must be one of Pillow's filters"),
        ({"do_pad": True, "image_processor_type": "CLIPImageProcessor"}, "do_pad=True is not supported"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, FamilyError), match=message):
        processor_with(tmp_path, **settings)


def test_a_wrong_number_of_channels_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"images of shape \(2, 12, 16, 3\) must end in 1 channels"):
        processor_with(tmp_path)(random_images())
    with pytest.raises(CheckpointError, match="is missing"):
        load_image_processor(tmp_path / "elsewhere")


SQUARE = {"height": 12, "width": 12}
SETTINGS = {
    "defaults": {},
    "shorter side, crop": {"size": {"shortest_edge": 14}, "crop_size": SQUARE},
    "fixed size, no crop": {"size": {"height": 9, "width": 13}, "do_center_crop": False, "resample": 2},
    "smaller than the crop, not normalized": {"size": {"shortest_edge": 7}, "crop_size": SQUARE, "do_normalize": False},
    "only cropped": {"do_resize": False, "crop_size": {"height": 8, "width": 7}, "do_rescale": False},
    "other statistics": {"image_mean": [0.5] * 3, "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.1},
}


def random_pictures() -> list[Image.Image]:
    """A wide, a tall, a transparent and a grey image."""
    generator = np.random.default_rng(0)
    shapes = ((23, 31, 3), (40, 17, 3), (9, 9, 4), (12, 15))
    return [Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["CLIP", "Llava", "ViT"])
def test_images_of_any_size_equal_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    padding = {"do_pad": True} if kind == "Llava" else {}
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")(**SETTINGS[name], **padding)
    theirs.save_pretrained(tmp_path)
    ours = load_image_processor(tmp_path)
    pictures = random_pictures()[: 2 if kind == "ViT" else 4]  # ViT's processor does not convert to RGB
    for n, image in enumerate(pictures):
        (expected,) = theirs([image])["pixel_values"]
        image.save(tmp_path / f"{n}.png")
        for source in (image, tmp_path / f"{n}.png"):
            assert error(ours.read([source])[0], torch.as_tensor(expected)) <= 1e-6


def test_settings_of_older_and_newer_folders_are_read(tmp_path: Path) -> None:
    older = processor_with(tmp_path, feature_extractor_type="CLIPFeatureExtractor", size=14, crop_size=12)
    assert older == ImageProcessor((0.5,), (0.5,), resize=14, crop=(12, 12))
    settings = json.loads((tmp_path / PREPROCESSOR_CONFIG).read_text())
    (tmp_path / PREPROCESSOR_CONFIG).unlink()
    (tmp_path / PROCESSOR_CONFIG).write_text(json.dumps({"patch_size": 14, "image_processor": settings}))
    assert load_image_processor(tmp_path) == older


def test_unreadable_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ImageProcessor((0.5,) * 3, (0.5,) * 3)
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "missing.png"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as an image"):
            ours.read([tmp_path / name])
    for size in ((0, 10), (10, 0)):
        with pytest.raises(
            ValueError, match=f"an image has the size {size[0]} x {size[1]}; both sides must be positive"
        ):
            ours.read([Image.new("RGB", size)])
    with pytest.raises(ValueError, match=r"images\[1\] is of type Tensor; expected a path or a Pillow image"):
        ours.read([Image.new("RGB", (2, 2)), torch.zeros(3, 2, 2)])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"needs Pillow: pip install 'regard\[images\]'"):
        ours.read(["picture.png"])
