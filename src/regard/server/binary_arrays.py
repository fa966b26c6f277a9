"""Arrays as bytes: a header in JSON, then the arrays one after the other.

    uint32     N, the length of the header
    N bytes    JSON, whose "arrays" lists name, type and shape of every array; spaces at the end
    …          the arrays in this order, little endian, each padded to a multiple of 8 bytes

The header is padded likewise, so that a client can view the arrays in place.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

MEDIA_TYPE = "application/octet-stream"
# for the routes' documentation
BINARY_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}
TYPES = {torch.uint8: "uint8", torch.float32: "float32"}


def encode_arrays(header: dict[str, Any], arrays: dict[str, Tensor]) -> bytes:
    described = [{"name": name, "type": TYPES[x.dtype], "shape": list(x.shape)} for name, x in arrays.items()]
    text = json.dumps(header | {"arrays": described}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return b"".join([len(text).to_bytes(4, "little"), text, *map(padded_bytes, arrays.values())])


def padded_bytes(x: Tensor) -> bytes:
    values = x.contiguous().cpu().numpy().tobytes()
    return values + bytes(-len(values) % 8)


def decode_arrays(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the arrays, for clients in Python."""
    size = int.from_bytes(body[:4], "little")
    header, offset, arrays = json.loads(body[4 : 4 + size]), 4 + size, {}
    for array in header["arrays"]:
        dtype, count = getattr(torch, array["type"]), math.prod(array["shape"])
        values = bytearray(body[offset : offset + count * dtype.itemsize])  # writable, as torch wants it
        found = torch.frombuffer(values, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        arrays[array["name"]] = found.view(array["shape"])
        offset += -(-len(values) // 8) * 8
    return header, arrays
