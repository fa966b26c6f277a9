"""Steering: add a direction to an activation while a `with` block runs.

    v = mean(activations of positive texts) - mean(activations of negative texts)        at the last token

The difference of means over contrasting texts is a direction along which the model's outputs change (Turner et al.
2023; Rimsky et al. 2024). The decoder rows of a sparse autoencoder are such directions too.

    vector = steering_vector(model, "stack.blocks.6", positive, negative)
    with steer(model, "stack.blocks.6", vector, scale=4):
        model(ids)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from regard.lens.hooks import patch, record

TokenTexts = Sequence[Sequence[int] | Tensor]  # the ids of each text, of any length


@torch.no_grad()
def steering_vector(
    model: nn.Module, name: str, positive: TokenTexts, negative: TokenTexts, position: int = -1
) -> Tensor:
    """(D,): the mean activation of the positive texts at a position, by default the last, minus the negative's."""
    return mean_activation(model, name, positive, position) - mean_activation(model, name, negative, position)


def mean_activation(model: nn.Module, name: str, texts: TokenTexts, position: int) -> Tensor:
    if not len(texts):
        raise ValueError("a mean needs at least one text; give some of both kinds")
    device, total = next(model.parameters()).device, None
    for ids in texts:
        with record(model, name) as recorded:
            model(torch.as_tensor(ids, device=device).unsqueeze(0))
        x = recorded[name][0, position]
        total = x if total is None else total + x
    assert total is not None
    return total / len(texts)


def steer(
    model: nn.Module, name: str, vector: Tensor, scale: float = 1.0, positions: slice = slice(None)
) -> AbstractContextManager[None]:
    """Add `scale * vector` (D,) to an activation (B, L, D) at these positions, by default at all."""

    def add(x: Tensor) -> Tensor:
        if vector.shape != x.shape[-1:]:
            raise ValueError(f"the vector has shape {tuple(vector.shape)}; {name} needs ({x.shape[-1]},)")
        x = x.clone()
        x[:, positions] += scale * vector.to(x)
        return x

    return patch(model, {name: add})
