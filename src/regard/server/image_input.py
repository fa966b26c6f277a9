"""Images in the messages of a chat: content parts with data URLs, decoded with limits.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}

The server never fetches a URL. A small file can hold a huge image, so the pixels of all images of a request are counted
from the headers before any is decoded.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator
from torch import Tensor

from regard.image_file import decode_image
from regard.server.errors import ApiError
from regard.server.schema import RequestBody

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 16  # per request
MAX_PIXELS = 1 << 25  # of all images of a request together
TYPES = {"data:image/png;base64": "PNG", "data:image/jpeg;base64": "JPEG", "data:image/webp;base64": "WEBP"}


class ImageReader(NamedTuple):
    """The functions of a model that reads images.

    `expand(ids, images)` replaces the image token of each image by as many as the image has patches; ValueError if
    their numbers differ. `embed(ids, images)` returns the embeddings (L, D) of expanded ids.
    """

    token: str  # the image token in a prompt
    marker: int  # its id
    expand: Callable[[list[int], int], list[int]]
    embed: "Callable[[list[int], Sequence[Image]], Tensor]"


def check_url(url: str) -> str:
    if url.partition(",")[0] not in TYPES:
        raise ValueError(
            f"the image {url[:40]!r} is not a data URL, and the server fetches none; send {', '.join(TYPES)},…"
        )
    return url


DataUrl = Annotated[str, AfterValidator(check_url)]


class ImageUrl(RequestBody):
    url: DataUrl
    detail: Literal["auto"] | None = None  # the size is the model's


class ImagePart(RequestBody):
    type: Literal["image_url"]
    image_url: ImageUrl


def decode_images(urls: Sequence[str]) -> "list[Image]":
    """The images of data URLs; 400 if one is damaged or they are too large. It takes long: call it in a thread."""
    images: list[Image] = []
    pixels = MAX_PIXELS
    for url in urls:
        head, _, data = url.partition(",")
        try:
            image = decode_image(base64.b64decode(data, validate=True), TYPES[head], pixels)
        except (binascii.Error, ValueError) as error:
            message = f"image {len(images) + 1} cannot be read: {error}"
            raise ApiError(400, message, code="invalid_image", param="messages") from error
        pixels -= image.width * image.height
        images.append(image)
    return images
