"""The image processor of a folder's model, from its `preprocessor_config.json`: rescaling and normalization.

    pixel_c = (value_c · scale - mean_c) / std_c          values from 0 to 255, per channel c

Images must have the size that the model expects. Resizing is left to the caller, because the filters of image libraries
give different values.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import read_json
from regard.families.common.config_reader import Config

PREPROCESSOR_CONFIG = "preprocessor_config.json"


@dataclass(frozen=True)
class ImageProcessor:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255

    def __call__(self, images: Tensor) -> Tensor:
        """Values (…, height, width, C) -> pixels (…, C, height, width) in float32"""
        if images.shape[-1:] != (len(self.mean),):
            raise ValueError(
                f"images of shape {tuple(images.shape)} must end in {len(self.mean)} channels; put the channels last"
            )
        x = images.double() * self.scale
        x = (x - x.new_tensor(self.mean)) / x.new_tensor(self.std)
        return x.to(torch.float32).movedim(-1, -3)


def load_image_processor(folder: str | Path) -> ImageProcessor:
    config = Config(PREPROCESSOR_CONFIG, read_json(Path(folder) / PREPROCESSOR_CONFIG))
    scale = config.number("rescale_factor", 1 / 255) if config.flag("do_rescale", True) else 1.0
    if not config.flag("do_normalize", True):
        return ImageProcessor((0.0,) * 3, (1.0,) * 3, scale)
    mean, std = config.numbers("image_mean"), config.numbers("image_std")
    if len(mean) != len(std) or not all(deviation > 0 for deviation in std):
        raise CheckpointError(
            f"{folder}/{PREPROCESSOR_CONFIG}: image_std={std} must have one positive number for each of {len(mean)} "
            "channels"
        )
    return ImageProcessor(mean, std, scale)
