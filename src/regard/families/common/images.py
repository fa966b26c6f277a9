"""How images are cut into patches, both ways: sizes are one number, or height and width.

A side that is no multiple of a patch has a rest that is not read (SigLIP: patches of 14 in 384).
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import require_type
from regard.parts.input import Input
from regard.parts.patches import Patches
from regard.weights.ops import Reshape


def patches(theirs: Config, size: int, registers: int = 0, cls: bool = True, bias: bool = True) -> Patches:
    """`size` is that of a patch where the config says none."""
    piece, image = sides(theirs, "patch_size", size), sides(theirs, "image_size", 224)
    rest = any(side % max(step, 1) for side, step in zip(image, piece, strict=True))
    channels = theirs.integer("num_channels", 3)
    return Patches(piece, image, channels, stride=piece if rest else (), cls=cls, registers=registers, bias=bias)


def sides(theirs: Config, key: str, default: int) -> tuple[int, ...]:
    found = theirs.value(key, (int, list, tuple), default)
    if isinstance(found, int):
        return found, found
    if len(found) != 2:
        raise FamilyError(f"{theirs.model_type}: {key}={found!r:.80} should be a number, or height and width")
    return theirs.each(key, int)


def only_squares(patches: Patches, model_type: str) -> Patches:
    for key, found in (("image_size", patches.image), ("patch_size", patches.size)):
        if len({*found}) > 1:
            raise FamilyError(f"{model_type}: {key}={found} is no square, which is all that its positions know")
    return patches


def cut(input: Input) -> dict[str, Any]:
    """What `patches` reads."""
    found = require_type(input, Patches)
    written = {"image_size": found.image, "patch_size": found.size}
    plain = {key: sides[0] if len({*sides}) == 1 else list(sides) for key, sides in written.items()}
    return plain | {"num_channels": found.channels}


def kernel(input: Input) -> Reshape:
    """The matrix that a patch goes through, as the kernel of a convolution."""
    found = require_type(input, Patches)
    return Reshape((-1, found.channels, *found.size))
