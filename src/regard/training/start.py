"""The model at the start of a run: new weights, or those of another model, with adapters if the recipe has some."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from regard.adapt.adapters import adapters, add_lora, merge_lora
from regard.adapt.fake_quantized import fake_quantize
from regard.adapt.quantized import QuantizedLinear
from regard.checkpoint.image_processor import PREPROCESSOR_CONFIG, vit_processor_config
from regard.checkpoint.model_folder import GENERATION_CONFIG, read_extra_files, write_extra_files
from regard.data.sources.images import Digits, ImageFolder
from regard.models.decoder import DecoderModule
from regard.parts.patches import Patches
from regard.spec import require
from regard.text.tokenizer import Tokenizer
from regard.training.base_model import load_model, root_of
from regard.training.new_head import with_weights_of
from regard.training.recipe import Recipe


def build_model(recipe: Recipe, from_checkpoint: bool = False) -> nn.Module:
    """from_checkpoint: all trained weights will be loaded from a checkpoint of the run."""
    spec, settings = recipe.model, recipe.train
    needs_values = recipe.objective is not None and recipe.objective.needs_values
    if recipe.start is None or from_checkpoint and recipe.adapter is None:
        model = spec.build(settings.seed, settings.initialize)
    else:
        model = load_start(Path(recipe.start))
        if needs_values and isinstance(model, DecoderModule):
            model.add_value_head()
        if model.spec != spec:  # another head
            model = with_weights_of(model, spec.build(settings.seed, settings.initialize))
    quantized = next((name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)), None)
    require(
        quantized is None or recipe.adapter is not None,
        f"{recipe.start}: {quantized} is stored in few bits and cannot be trained; train an adapter: --adapter.rank=8",
    )
    if recipe.adapter is not None:
        adapted = add_lora(model, recipe.adapter, settings.seed)
        heads = ["value_head."] * needs_values + ["head."] * recipe.train_head
        train_beside_adapter(model, tuple(heads), adapted, settings.freeze)
    if recipe.quantize is not None:
        fake_quantize(model, recipe.quantize)
    return model.train()


def train_beside_adapter(model: nn.Module, heads: tuple[str, ...], adapted: list[str], frozen: tuple[str, ...]) -> None:
    """Make the parameters of new heads trainable, except those that are tied to the rest of the model.

    heads: prefixes of their names; adapted: the layers with adapters; frozen: patterns of `train.freeze`.
    """
    for layer in adapted:
        require(
            not f"{layer}.".startswith(heads),
            f"adapter.targets select {layer}, a layer of the new head, which is trained whole; leave it out",
        )
    for name, parameter in model.named_parameters():
        if name.startswith(heads):
            pattern = next((pattern for pattern in frozen if fnmatchcase(name, pattern)), None)
            require(
                pattern is None,
                f"train.freeze={pattern!r} matches {name}, a weight of the new head, which is trained; choose another "
                "pattern",
            )
            parameter.requires_grad_(True)


def load_start(folder: Path) -> nn.Module:
    """The model of a folder; an adapter is merged into its model."""
    model = load_model(folder, torch.float32)
    if adapters(model):
        merge_lora(model)
    return model.requires_grad_(True)


@dataclass(frozen=True)
class ModelFiles:
    """The files that the run and each of its checkpoints keep beside config and weights."""

    tokenizer: Tokenizer
    extra_files: Mapping[str, bytes]  # contents by name

    @classmethod
    def read(cls, tokenizer: Tokenizer, folder: Path) -> "ModelFiles":
        """The tokenizer with the image processor of a folder."""
        files = read_extra_files(folder)
        files.pop(GENERATION_CONFIG, None)  # saved by the tokenizer
        return cls(tokenizer, files)

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)
        write_extra_files(folder, self.extra_files)


def start_files(recipe: Recipe, tokenizer: Tokenizer) -> ModelFiles:
    """The files of the model that the run starts from; of a new model of images, the processor of its data."""
    if recipe.start is not None:
        return ModelFiles.read(tokenizer, root_of(Path(recipe.start)))
    input = getattr(recipe.model, "input", None)
    sources = [source for source in recipe.data.sources if isinstance(source, ImageFolder | Digits)]
    if not isinstance(input, Patches) or len(input.image) != 2 or not sources:
        return ModelFiles(tokenizer, {})
    config = vit_processor_config(input.image, input.channels, sources[0].standardize)
    return ModelFiles(tokenizer, {PREPROCESSOR_CONFIG: config})
