"""Ablation: remove heads, neurons or layers while a `with` block runs.

    with ablate(model, heads=[(4, 7), (5, 0)]):            # heads 7 of layer 4 and 0 of layer 5 have output 0
        model(ids)
    with ablate(model, neurons=[(2, 91)], mean_over=ids):  # the neuron has its mean over these sequences
        model(ids)
    with ablate(model, neurons=[(2, 5, 91)]):              # of expert 5, in a mixture of experts
        model(ids)
    with ablate(t5, heads=[(0, 3)], stack="target", to_source=True):   # a head of the decoder's cross-attention
        t5(source, ids)

Zero is often far from all activations of a head, so that later layers get inputs they never had in training; the mean
keeps what does not depend on the input (Wang et al. 2022). A layer that is removed returns its input. Heads are counted
as in `attention_maps`: those of all attentions of a layer in order, without attention to a source.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.expert_neurons import ExpertNeurons
from regard.lens.hooks import Edit, eager_hooks, patch, record
from regard.lens.inputs import ModelInputs, check_index, rows_of, stack_names
from regard.lens.maps import layers_of, map_kind
from regard.parts.tap import HasAttentionMap, Tap

Places = dict[str, tuple[int, list[int]]]  # name of an activation -> its dimension, and the indices along it


@contextmanager
def ablate(
    model: Any,
    heads: Iterable[tuple[int, int]] = (),
    neurons: Iterable[tuple[int, ...]] = (),
    layers: Iterable[int] = (),
    mean_over: ModelInputs | None = None,
    stack: str | None = None,
    to_source: bool = False,
) -> Generator[None]:
    """Remove heads and neurons, both as (layer, index), and whole layers.

    neurons: of a mixture of experts (layer, expert, index). mean_over: ids (L,) or (B, L), for an encoder-decoder a
    pair; heads and neurons get their mean over these tokens instead of 0. stack: the layers of an encoder-decoder that
    are counted, "source" or "target". to_source: heads are those of attention to a source.
    """
    part, prefix = find_stack(model, stack)
    neurons = list(neurons)
    places = head_places(part, heads, to_source) | neuron_places(part, (n for n in neurons if len(n) == 2))
    places = {prefix + name: place for name, place in places.items()}
    experts = ExpertNeurons(prefix, part.stack.blocks, [n for n in neurons if len(n) != 2])
    skipped = [check_index("layer", layer, len(part.stack.blocks)) for layer in layers]
    values = {}
    if mean_over is not None and (places or experts):
        with experts.averaging():
            values = mean_activations(model, places, mean_over)
    edits: dict[str, Edit] = {
        name: replace_at(name, dim, torch.tensor(indices), values.get(name)) for name, (dim, indices) in places.items()
    }
    with eager_hooks(model) as hooks, patch(model, edits), experts.removed():
        for layer in skipped:
            handle = part.stack.blocks[layer].register_forward_hook(lambda _, args, out: (args[0], *out[1:]))
            hooks.callback(handle.remove)
        yield


def find_stack(model: nn.Module, stack: str | None) -> tuple[Any, str]:
    """The module whose layers are counted, and the prefix of its names."""
    found = stack_names(model)
    if stack is None and len(found) != 1:
        choices = " or ".join(f"stack={name!r}" for name in found) or "a decoder or an encoder"
        raise ValueError(f"{type(model).__name__} has no single stack of layers; choose {choices}")
    name = found[0] if stack is None else stack
    if name not in found:
        raise ValueError(f"stack={stack!r} is not a stack of {type(model).__name__}; choose one of {found}")
    return model.get_submodule(name), f"{name}." if name else ""


def head_places(model: Any, heads: Iterable[tuple[int, int]], to_source: bool = False) -> Places:
    """The outputs of heads: dimension 1 of the taps `z` of their attention."""
    places: Places = {}
    layers = layers_of(model, to_source)
    for layer, head in heads:
        modules = [
            (name, module)
            for name, module in layers[check_index("layer", layer, len(layers))].items()
            if output_taps(module) and heads_of(module)
        ]
        count = sum(heads_of(module) for _, module in modules)
        index = check_index(f"head in layer {layer}:", head, count)
        for name, module in modules:
            if 0 <= index < heads_of(module):
                check_has_heads(name, module)
                for tap in output_taps(module):
                    places.setdefault(f"{name}.{tap}", (1, []))[1].append(index)  # global attention has two
            index -= heads_of(module)
    return places


def output_taps(module: nn.Module) -> list[str]:
    """The names of the taps of the heads' outputs; inside of other modules for attention in a recurrence."""
    return [name for name, tap in module.named_modules() if isinstance(tap, Tap) and name.split(".")[-1] == "z"]


def check_has_heads(name: str, module: nn.Module) -> None:
    if isinstance(module, HasAttentionMap) and map_kind(module).channels:
        raise ValueError(
            f"{name} ({map_kind(module).mixer}) has no heads: its map is a mean over channels; set channels of its "
            f"output by patch(model, {{'{name}.z': function}})"
        )


def neuron_places(model: Any, neurons: Iterable[tuple[int, ...]]) -> Places:
    places: Places = {}
    for layer, neuron in neurons:
        block = model.stack.blocks[check_index("layer", layer, len(model.stack.blocks))]
        names = [name for name, module in block.named_modules() if isinstance(module, Tap) and is_neurons(name)]
        if len(names) != 1:
            raise ValueError(
                f"layer {layer} has {len(names)} feed-forward layers with neurons, but (layer, neuron) needs one; "
                "of experts give (layer, expert, neuron); else name the activation: patch(model, {name: function})"
            )
        places.setdefault(f"stack.blocks.{layer}.{names[0]}", (-1, []))[1].append(neuron)
    return places


def is_neurons(name: str) -> bool:
    return name.endswith(".neurons") and ".experts." not in name  # rows of experts are sorted, not (B, L)


def heads_of(module: nn.Module) -> int:
    heads = getattr(module, "heads", 0)
    assert isinstance(heads, int)
    return heads


@torch.no_grad()
def mean_activations(model: Any, names: Iterable[str], inputs: ModelInputs) -> dict[str, Tensor]:
    """The mean of each activation over rows and positions, with these dimensions kept as 1."""
    with record(model, list(names)) as recorded:
        model(*rows_of(model, inputs))
    return {name: x.mean((0, -2), keepdim=True) for name, x in recorded.items()}  # (1, H, 1, E) or (1, 1, F)


def replace_at(name: str, dim: int, indices: Tensor, value: Tensor | None) -> Edit:
    """A function that sets these indices of a dimension to 0, or to those of the value."""

    def edit(x: Tensor) -> Tensor:
        for i in indices.tolist():
            check_index(f"channel in {name}:", i, x.shape[dim])
        index = indices.to(x.device)
        if value is None:
            return x.index_fill(dim, index, 0.0)
        return x.index_copy(dim, index, value.expand_as(x).index_select(dim, index))

    return edit
