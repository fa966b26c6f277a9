"""A tiny random model of `transformers`, saved, and ours loaded from the same folder."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.checkpoint import load
from tests.families.cases import NO_MARKS


@dataclass
class Pair:
    """The same weights twice."""

    model_type: str
    folder: Path
    theirs: Any
    ours: Any


def make(case: tuple[str, dict[str, Any]], folder: Path) -> Pair:
    transformers.utils.logging.disable_progress_bar()
    model, settings = getattr(transformers, case[0]), case[1]
    torch.manual_seed(0)
    theirs = model(model.config_class(**NO_MARKS | settings)).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros: a wrong one would not be seen
            nn.init.normal_(parameter, std=1.0 if name.endswith("weight") else 0.1)
    theirs.save_pretrained(folder)
    return Pair(theirs.config.model_type, folder, theirs, load(folder))


def stored_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """Their gradients under the names of their files, which need not be those of their modules."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(original) if original.grad is None else original.grad)
    twin.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
