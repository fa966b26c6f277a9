"""The layers of a model that mix tokens, described for people: what attends to what, with how many heads, and how.

The layers of an encoder-decoder are those of its encoder, then the self-attention of its decoder, then the attention of
the decoder to the source, so that every layer has one map.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from regard.lens.maps import layers_of, map_kind
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.parts.tap import HasAttentionMap, MapKind

StackName = Literal["layers", "encoder", "decoder", "cross"]


@dataclass(frozen=True)
class Mixer:
    """`heads` have a map of this kind; 0 with the reason why there is none."""

    name: str  # "attention"
    heads: int
    kind: MapKind | None = None
    reason: str | None = None
    kv_heads: int | None = None
    causal: bool | None = None
    window: int | None = None  # the latest keys that a query attends to, its own included
    first_tokens: int = 0  # that every query attends to beside its window
    sinks: bool = False  # learned scores that take weight and have no value

    @property
    def implied(self) -> bool:
        """Whether the map is not a softmax, but the matrix that a recurrence implies."""
        return self.kind is not None and self.kind.implied


@dataclass(frozen=True)
class AttentionLayer:
    stack: StackName
    index: int  # in its stack
    mixers: tuple[Mixer, ...]

    @property
    def heads(self) -> int:
        return sum(mixer.heads for mixer in self.mixers)

    @property
    def kinds(self) -> list[MapKind]:
        """One per head, in the order of the heads in the map of the layer."""
        return [mixer.kind for mixer in self.mixers if mixer.kind is not None for _ in range(mixer.heads)]

    @property
    def implied(self) -> bool:
        return any(mixer.implied for mixer in self.mixers)


class LayerModules(NamedTuple):
    stack: StackName
    index: int
    modules: list[nn.Module]


def attention_layers(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """The layers of a decoder or encoder as in `attention_maps`, of an encoder-decoder as above."""
    return tuple(
        AttentionLayer(stack, index, tuple(map(describe_mixer, modules)))
        for stack, index, modules in modules_of_layers(model)
    )


def modules_of_layers(model: nn.Module) -> list[LayerModules]:
    """Per layer its modules that have a map, or a reason why they have none."""
    if not isinstance(model, EncoderDecoderModule):
        return own_layers("layers", model)
    cross = [layer for layer in own_layers("cross", model.target, to_source=True) if layer.modules]
    return own_layers("encoder", model.source) + own_layers("decoder", model.target) + cross


def own_layers(stack: StackName, model: nn.Module, to_source: bool = False) -> list[LayerModules]:
    return [LayerModules(stack, i, list(modules.values())) for i, modules in enumerate(layers_of(model, to_source))]


def describe_mixer(module: Any) -> Mixer:
    if not isinstance(module, HasAttentionMap):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", type(module).__name__.removesuffix("Module"))
        return Mixer(words.lower(), 0, reason=getattr(module, "no_attention_map", None))
    kind, mask = map_kind(module), getattr(module, "mask", None)
    return Mixer(
        kind.mixer,
        module.heads,
        kind,
        kv_heads=getattr(module, "kv_heads", None),
        causal=None if mask is None else mask.causal,
        window=None if mask is None else mask.sliding_window,
        first_tokens=0 if mask is None else mask.first_tokens,
        sinks=getattr(module, "sinks", None) is not None,
    )
