"""The attention of one sequence, recorded once, with the map of any layer on demand.

    recorded = RecordedAttention(model, ids)     # one forward; keeps the queries and keys of every layer
    recorded.layer_map(3)                        # (H, L, L)

The forward runs on a copy of the modules that shares the weights. So another thread can use the model meanwhile: it
meets no hooks, and compiled code of it stays valid.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.lens.maps import Call, layers_of, record_calls
from regard.parts.tap import HasAttentionMap


class RecordedAttention:
    @torch.no_grad()
    def __init__(self, model: nn.Module, ids: Sequence[int]):
        copy: Any = copy_with_shared_tensors(model)
        self.calls: list[list[tuple[HasAttentionMap, list[Call]]]] = [
            [(module, []) for module in modules.values() if isinstance(module, HasAttentionMap)]
            for modules in layers_of(copy)
        ]
        for module, calls in chain.from_iterable(self.calls):
            for _ in record_calls(module, calls):  # the copy is not used again, so its hooks can stay
                pass
        tokens = torch.tensor([ids], device=next(copy.parameters()).device)  # (1, L)
        copy.hidden(tokens, TokenLayout.whole(1, len(ids), tokens.device))

    @torch.no_grad()
    def layer_map(self, layer: int) -> Tensor | None:
        """(H, L, L) weights, or None for a layer without a map."""
        maps = [
            module.attention_map(call.taps, call.layout)[0] for module, calls in self.calls[layer] for call in calls
        ]
        return torch.cat(maps) if maps else None

    @property
    def nbytes(self) -> int:
        recorded = (call for _, calls in chain.from_iterable(self.calls) for call in calls)
        return sum(tensor.nbytes for call in recorded for tensor in call.taps.values())


def copy_with_shared_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules, without hooks, with the same parameters and buffers."""
    copy = deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
    for module in copy.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copy
