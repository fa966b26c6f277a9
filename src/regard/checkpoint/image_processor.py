"""How the images of a folder's model become numbers, as its `preprocessor_config.json` says.

    pixel_c = (value_c · scale - mean_c) / std_c          values from 0 to 255, channel by channel

Images are given in the size that the model reads. How another one is resized is not taken over: every library's filter
gives numbers of its own.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.checkpoint.folder import CheckpointError
from regard.checkpoint.weight_files import read_json
from regard.families.common.config_reader import Config

FILE = "preprocessor_config.json"


@dataclass(frozen=True)
class Pixels:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255

    def __call__(self, images: Tensor) -> Tensor:
        """Values (…, height, width, C) -> what a model reads, (…, C, height, width)"""
        if images.shape[-1:] != (len(self.mean),):
            raise ValueError(f"images of shape {tuple(images.shape)} should end in {len(self.mean)} channels")
        x = images.double() * self.scale
        x = (x - x.new_tensor(self.mean)) / x.new_tensor(self.std)
        return x.to(torch.float32).movedim(-1, -3)


def pixels(folder: str | Path) -> Pixels:
    theirs = Config(FILE, read_json(Path(folder) / FILE))
    scale = theirs.number("rescale_factor", 1 / 255) if theirs.flag("do_rescale", True) else 1.0
    if not theirs.flag("do_normalize", True):
        return Pixels((0.0,) * 3, (1.0,) * 3, scale)
    mean, std = theirs.numbers("image_mean"), theirs.numbers("image_std")
    if len(mean) != len(std) or not all(deviation > 0 for deviation in std):
        raise CheckpointError(f"{folder}/{FILE}: image_std={std} should be a positive number for each of {len(mean)}")
    return Pixels(mean, std, scale)
