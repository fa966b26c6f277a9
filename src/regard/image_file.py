"""Image files as Pillow images in RGB or gray, for training and for prediction alike.

Transparent parts become white. Images with 16 bits per pixel are scaled to 8. Pillow is an optional package.
"""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


def decode_image(data: bytes, format: str, max_pixels: int) -> "Image":
    """An image of Pillow's `format` ("PNG", "JPEG" …) from untrusted bytes. ValueError if it is none, or too large."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ValueError("reading images needs Pillow: pip install 'regard[images]'") from None
    try:
        image = Image.open(BytesIO(data), formats=(format,))
        if image.width * image.height > max_pixels:
            raise ValueError(f"{image.width} x {image.height} pixels are too many; {max_pixels:,} are left")
        image.load()
    except (
        OSError,
        SyntaxError,
        EOFError,
        IndexError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise ValueError(f"not a {format} image, or damaged") from error
    return image


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
