"""The attention of one sequence, recorded once, with any part of any map on demand.

    recorded = RecordedAttention(model, ids)                  # one forward; keeps the queries and keys of every layer
    recorded.weights(3)                                       # (H, L, L)
    recorded.weights(3, heads=slice(0, 1), rows=slice(8))     # (1, 8, L): only these are computed

Layers are numbered as in `attention_layers`. The forward runs on a copy of the modules that shares the weights. So
another thread can use the model meanwhile: no hooks run in its modules, and compiled code of it stays valid.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.lens.attention_layers import modules_of_layers
from regard.lens.maps import Call, map_kind, record_calls
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.parts.tap import HasAttentionMap

EVERY = slice(None)
MAX_WEIGHTS = 1 << 24  # of maps that cannot be computed in part


class RecordedAttention:
    @torch.no_grad()
    def __init__(self, model: nn.Module, ids: Sequence[int], target: Sequence[int] = ()):
        """target: the input ids of the decoder, for an encoder-decoder whose source is `ids`."""
        copy: Any = copy_with_shared_tensors(model)
        layers = [[m for m in layer.modules if isinstance(m, HasAttentionMap)] for layer in modules_of_layers(copy)]
        calls: dict[HasAttentionMap, list[Call]] = {module: [] for module in chain.from_iterable(layers)}
        for module in calls:
            for _ in record_calls(module, calls[module]):  # the copy is not used again, so its hooks can stay
                pass
        device = next(copy.parameters()).device
        if isinstance(copy, EncoderDecoderModule):
            copy(torch.tensor([ids], device=device), torch.tensor([target], device=device))
        else:
            run = getattr(copy, "hidden", copy)
            run(torch.tensor([ids], device=device), TokenLayout.whole(1, len(ids), device))
        # a module of several layers was called once for each, in their order; one that did not run has no map
        self.layers = [[(module, calls[module].pop(0)) for module in modules if calls[module]] for modules in layers]

    def weights(self, layer: int, heads: slice = EVERY, rows: slice = EVERY) -> Tensor | None:
        """(heads, rows, S), or None for a layer without a map."""
        parts = list(self.parts(layer, heads, rows))
        return torch.cat(parts) if parts else None

    @torch.no_grad()
    def parts(self, layer: int, heads: slice, rows: slice) -> Iterator[Tensor]:
        """The weights of each mixer of a layer."""
        wanted, begin = range(sum(module.heads for module, _ in self.layers[layer]))[heads], 0
        for module, call in self.layers[layer]:
            own = range(max(wanted.start - begin, 0), min(wanted.stop - begin, module.heads))
            if own:
                yield part_of_map(module, call, slice(own.start, own.stop), rows)
            begin += module.heads

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for _, call in chain.from_iterable(self.layers) for x in call.taps.values())


def part_of_map(module: HasAttentionMap, call: Call, heads: slice, rows: slice) -> Tensor:
    """(heads, rows, S). Softmax weights of some queries are computed alone, other maps whole, some heads at a time."""
    layout, taps = call
    if map_kind(module).implied or {name.rpartition(".")[2] for name in taps} != {"q", "k"}:
        count = max(1, MAX_WEIGHTS // layout.positions.shape[1] ** 2)
        parts = [slice(i, min(i + count, heads.stop)) for i in range(heads.start, heads.stop, count)]
        # a copy: a view would keep the whole map in memory until all heads are computed
        return torch.cat([module.attention_map(taps, layout, part)[0, :, rows].clone() for part in parts])
    queries = {name: x[:, :, rows] if name.endswith("q") else x for name, x in taps.items()}
    return module.attention_map(queries, layout.queries(rows), heads)[0]


def copy_with_shared_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules, without hooks, with the same parameters and buffers."""
    copy = deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
    for module in copy.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        vars(module)["uncompiled"] = True  # hooks.py
    return copy
