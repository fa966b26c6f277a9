"""A model in pieces that can be counted: its halves (one, or an encoder and a decoder), their blocks and bodies."""

from dataclasses import fields

from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.stack import unroll
from regard.parts.body import Body

Planned = Decoder | Model
Half = Decoder | Encoder


def halves(spec: Planned) -> dict[str, Half]:
    """What has a stack of blocks, by the name of its module: "" where the model is one itself."""
    if isinstance(spec, Half):
        return {"": spec}
    named = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {name: half for name, half in named.items() if isinstance(half, Half)}


def bodies(half: Half) -> list[Body]:
    return [sublayer.body for block in unroll(half.layers) for sublayer in block.sublayers]


def all_bodies(spec: Planned) -> list[tuple[Body, int]]:
    """Every body with the width of its stack."""
    return [(body, half.width) for half in halves(spec).values() for body in bodies(half)]


def flops(body: Body, width: int, tokens: int, keys: int) -> int:
    """FLOPs of one forward of `tokens` queries, each of which attends to `keys` keys or as many as its mask allows."""
    return body.flops(width, tokens, keys if body.max_keys is None else min(keys, body.max_keys))
