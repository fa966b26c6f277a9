"""The image processor of a folder's model, from its `preprocessor_config.json`.

    pad to a square -> resize -> crop the center -> rescale and normalize each channel c:
    pixel_c = (value_c · scale - mean_c) / std_c          values from 0 to 255

The steps are those of the CLIP, LLaVA, SigLIP and ViT processors in `transformers`. Reading and resizing images needs
Pillow, an optional package; arrays of pixel values in the size that the model expects do not need it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import read_json
from regard.families.common.config_reader import Config
from regard.image_file import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

PREPROCESSOR_CONFIG = "preprocessor_config.json"
PROCESSOR_CONFIG = "processor_config.json"  # of newer folders, with the same settings in `image_processor`
MAX_SIDE = 8192  # pixels
BICUBIC, LAST_FILTER = 3, 5  # of PIL.Image.Resampling

Images: TypeAlias = "str | Path | Image | Sequence[str | Path | Image]"  # one image, or several


@dataclass(frozen=True)
class ImageProcessor:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    pad: tuple[int, ...] | None = None  # the color of the border that makes images square
    resize: tuple[int, int] | int | None = None  # (height, width), or the shorter side, which keeps the aspect ratio
    resample: int = BICUBIC
    crop: tuple[int, int] | None = None  # (height, width)

    def __call__(self, images: Tensor) -> Tensor:
        """Values (…, height, width, C) -> pixels (…, C, height, width) in float32"""
        if images.shape[-1:] != (len(self.mean),):
            raise ValueError(
                f"images of shape {tuple(images.shape)} must end in {len(self.mean)} channels; put the channels last"
            )
        x = images.double() * self.scale
        x = (x - x.new_tensor(self.mean)) / x.new_tensor(self.std)
        return x.to(torch.float32).movedim(-1, -3)

    def read(self, images: Images) -> Tensor:
        """Image files or Pillow images -> pixels (n, C, height, width)"""
        gray = len(self.mean) == 1
        opened = [np.array(self.resized(open_image(image, gray))) for image in image_list(images)]
        return torch.stack([self(torch.from_numpy(values[..., None] if gray else values)) for values in opened])

    def resized(self, image: "Image") -> "Image":
        """An RGB or gray image after padding, resizing and cropping."""
        from PIL import Image

        if self.pad is not None and image.width != image.height:
            side = max(image.size)
            square = Image.new(image.mode, (side, side), self.pad)
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = square
        if self.resize is not None:
            short, size = min(image.size), self.resize
            height, width = (
                (int(size * side / short) for side in (image.height, image.width)) if isinstance(size, int) else size
            )
            image = image.resize((width, height), Image.Resampling(self.resample))
        if self.crop is not None:
            height, width = self.crop
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))  # black where the image is smaller
        return image


def image_list(images: Any) -> "list[str | Path | Image]":
    """The images of one prompt as a list; a single path or Pillow image is one image."""
    if is_image(images):
        return [images]
    if not isinstance(images, Sequence):
        raise ValueError(
            f"images is of type {type(images).__name__}; expected a path or a Pillow image, or a list of them"
        )
    for i, image in enumerate(images):
        if not is_image(image):
            raise ValueError(
                f"images[{i}] is of type {type(image).__name__}; expected a path or a Pillow image "
                "(PIL.Image.fromarray converts an array)"
            )
    return list(images)


def images_per_prompt(images: Any, prompts: int) -> Sequence[Any]:
    """The sequences of images of several prompts, one per prompt; `images` may be empty."""
    expected = "expected one list of images per prompt, [] for a prompt without images"
    if is_image(images) or not isinstance(images, Sequence):
        raise ValueError(f"images is of type {type(images).__name__}; {expected}")
    if len(images) not in (0, prompts):
        raise ValueError(f"there are {prompts} prompts, but {len(images)} sequences of images; {expected}")
    for i, sequence in enumerate(images):
        if is_image(sequence) or not isinstance(sequence, Sequence):
            raise ValueError(f"images[{i}] is of type {type(sequence).__name__}; {expected}")
    return images or [()] * prompts


def is_image(value: Any) -> bool:
    """Whether the value is a path or a Pillow image."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return isinstance(value, str | Path)
    return isinstance(value, str | Path | Image.Image)


def vit_processor_config(size: Sequence[int], channels: int, standardized: bool) -> bytes:
    """A preprocessor_config.json: resize to (height, width), values from 0 to 1 or standardized to -1 to 1."""
    config = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size[0], "width": size[1]},
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5 if standardized else 0.0] * channels,
        "image_std": [0.5 if standardized else 1.0] * channels,
    }
    return json.dumps(config, indent=2).encode() + b"\n"


def has_image_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (PREPROCESSOR_CONFIG, PROCESSOR_CONFIG))


def load_image_processor(folder: str | Path) -> ImageProcessor:
    name = PREPROCESSOR_CONFIG
    if not (Path(folder) / name).is_file() and has_image_processor(Path(folder)):
        name = PROCESSOR_CONFIG
    config = Config(name, read_json(Path(folder) / name))
    config = config.nested("image_processor") if config.has("image_processor") else config
    scale = config.number("rescale_factor", 1 / 255) if config.flag("do_rescale", True) else 1.0
    mean, std = (0.0,) * 3, (1.0,) * 3
    if config.flag("do_normalize", True):
        mean, std = config.numbers("image_mean"), config.numbers("image_std")
    if len(mean) != len(std) or not all(deviation > 0 for deviation in std):
        raise CheckpointError(
            f"{folder}/{name}: image_std={std} must have one positive number for each of {len(mean)} channels"
        )
    processor_type, pad = config.value("image_processor_type", (str,), "CLIPImageProcessor"), None
    if not processor_type.startswith("Llava"):
        config.accept_only("do_pad", False)  # other processors pad after normalizing, which is not supported
    elif config.flag("do_pad", False):
        pad = tuple(int(255 * mean) for mean in config.numbers("image_mean"))
    resample = config.integer("resample", BICUBIC)
    if not 0 <= resample <= LAST_FILTER:
        raise config.error("resample", resample, f"must be one of Pillow's filters, 0 to {LAST_FILTER}")
    resize = read_size(config, "size", allow_shortest_edge=True) if config.flag("do_resize", True) else None
    center_crop = config.flag("do_center_crop", not processor_type.startswith(("ViT", "Siglip")))
    crop = read_size(config, "crop_size") if center_crop else None
    assert not isinstance(crop, int)
    return ImageProcessor(mean, std, scale, pad, resize, resample, crop)


def read_size(config: Config, key: str, allow_shortest_edge: bool = False) -> tuple[int, int] | int | None:
    """(height, width), or the shorter side if this is allowed; None if the key is absent.

    A single number in the config is the shorter side if this is allowed, otherwise both sides.
    """
    if not config.has(key):
        return None
    found = config.value(key, (int, dict), None)
    names = [("height", "width"), *([("shortest_edge",)] if allow_shortest_edge else [])]
    sides = dict.fromkeys(names[-1], found) if isinstance(found, int) else found
    for keys in names:
        if sorted(sides) == sorted(keys) and all(type(n) is int and 0 < n <= MAX_SIDE for n in sides.values()):
            return (sides["height"], sides["width"]) if len(keys) == 2 else sides["shortest_edge"]
    raise config.error(key, found, f"must have {' or '.join(map(str, names))}, from 1 to {MAX_SIDE} pixels")
