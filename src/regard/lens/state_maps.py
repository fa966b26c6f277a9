"""What recurrences carry, token by token: an LSTM's h and c, the sums of linear attention, any array of fixed size.

    for name, array in states(model, ids).items():      # "stack.blocks.0.sublayers.0.h": (L, F)
        print(name, array.flatten(1).norm(dim=1))       # how much is carried after each token

One forward over all beginnings of the text, each padded to the whole: padding changes no state, so row t ends with what
was carried after token t. No mixer needs to know that it is watched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.models.stack import final_states

ROWS = 64  # beginnings at once, which bounds memory


@torch.no_grad()
def states(model: DecoderModule, ids: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """Of one text (L,): by sublayer and name, what is carried after each token (L, …); empty without recurrences."""
    tokens = torch.as_tensor(ids, dtype=torch.long, device=model.embedding.weight.device)
    if tokens.dim() != 1 or len(tokens) == 0:
        raise ValueError(f"states are of one text (L,), found ids of shape {tuple(tokens.shape)}; give one row")
    found: dict[str, list[Tensor]] = {}
    for start in range(0, len(tokens), ROWS):
        for name, array in of_beginnings(model, tokens, range(start, min(start + ROWS, len(tokens)))).items():
            found.setdefault(name, []).append(array)
    return {name: torch.cat(arrays) for name, arrays in found.items()}


def of_beginnings(model: DecoderModule, tokens: Tensor, lasts: range) -> dict[str, Tensor]:
    """What is carried after each of these tokens: name -> (len(lasts), …)"""
    places = torch.arange(lasts.stop, device=tokens.device).expand(len(lasts), lasts.stop)
    valid = places <= places[0, lasts.start :].unsqueeze(-1)
    ends = final_states(model.spec.layers)
    model.hidden(tokens[places], TokenLayout(places.where(valid, 0), valid=valid, consecutive=True), ends)
    return {
        f"stack.blocks.{i}.sublayers.{j}.{name}": array
        for i, block in enumerate(ends)
        for j, end in enumerate(block)
        for name, array in end.arrays.items()
    }
