"""The settings of images and patches: a size is one number, or height and width.

If a side is not a multiple of the patch, the remaining pixels are not used (SigLIP: patches of 14 in images of 384).
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import require_type
from regard.parts.input import Input
from regard.parts.patches import Patches
from regard.weights.ops import Reshape


def read_patches(hf_config: Config, size: int, registers: int = 0, cls: bool = True, bias: bool = True) -> Patches:
    """`size` is the default patch size of the family's class."""
    patch, image = height_and_width(hf_config, "patch_size", size), height_and_width(hf_config, "image_size", 224)
    remainder = any(side % max(step, 1) for side, step in zip(image, patch, strict=True))
    channels = hf_config.integer("num_channels", 3)
    return Patches(patch, image, channels, stride=patch if remainder else (), cls=cls, registers=registers, bias=bias)


def height_and_width(hf_config: Config, key: str, default: int) -> tuple[int, ...]:
    found = hf_config.value(key, (int, list, tuple), default)
    if isinstance(found, int):
        return found, found
    if len(found) != 2:
        raise hf_config.error(key, found, "must be a number, or height and width")
    return hf_config.list_of(int, key)


def require_squares(patches: Patches, model_type: str) -> Patches:
    for key, found in (("image_size", patches.image), ("patch_size", patches.size)):
        if len({*found}) > 1:
            raise FamilyError(f"{model_type}: {key}={found} must be square, because its positions are a square grid")
    return patches


def image_config(input: Input) -> dict[str, Any]:
    """The keys that `read_patches` reads."""
    patches = require_type(input, Patches)
    sides = {"image_size": patches.image, "patch_size": patches.size}
    sizes = {key: value[0] if len({*value}) == 1 else list(value) for key, value in sides.items()}
    return sizes | {"num_channels": patches.channels}


def patch_kernel(input: Input) -> Reshape:
    """Converts our matrix that embeds a patch to the kernel of a convolution, and back."""
    patches = require_type(input, Patches)
    return Reshape((-1, patches.channels, *patches.size))
