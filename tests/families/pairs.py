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
    theirs = model(model.config_class(**copy.deepcopy(NO_MARKS | settings))).eval()  # their configs write into it
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1 or not parameter.any():  # a norm or bias that is all ones or zeros hides a mistake
            nn.init.normal_(parameter, std=1.0 if name.endswith("weight") else 0.1)
        elif name == "rwkv.embeddings.weight":  # they start so small that all tokens are one to the norm's epsilon
            nn.init.normal_(parameter)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros, too, and no parameter
            nn.init.normal_(buffer, std=0.1)
    theirs.save_pretrained(folder)
    return Pair(theirs.config.model_type, folder, theirs, load(folder))


def stored_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """Their gradients under the names of their files, which need not be those of their modules."""
    twin = type(model)(model.config)  # not a copy: RecurrentGemma's modules keep states that none can be made of
    with torch.no_grad():
        for buffer in twin.buffers():
            buffer.zero_()
        for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(original) if original.grad is None else original.grad)
    twin.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
