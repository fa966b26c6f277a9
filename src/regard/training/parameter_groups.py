"""Parameters in groups: which are trained, which are decayed, and their share of the learning rate.

Modules decide about weight decay. The weights of linear maps (nn.Linear, convolutions, torch's recurrent layers) are
decayed. Biases, norms, embeddings, learned vectors and rates are not: small embeddings, for example, make the gradients
of the early layers large (OLMo 2, 2025). A module with other weights of linear maps names them in the attribute
`weight_decay`, and exceptions in `no_weight_decay`; both are tuples of names of its own parameters. A parameter that
one module decays and another excludes (a head that is tied to the embedding) is not decayed.

    lr of parameter p = lr · decay^(depth - i) · scales of the patterns that match its name

is the learning rate with layer-wise decay in block i of a stack (Clark et al. 2020, ELECTRA; Bao et al. 2022, BEiT).
Parameters before the stack have decay^(depth + 1), those after it 1. In a model with several stacks each is counted on
its own.
"""

import difflib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from regard.models.stack import Stack
from regard.spec import Spec, SpecError, require

LINEAR_MAPS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class LRScale(Spec):
    """A factor of the learning rate for the parameters whose names match a pattern such as `embedding*`."""

    parameters: str
    scale: float

    def check(self) -> None:
        require(self.scale > 0, f"lr_scale: scale={self.scale} must be positive; to exclude parameters, use freeze")


def trainable_parameters(model: nn.Module) -> NamedParameters:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    require(len(named) > 0, "the model has no trainable parameter; set requires_grad of some to True")
    return named


def decay_groups(model: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """The named trainable parameters with weight decay, and those without."""
    named, decayed = trainable_parameters(model), decayed_parameters(model)
    return [pair for pair in named if pair[1] in decayed], [pair for pair in named if pair[1] not in decayed]


def decayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    decayed, excluded = set(), set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, LINEAR_MAPS):
            decayed.update(p for p in own.values() if p.ndim >= 2)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            excluded.update(own.values())
        decayed.update(named_in(module, "weight_decay"))
        excluded.update(named_in(module, "no_weight_decay"))
    return decayed - excluded


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The matrices of linear maps between hidden states, single or stacked: (…, out, in).

    A module excludes its input and output layers, and weights that are not matrices, by `no_muon`: a tuple of names of
    its parameters or children.
    """
    excluded = {p for module in model.modules() for p in named_in(module, "no_muon")}
    excluded |= {p for module in model.modules() if isinstance(module, _ConvNd) for p in module.parameters()}
    return {p for p in decayed_parameters(model) - excluded if p.ndim >= 2}


def named_in(module: nn.Module, attribute: str) -> Iterator[nn.Parameter]:
    """The parameters, or all parameters of the children, that an attribute of the module names."""
    for name in getattr(module, attribute, ()):
        if not hasattr(module, name):
            names = [*dict(module.named_parameters(recurse=False)), *dict(module.named_children())]
            raise AttributeError(
                f"{type(module).__name__}.{attribute} names {name}; its parameters are {', '.join(names) or 'none'}"
            )
        value = getattr(module, name)
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()


def make_groups(
    model: nn.Module, lr: float, weight_decay: float, scales: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters as groups of a torch optimizer; one group per weight decay and scale of the rate."""
    decayed, scales = decayed_parameters(model), scales or {}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trainable_parameters(model):
        key = (weight_decay if parameter in decayed else 0.0, scales.get(name, 1.0))
        group = {"params": [], "weight_decay": key[0], "lr_scale": key[1], "lr": lr * key[1]}
        groups.setdefault(key, group)["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups, reverse=True)]


def learning_rate_scales(model: nn.Module, layer_decay: float, lr_scales: Iterable[LRScale]) -> dict[str, float]:
    """The factor of the learning rate by name of the parameter."""
    scales = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    for path, module in model.named_modules():
        if isinstance(module, Stack):
            scales |= layer_scales(list(scales), path, len(module.blocks), layer_decay)
    for lr_scale in lr_scales:
        for name in matching_names(scales, lr_scale.parameters, "lr_scales"):
            scales[name] *= lr_scale.scale
    return scales


def layer_scales(names: list[str], stack: str, depth: int, decay: float) -> dict[str, float]:
    """The factors of layer-wise decay of the stack at this path, and of the parameters of its model before it."""
    owner = stack.rpartition(".")[0]
    own = [name for name in names if not owner or name.startswith(f"{owner}.")]
    first = next((i for i, name in enumerate(own) if name.startswith(f"{stack}.blocks.")), 0)
    scales = dict.fromkeys(own[:first], decay ** (depth + 1))
    for name in own:
        if name.startswith(f"{stack}.blocks."):
            block = int(name.removeprefix(f"{stack}.blocks.").partition(".")[0])
            scales[name] = decay ** (depth - block)
    return scales


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Exclude the parameters whose names match a pattern from training."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        for name in matching_names(parameters, pattern, "freeze"):
            parameters[name].requires_grad_(False)


@contextmanager
def frozen_except(optimizer: torch.optim.Optimizer, pattern: str) -> Generator[None]:
    """A context in which only the parameters whose names match the pattern have gradients.

    The others, which the optimizer trains in other steps, keep their weights and moments.
    """
    others = [] if pattern == "*" else parameters_except(optimizer, pattern)
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def parameters_except(optimizer: torch.optim.Optimizer, pattern: str) -> list[Tensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if not fnmatchcase(name, pattern)
    ]


def matching_names(names: Iterable[str], pattern: str, field: str, noun: str = "parameter") -> list[str]:
    """The names that match, as in `embedding*` or `stack.blocks.0.*`; SpecError with near names if none does."""
    names = list(names)
    if matches := [name for name in names if fnmatchcase(name, pattern)]:
        return matches
    parts = [name.split(".") for name in names]
    known = dict.fromkeys(".".join([*part[:i], "*"]) for part in parts for i in range(1, len(part)))
    near = difflib.get_close_matches(pattern, [*known, *names], n=3, cutoff=0.5)
    near = near or list(dict.fromkeys(f"{part[0]}*" for part in parts))[:8]
    raise SpecError(f"{field}: {pattern!r} matches no {noun}; names of this model are, for example, {join(near)}")


def join(names: list[str]) -> str:
    return ", ".join(map(repr, names))
