"""Hybrids: models whose layers mix in several ways, one kind of mixer here, another there."""

from collections.abc import Sequence
from typing import Any, TypeVar

from regard.models.decoder import Decoder
from regard.parts.body import Body
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.table import Link

MixerType = TypeVar("MixerType", bound=Body)


def first(found: Sequence[Body], kind: type[MixerType], otherwise: MixerType) -> MixerType:
    """The first body of this kind; another where there is none, so that there is something to write."""
    return next((body for body in found if isinstance(body, kind)), otherwise)


def last(model: Decoder, theirs: dict[type, str]) -> list[Link]:
    """Every mixer's last matrix. All kinds call it o_proj, so its name does not tell whose it is: the layer does."""
    kinds = [type(block.sublayers[0].body) for block in model.blocks]
    return [
        Link(f"model.layers.{i}.{theirs[kind]}.{{leaf}}", f"stack.blocks.{i}.sublayers.0.body.o_proj.{{leaf}}")
        for i, kind in enumerate(kinds)
    ]


def sizes(mamba: Mamba | Mamba2) -> dict[str, Any]:
    """What all hybrids with a Mamba of either kind call alike."""
    return {"mamba_d_state": mamba.state, "mamba_expand": mamba.expand, "mamba_d_conv": mamba.taps}


def repeating(words: list[str]) -> list[str]:
    """The shortest pattern that these are, over and over."""
    sizes = range(1, len(words) + 1)
    return next(words[:n] for n in sizes if all(word == words[i % n] for i, word in enumerate(words)))
