"""Maps as JSON, for the page at `/`."""

import json

from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from regard.lens.maps import entropy, row_entropy
from regard.server.map_parts import THUMBNAIL_SIZE, Recording


def layer_overview(recording: Recording, layer: int) -> bytes:
    """A thumbnail, which has the largest weight of every patch, and the mean entropy of each head, as JSON."""
    weights = recording.weights(layer)
    if weights is None:
        return b"null"
    weights, size = weights.float(), min(THUMBNAIL_SIZE, weights.shape[-1])
    thumbnails = adaptive_max_pool2d(weights[None], size)[0]  # (H, size, size)
    return json_object(thumbnails=rounded(thumbnails, 3), entropy=rounded(entropy(weights), 4))


def head_map(recording: Recording, layer: int, head: int) -> bytes:
    weights = recording.weights(layer)
    assert weights is not None, "the request named a head of a layer without attention"
    weights = weights[head].float()  # (L, L)
    return json_object(weights=rounded(weights, 4), entropy=rounded(row_entropy(weights), 4))


def rounded(values: Tensor, decimals: int) -> list:
    return values.double().round(decimals=decimals).tolist()


def json_object(**fields: list) -> bytes:
    """JSON, encoded row by row: the encoder holds the interpreter's lock, and a whole map takes it 0.1 seconds."""
    members = [
        f'"{name}":[' + ",".join(json.dumps(row, separators=(",", ":")) for row in rows) + "]"
        for name, rows in fields.items()
    ]
    return ("{" + ",".join(members) + "}").encode()
