"""A pair is a tiny random model of `transformers` and our model loaded from its saved folder; checks for any pair.

In tests of families, `theirs` is the model of `transformers` or its output, and `ours` is the loaded one.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.checkpoint import load, save
from regard.families import family, weight_table
from tests.families.cases import NO_SPECIAL_TOKENS
from tests.laws import assert_equal_weights, broken_laws

LIMIT = 1e-5


@dataclass
class Pair:
    """A model of `transformers` and our model with the same weights."""

    model_type: str
    folder: Path
    theirs: Any
    ours: Any


def make_pair(case: tuple[str, dict[str, Any]], folder: Path) -> Pair:
    transformers.utils.logging.disable_progress_bar()
    model, settings = getattr(transformers, case[0]), case[1]
    torch.manual_seed(0)
    # a copy, because their configs modify nested settings
    theirs = model(model.config_class(**copy.deepcopy(NO_SPECIAL_TOKENS | settings))).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1 or not parameter.any():  # ones or zeros would hide a wrong weight name
            nn.init.normal_(parameter, std=1.0 if name.endswith("weight") else 0.1)
        elif name == "rwkv.embeddings.weight":  # initially so small that the epsilon of the norm dominates
            nn.init.normal_(parameter)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # a buffer that is initialized to zero
            nn.init.normal_(buffer, std=0.1)
    theirs.save_pretrained(folder)
    return Pair(theirs.config.model_type, folder, theirs, load(folder))


@contextmanager
def record_hidden_states(stack: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the context, every forward appends the input of the first block and the output of each block."""
    states: list[Tensor] = []
    hooks = [stack.input.register_forward_hook(lambda _, __, out: states.append(out))]
    hooks += [block.register_forward_hook(lambda _, __, out: states.append(out[0])) for block in stack.blocks]
    yield states
    for hook in hooks:
        hook.remove()


def our_gradients(pair: Pair) -> dict[str, Tensor]:
    """Our gradients under the tensor names of the files of transformers."""
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pair.ours.named_parameters()}
    return dict(weight_table(pair.ours.spec, pair.model_type).write(gradients))


def stored_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """The gradients of transformers under the tensor names of its files, which can differ from its parameter names."""
    # A new model and not a deepcopy, because the states in RecurrentGemma's modules cannot be copied.
    gradient_model = type(model)(model.config)
    with torch.no_grad():
        for buffer in gradient_model.buffers():
            buffer.zero_()
        for parameter, original in zip(gradient_model.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(original) if original.grad is None else original.grad)
    gradient_model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_saved_and_loaded(pair: Pair, folder: Path) -> nn.Module:
    """Save our model in our own format and load it; return the loaded model, which has equal weights."""
    save(pair.ours, folder)
    loaded = load(folder)
    assert loaded.spec == pair.ours.spec
    assert_equal_weights(loaded, pair.ours)
    return loaded


def check_config_roundtrip(pair: Pair) -> None:
    module = family(pair.model_type)
    assert module.spec(module.config(pair.ours.spec)) == pair.ours.spec
    assert module.spec(pair.theirs.config.to_dict()) == pair.ours.spec


def check_laws(pair: Pair) -> None:
    """Cached = whole, batched = alone and all other laws that `regard verify` tests, in float64."""
    broken = broken_laws(pair.ours, 16)
    assert not broken, broken
