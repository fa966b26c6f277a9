"""The states of recurrent layers after every token: h and c of an LSTM, the sums of linear attention, and others.

    for name, array in states(model, ids).items():      # "stack.blocks.0.sublayers.0.h": (L, F)
        print(name, array.flatten(1).norm(dim=1))       # the norm of the state after each token

Every prefix of the sequence is one row of a batch, padded on the right. Padding does not change a state, so the final
state of row t is the state after token t. This works for every mixer with a state of fixed size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.models.stack import final_states

ROWS = 64  # prefixes per forward, which bounds memory


@torch.no_grad()
def states(model: DecoderModule, ids: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """The states (L, …) of one sequence (L,), by sublayer and array name; empty without recurrent layers."""
    tokens = torch.as_tensor(ids, dtype=torch.long, device=model.embedding.weight.device)
    if tokens.dim() != 1 or len(tokens) == 0:
        raise ValueError(f"states need one sequence (L,), not ids of shape {tuple(tokens.shape)}; give one row")
    found: dict[str, list[Tensor]] = {}
    for start in range(0, len(tokens), ROWS):
        for name, array in states_of_prefixes(model, tokens, range(start, min(start + ROWS, len(tokens)))).items():
            found.setdefault(name, []).append(array)
    return {name: torch.cat(arrays) for name, arrays in found.items()}


def states_of_prefixes(model: DecoderModule, tokens: Tensor, last_tokens: range) -> dict[str, Tensor]:
    """The states after each of these tokens: name -> (len(last_tokens), …)"""
    length = last_tokens.stop
    positions = torch.arange(length, device=tokens.device).expand(len(last_tokens), length)
    valid = positions <= positions[0, last_tokens.start :].unsqueeze(-1)
    layout = TokenLayout(positions.where(valid, 0), valid=valid, consecutive=True)
    finals = final_states(model.spec.layers)
    model.hidden(tokens[positions], layout, finals)
    return {
        f"stack.blocks.{i}.sublayers.{j}.{name}": array
        for i, block in enumerate(finals)
        for j, final in enumerate(block)
        for name, array in final.arrays.items()
    }
