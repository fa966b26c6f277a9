"""Attention maps: the weights, recomputed from recorded queries and keys, so that the model can run with any backend.

    A_h = softmax(q_h k_gᵀ / √E + bias)           (L, S) per head, rows sum to one
    H_i = -Σ_j A_ij log A_ij                      entropy of row i: 0 for a single key, log S for uniform weights

The entropy of a head is the mean over its rows; entropy collapse in training is a fall towards 0 (Zhai et al. 2023).
A mixer has its map by the interface in parts/tap.py, or declares why it has none. Linear attention and state spaces
have an implied matrix (kernels/recurrent/implied_map.py), which may have negative entries; `attention_layers`
tells what the maps of a layer are, and `relative_weights` makes weights of them that sum to one.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.lens.hooks import eager_hooks
from regard.parts.tap import SOFTMAX, HasAttentionMap, MapKind


class Call(NamedTuple):
    """One call of a mixer: its layout, and the tensors at its taps."""

    layout: TokenLayout
    taps: dict[str, Tensor]


def attention_maps(
    model: nn.Module, ids: Sequence[int] | Tensor, layout: TokenLayout | None = None, layer: int | None = None
) -> list[Tensor | None]:
    """The maps (H, L, L) of each layer of a decoder or encoder, or of one layer; None for a layer without a map.

    `ids` is one sequence (L,), a batch (B, L), whose weights are (B, H, L, L), or one input of another kind (an image)
    for an encoder that reads those. Attention to a source is not included. `attention_layers` tells which maps are
    softmax weights. Warns of layers without a map; raises ValueError if no layer has one.
    """
    if not hasattr(model, "stack"):
        parts = ", ".join(f".{name}" for name, part in model.named_children() if hasattr(part, "stack"))
        raise ValueError(
            f"{type(model).__name__} has several stacks of layers; call named_attention_maps(model, *inputs), "
            f"or attention_maps of one of them: {parts or 'none found'}"
        )
    inputs = torch.as_tensor(ids, device=next(model.parameters()).device)
    batched = False
    if inputs.numel() == 0:
        raise ValueError("there are no ids; give at least one")
    if not inputs.is_floating_point():
        if inputs.dim() not in (1, 2):
            raise ValueError(f"ids of shape {tuple(inputs.shape)} are neither a sequence (L,) nor a batch (B, L)")
        batched = inputs.dim() == 2
    rows = inputs if batched else inputs.unsqueeze(0)
    if layout is None and not inputs.is_floating_point():
        layout = TokenLayout.whole(*rows.shape, rows.device)
    layers = layers_of(model)
    if layer is not None:
        if not -len(layers) <= layer < len(layers):
            raise ValueError(f"there is no layer {layer}; choose 0 to {len(layers) - 1}")
        layers = [layers[layer]]
    maps = compute_maps(
        {name: module for modules in layers for name, module in modules.items()},
        lambda: getattr(model, "hidden", model)(rows, layout),
    )
    missing = [name for modules in layers if not maps.keys() & modules.keys() for name in modules]
    if missing and maps:
        reasons = {getattr(model.get_submodule(name), "no_attention_map", "it did not run") for name in missing}
        warnings.warn(f"no attention map of {', '.join(missing)}: {'; '.join(sorted(reasons))}", stacklevel=2)
    found = [[maps[name] for name in modules if name in maps] for modules in layers]
    weights = [torch.cat(heads, 1) if heads else None for heads in found]  # (B, H, L, L)
    return weights if batched else [None if layer is None else layer[0] for layer in weights]


def named_attention_maps(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, Tensor]:
    """Run `model(*inputs, **options)` and return the weights (B, H, L, S) of every attention in it, by module name.

    Works for any model, also with several stacks; attention to a source is included, with the source's tokens as keys.
    """
    return compute_maps(dict(attention_modules(model)), lambda: model(*inputs, **options))


def attention_heads(model: nn.Module) -> tuple[int, ...]:
    """The number of heads with a map in each layer, 0 for a layer without one."""
    return tuple(
        sum(module.heads for module in modules.values() if isinstance(module, HasAttentionMap))
        for modules in layers_of(model)
    )


def layers_of(model: Any, to_source: bool = False) -> list[dict[str, nn.Module]]:
    """Per layer its attention modules by name: those that attend to a source, or all others."""
    return [
        {
            name: module
            for name, module in attention_modules(block, f"stack.blocks.{i}")
            if getattr(module, "reads_source", False) == to_source
        }
        for i, block in enumerate(model.stack.blocks)
    ]


def map_kind(module: HasAttentionMap) -> MapKind:
    return getattr(module, "map_kind", SOFTMAX)


def relative_weights(weights: Tensor) -> Tensor:
    """|M_ij| / Σ_j |M_ij|: of a map of any kind, weights that sum to one, as entropies and detectors need them.

    Softmax weights stay as they are, up to learned sinks. A row of zeros stays zero.
    """
    sizes = weights.abs()
    total = sizes.sum(-1, keepdim=True)
    return sizes / total.masked_fill(total == 0, 1.0)


def attention_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have a map, or a reason why they have none."""
    if isinstance(module, HasAttentionMap) or hasattr(module, "no_attention_map"):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from attention_modules(child, f"{name}.{child_name}" if name else child_name)


def compute_maps(modules: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, Tensor]:
    """(B, H, L, S) of every module that ran and has a map; ValueError if none of them has one."""
    calls: dict[nn.Module, list[Call]] = {}
    reasons = {name: reason for name, m in modules.items() if (reason := getattr(m, "no_attention_map", None))}
    if reasons and len(reasons) == len(modules):
        name, reason = next(iter(reasons.items()))
        raise ValueError(f"{name} ({type(modules[name]).__name__}) has no attention map: {reason}")
    with torch.no_grad(), eager_hooks(*modules.values()) as stack:
        for module in dict.fromkeys(modules.values()):
            if isinstance(module, HasAttentionMap):
                for handle in record_calls(module, calls.setdefault(module, [])):
                    stack.callback(handle.remove)
        run()
        maps = {}
        for name, module in modules.items():
            if calls.get(module):  # a module under several names was called once for each
                layout, taps = calls[module].pop(0)
                assert isinstance(module, HasAttentionMap)
                maps[name] = module.attention_map(taps, layout)
    return maps


def record_calls(module: Any, calls: list[Call]) -> Iterator[Any]:
    """Hooks that append a Call for every call of the module; returns their handles."""

    def begin(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        layout = next(value for value in (*args, *kwargs.values()) if isinstance(value, TokenLayout))
        calls.append(Call(layout, {"input": args[0]} if "input" in module.attention_taps else {}))

    def keep(name: str) -> Callable[..., None]:
        def hook(tap: nn.Module, args: tuple, output: Tensor) -> None:
            taps = calls[-1].taps  # a tap inside a recurrence is called once per step, with one query each
            taps[name] = torch.cat([taps[name], output], 2) if name in taps else output

        return hook

    yield module.register_forward_pre_hook(begin, with_kwargs=True)
    for name in module.attention_taps:
        if name != "input":
            yield module.get_submodule(name).register_forward_hook(keep(name))


def row_entropy(weights: Tensor) -> Tensor:
    """(…, L, S) -> (…, L)"""
    return torch.special.entr(weights).sum(-1)


def entropy(weights: Tensor) -> Tensor:
    """(…, H, L, S) -> (…, H), in nats: the mean over the rows of each head."""
    return row_entropy(weights).mean(-1)
