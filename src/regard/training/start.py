"""The model at the start of a run: new weights, or those of another model, with adapters if the recipe has some."""

from pathlib import Path

import torch
from torch import nn

from regard.adapt import add_lora
from regard.checkpoint import model_folder
from regard.training.recipe import Recipe


def build_model(recipe: Recipe) -> nn.Module:
    spec, settings = recipe.model, recipe.train
    if recipe.start is None:
        model = spec.build(settings.seed, settings.initialize)
    else:
        model = model_folder.load(Path(recipe.start), dtype=torch.float32)
        if model.spec != spec:  # another head
            model = with_weights_of(model, spec.build(settings.seed, settings.initialize))
    if recipe.adapter is not None:
        add_lora(model, recipe.adapter, settings.seed)
    return model.train()


@torch.no_grad()
def with_weights_of(source: nn.Module, model: nn.Module) -> nn.Module:
    """The model with the weights of the source, except those of its head."""
    weights = {name: p for name, p in source.named_parameters() if not name.startswith("head.")}
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
    return model
