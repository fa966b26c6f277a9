"""Image files as Pillow images in RGB or gray, for training and for prediction alike.

Transparent parts become white. Images with 16 bits per pixel are scaled to 8. Pillow is an optional package.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


def open_image(image: "str | Path | Image", gray: bool = False) -> "Image":
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ValueError("reading images needs Pillow: pip install 'regard[images]'") from None
    if isinstance(image, str | Path):
        try:
            opened = Image.open(image)
            opened.load()
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            # missing, no image, or damaged
            raise ValueError(f"{image} cannot be read as an image ({error}); remove or replace it") from error
    else:
        opened = image
    if 0 in opened.size:
        raise ValueError(f"an image has the size {opened.width} x {opened.height}; both sides must be positive")
    if opened.mode.startswith("I"):  # 16 bits, which `convert` clips to 255
        opened = Image.fromarray((np.asarray(opened, np.float64) / 257).round().astype(np.uint8))
    if opened.has_transparency_data:
        opened = Image.alpha_composite(Image.new("RGBA", opened.size, "white"), opened.convert("RGBA")).convert("RGB")
    return opened.convert("L" if gray else "RGB")
