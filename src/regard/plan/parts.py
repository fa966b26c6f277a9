"""A model in pieces that can be counted: its halves (one, or an encoder and a decoder), their blocks and bodies."""

from dataclasses import fields

from regard.kernels.attention.patterns.sinks import SinksAndWindow
from regard.kernels.attention.patterns.window import Window
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.stack import unroll
from regard.parts.body import Body
from regard.parts.experts import Experts

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


def window(body: Body) -> int | None:
    """The most keys that a token sees through this body's mask; None: there is no bound."""
    mask = getattr(body, "mask", None)
    if isinstance(mask, Window):
        return mask.size if mask.causal else 2 * mask.size + 1
    return mask.size + mask.sinks if isinstance(mask, SinksAndWindow) else None


def unread(body: Body, width: int, texts: int) -> int:
    """Weights that a token each of so many texts leave unread, where experts are chosen evenly."""
    return (
        round(body.inactive_params(width) * (1 - body.top_k / body.count) ** (texts - 1))
        if isinstance(body, Experts)
        else 0
    )


def flops(body: Body, width: int, tokens: int, seen: int) -> int:
    """What the body counts, a window's keys at most."""
    return body.flops(width, tokens, min(seen, window(body) or seen))
