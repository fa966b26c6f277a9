"""The model at the start of a run: new weights, or those of another model, with adapters if the recipe has some."""

from pathlib import Path

import torch
from torch import nn

from regard.adapt.adapters import adapters, add_lora, merge_lora
from regard.training.base_model import load_model
from regard.training.new_head import with_weights_of
from regard.training.recipe import Recipe


def build_model(recipe: Recipe, from_checkpoint: bool = False) -> nn.Module:
    """from_checkpoint: all trained weights will be loaded from a checkpoint of the run."""
    spec, settings = recipe.model, recipe.train
    if recipe.start is None or from_checkpoint and recipe.adapter is None:
        model = spec.build(settings.seed, settings.initialize)
    else:
        model = load_start(Path(recipe.start))
        if model.spec != spec:  # another head
            model = with_weights_of(model, spec.build(settings.seed, settings.initialize))
    if recipe.adapter is not None:
        add_lora(model, recipe.adapter, settings.seed)
    return model.train()


def load_start(folder: Path) -> nn.Module:
    """The model of a folder; an adapter is merged into its model."""
    model = load_model(folder, torch.float32)
    if adapters(model):
        merge_lora(model)
    return model.requires_grad_(True)
