"""The value head of an actor-critic method such as PPO: at every token, an estimate of the return to come.

    V_t = w · h_t + b          h_t: the hidden state from which the logits of the next token are computed

It starts at w = 0, b = 0: all returns are estimated as 0, so the first advantages are those without a baseline, and the
first gradients of the value loss do not reach the stack. A random head would only add noise to both. Generation does
not run it, and exports to other formats leave it out.

The head is no linear layer of torch: adapters, quantization and Muon, which act on all of those, do not apply to it.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.models.base import Model

NAME = "value_head"  # of the module in a decoder, and of the field of its spec


class ValueHead(nn.Module):
    """The projection to one number.

    width: of the hidden states
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (B, L, D) -> values (B, L), in at least float32"""
        # Products and a sum instead of a matrix product, which autocast would compute in half precision.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(wide) * self.weight.to(wide)).sum(-1) + self.bias.to(wide)


def with_value_head(spec: Model) -> Model:
    """The spec of the decoder with a value head; models of other kinds are returned unchanged."""
    return replace(spec, value_head=True) if hasattr(spec, NAME) else spec


def without_value_head(spec: Model) -> Model:
    """The spec of the model that other formats can express."""
    return replace(spec, value_head=False) if getattr(spec, NAME, False) else spec


def without_value_weights(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a decoder by name, without those of its value head."""
    return {name: tensor for name, tensor in parameters.items() if not name.startswith(f"{NAME}.")}
