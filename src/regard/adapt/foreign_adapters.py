"""Adapters with the names of another library's model, for `peft.PeftModel.from_pretrained` and from it.

The weight table of the family (weights/table.py) has the names and the order of rows. A layer of theirs may consist of
several of ours: fused q, k and v. With W = [W_q; W_v], the adapters of q and v are one adapter of rank 2r

    A = [A_q; A_v]        B = [[B_q, 0], [0, B_v]]

with twice the alpha, which `rank_pattern` and `alpha_pattern` state for this layer. On reading, every layer of ours has
the A of the fused layer and its own rows of B. Layers stored as (in, out) are those with `fan_in_fan_out`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from regard.adapt.adapters import DEFAULT, adapter_paths, add_lora_to, check_new_adapter, resolve_adapter
from regard.adapt.lora import LoRA, LoRALayer
from regard.adapt.peft import (
    CONFIG,
    TENSORS,
    adapter_config,
    check_shared,
    copy_tensors,
    identity,
    read_config,
    read_options,
    read_tensors,
    tensor_name,
    write_adapter,
)
from regard.adapt.targets import AdapterError, adaptable_weights, ends_in, select_weights
from regard.weights.ops import InterleavePairs, Split, Transpose
from regard.weights.table import Link, Table, match_placeholders

TASK_TYPES = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}
SIDES = ("lora_A", "lora_B")


@dataclass(frozen=True)
class ForeignLayer:
    """A linear layer of another library's model, and our layers that are its rows."""

    path: str
    ours: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of ours
    inputs: int
    link: Link

    @property
    def transposed(self) -> bool:
        return any(isinstance(op, Transpose) for op in self.link.ops)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Our matrices (rows, n) as one of theirs, in the order of their rows."""
        (joined,) = self.link.write(ours)
        return joined.mT if self.transposed else joined

    def split(self, foreign: Tensor) -> Sequence[Tensor]:
        """The inverse of `join`."""
        like = [foreign.new_empty(size, foreign.shape[1]) for size in self.sizes]
        return self.link.read([foreign.mT if self.transposed else foreign], self.link.stages(like))


def foreign_layers(model: nn.Module, table: Table) -> dict[str, ForeignLayer]:
    """Their layers by path, of which all parts are linear layers of our model."""
    weights = adaptable_weights(model).values()
    shapes = {f"{name}.weight": w.weight.shape for w in weights if not w.stacked for name in w.names}
    found = {}
    for name in shapes:
        for link in table.links:
            values = match_placeholders(link.ours[0], name)
            ours = [] if values is None else [pattern.format(**values) for pattern in link.ours]
            if values is None or not all(part in shapes for part in ours) or not keeps_columns(link):
                continue
            path, dot, leaf = link.foreign_names(values, 1)[0].rpartition(".")
            if leaf == "weight":
                parts = tuple(part.removesuffix(".weight") for part in ours)
                sizes = tuple(shapes[part][0] for part in ours)
                found[path] = ForeignLayer(path, parts, sizes, shapes[name][1], link)
    return found


def keeps_columns(link: Link) -> bool:
    """Whether the operations only reorder and join rows of our matrices, apart from a transposition."""
    return all(isinstance(op, Transpose | InterleavePairs) or isinstance(op, Split) and op.dim == 0 for op in link.ops)


def export_adapter(
    model: nn.Module, folder: Path | str, table: Table, name: str | None = None, base: str | None = None
) -> None:
    """Write one adapter, by default the active one, for the model of another library that the table describes.

    base: the path or name of that model.
    """
    name = resolve_adapter(model, name, "export")
    adapted = {path: layer for layer, paths in adapter_paths(model).items() if name in layer.loras for path in paths}
    layers = [layer for layer in foreign_layers(model, table).values() if not adapted.keys().isdisjoint(layer.ours)]
    missing = adapted.keys() - {path for layer in layers for path in layer.ours}
    if missing:
        raise AdapterError(
            f"{min(missing)} has no linear layer of its own in models of this family, so PEFT cannot adapt it there; "
            "merge the adapter into the model: regard export --merge"
        )
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        a, b = join_adapters(layer, adapted, name)
        ranks[layer.path] = len(a)
        tensors |= {
            tensor_name(layer.path, "lora_A"): a.contiguous(),
            tensor_name(layer.path, "lora_B"): b.contiguous(),
        }
    config: dict[str, Any] = adapter_config(model, name, identity, base) | {
        "target_modules": [layer.path for layer in layers],
        "target_parameters": None,
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "task_type": TASK_TYPES.get(getattr(model.spec, "kind", "")),
    }
    rank, alpha = config["r"], config["lora_alpha"]
    fused = {path: value for path, value in ranks.items() if value != rank}
    patterns = {"rank_pattern": fused, "alpha_pattern": {p: alpha * value / rank for p, value in fused.items()}}
    write_adapter(Path(folder), config | (patterns if fused else {}), tensors)


def join_adapters(layer: ForeignLayer, adapted: Mapping[str, LoRALayer], name: str) -> tuple[Tensor, Tensor]:
    """A and B of the adapters of the layer's parts as one adapter."""
    parts = [path for path in layer.ours if path in adapted]
    a = torch.cat([adapted[path].matrix("A", name).detach() for path in parts])  # (n·r, in)
    rank = len(a) // len(parts)
    blocks = []
    for path, size in zip(layer.ours, layer.sizes, strict=True):
        block = a.new_zeros(size, len(a))
        if path in parts:
            column = parts.index(path) * rank
            block[:, column : column + rank] = adapted[path].matrix("B", name).detach()
        blocks.append(block)
    return a, layer.join(blocks)  # (out, n·r)


def load_foreign_adapter(model: nn.Module, folder: Path | str, table: Table, name: str = DEFAULT) -> list[str]:
    """Add an adapter that was trained on a model of another library; returns the names of the adapted layers."""
    folder = Path(folder)
    options = read_options(folder / CONFIG)
    accepted = {"rank_pattern", "alpha_pattern", "fan_in_fan_out"}
    lora = read_config(folder / CONFIG, accepted, targets=("all-linear",))  # the file has the layers
    layers = foreign_layers(model, table)
    stored = stored_layers(folder / TENSORS)
    # without the prefix of the whole table: an adapter of the base model
    prefix = "" if any(path.startswith(table.prefix) for path in stored) else table.prefix
    canonical = {path: prefix + path for path in stored}
    unknown = [path for path, own in canonical.items() if own not in layers]
    if unknown:
        raise AdapterError(
            f"{folder}: {unknown[0]} is not a linear layer that this model has (and {len(unknown) - 1} more); load the "
            "adapter into the model that it was trained for"
        )
    if options.get("use_rslora") and (options.get("rank_pattern") or options.get("alpha_pattern")):
        raise AdapterError(f"{folder}: use_rslora with rank_pattern or alpha_pattern is not supported; use one of them")
    ranks = {path: pattern_value(options.get("rank_pattern"), path, lora.rank) for path in stored}
    alphas = {path: pattern_value(options.get("alpha_pattern"), path, lora.alpha) for path in stored}
    shapes = {}
    for path, own in canonical.items():
        layer, rank = layers[own], ranks[path]
        shapes[tensor_name(path, "lora_A")] = [rank, layer.inputs]
        shapes[tensor_name(path, "lora_B")] = [sum(layer.sizes), rank]
    tensors = read_tensors(folder / TENSORS, shapes, shapes.keys())
    uniform = len(set(ranks.values())) == 1 and len(set(alphas.values())) == 1
    largest = max(ranks.values())
    ours: dict[str, Tensor] = {}
    for path, own in canonical.items():
        a, b = (tensors[tensor_name(path, side)] for side in SIDES)
        if not uniform:  # one rank for all layers: the others are filled with zeros, and B includes the scale
            fill = (0, 0, 0, largest - len(a))
            a, b = (
                nn.functional.pad(a, fill),
                nn.functional.pad(b * (alphas[path] / ranks[path]), (0, largest - len(a))),
            )
        for part, rows in zip(layers[own].ours, layers[own].split(b), strict=True):
            ours |= {tensor_name(part, "lora_A"): a, tensor_name(part, "lora_B"): rows}
    paths = tuple(part for own in canonical.values() for part in layers[own].ours)
    alpha = next(iter(alphas.values())) if uniform else float(largest)
    lora = LoRA(largest, alpha, paths, lora.dropout)
    weights = select_weights(model, paths)
    check_new_adapter(model, weights, lora, name)
    check_shared(folder / TENSORS, weights, ours, identity)
    added = add_lora_to(model, weights, lora, name=name)
    copy_tensors(model, name, ours, identity)
    return added


def has_foreign_names(model: nn.Module, folder: Path) -> bool:
    """Whether the adapter's layers are not those of our model."""
    modules = {name for name, _ in model.named_modules()}
    return not any(path.replace(".base_layer", "") in modules for path in stored_layers(folder / TENSORS))


def stored_layers(file: Path) -> list[str]:
    """The paths of the layers whose adapters a file has."""
    try:
        with safe_open(file, framework="pt") as stream:
            names = list(stream.keys())
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    matches = [re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name) for name in names]
    unknown = [name for name, match in zip(names, matches, strict=True) if match is None]
    if unknown or not names:
        raise AdapterError(
            f"{file}: {(unknown or ['no tensor'])[0]} is not a matrix of a LoRA adapter of linear layers"
        )
    return list(dict.fromkeys(match[1] for match in matches if match))


def pattern_value(patterns: Any, path: str, default: Any) -> Any:
    """The value of the pattern that the path ends in; only names are read, no regular expressions."""
    for pattern, value in (patterns or {}).items():
        if not re.fullmatch(r"[\w.-]+", pattern) or type(value) not in (int, float) or value <= 0:
            raise AdapterError(
                f"{CONFIG}: the pattern {pattern!r:.80}: {value!r:.80} is not supported; use names of layers"
            )
        if ends_in(path, pattern):
            return value
    return default
