"""All methods of speculative decoding, with drafters that agree with a model in part: METHODS[name](model)."""

from collections.abc import Callable

import torch

from regard.engine.speculation.draft_model import DraftModel
from regard.engine.speculation.eagle import Eagle
from regard.engine.speculation.first_layers import FirstLayers
from regard.engine.speculation.lookahead import Lookahead
from regard.engine.speculation.medusa import Medusa
from regard.engine.speculation.prompt_lookup import PromptLookup
from regard.engine.speculation.speculation import Drafter
from regard.models.decoder import DecoderModule
from regard.models.eagle import EagleLayer
from regard.models.medusa import MedusaHeads


def medusa(model: DecoderModule, heads: int = 3, chains: int = 1) -> Medusa:
    built = MedusaHeads.of(model.spec, heads).build(seed=3)
    built.copy_head(model)
    for parameter in built.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return Medusa(built, chains)


def eagle(model: DecoderModule) -> Eagle:
    layer = EagleLayer.of(model.spec).build(seed=3)
    torch.nn.init.eye_(
        layer.fuse.weight[:, model.spec.width :]
    )  # so that it predicts about the hidden state that it reads
    return Eagle(layer, chains=2)


METHODS: dict[str, Callable[[DecoderModule], Drafter]] = {
    "ngram": lambda model: PromptLookup(1, 3),
    "lookahead": lambda model: Lookahead(),
    "draft": DraftModel,
    "medusa": medusa,
    "medusa tree": lambda model: medusa(model, chains=4),
    "eagle": eagle,
    "first layers": lambda model: FirstLayers(1),
}
RANDOM = ("draft", "medusa", "medusa tree", "eagle", "first layers")  # their drafts of sampled requests are drawn
