"""Plain hooks on the models of `transformers` that the lens is compared with."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.cases import classic, decoders

LIMIT = 1e-5
IDS = torch.randint(97, (2, 13), generator=torch.Generator().manual_seed(4))
CASES = {"gpt2": classic.CASES["gpt2: tied"], "llama": decoders.CASES["llama: grouped-query"]}
Edit = Callable[[Tensor], Tensor]


def blocks(theirs: Any) -> nn.ModuleList:
    return theirs.transformer.h if hasattr(theirs, "transformer") else theirs.model.layers


def last_projection(block: Any) -> nn.Module:
    """Of the feed-forward layer: its inputs are the neurons."""
    return getattr(block.mlp, "down_proj", None) or block.mlp.c_proj


@contextmanager
def their_softmax(edit: Edit = lambda weights: weights) -> Iterator[SimpleNamespace]:
    """Inside the context, the scores and patterns of their attention, layer by layer; `edit` may replace patterns."""
    found, softmax = SimpleNamespace(scores=[], patterns=[]), nn.functional.softmax

    def edited(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.scores.append(scores)
        found.patterns.append(edit(softmax(scores, *args, **kwargs)))
        return found.patterns[-1]

    nn.functional.softmax = edited
    try:
        yield found
    finally:
        nn.functional.softmax = softmax


@contextmanager
def inputs_of(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """The first inputs of the modules, in the order of their calls."""
    found: list[Tensor] = []
    handles = [m.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])) for m in modules]
    yield found
    for handle in handles:
        handle.remove()


@contextmanager
def edited_input(module: nn.Module, edit: Edit) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, inputs: (edit(inputs[0]), *inputs[1:]))
    yield
    handle.remove()


def head_projection(block: Any) -> nn.Module:
    """W_o of the attention: its inputs are the outputs of the heads, side by side."""
    return block.attn.c_proj if hasattr(block, "attn") else block.self_attn.o_proj
