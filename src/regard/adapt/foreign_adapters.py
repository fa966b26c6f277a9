"""Adapters with the names of another library's model, for `peft.PeftModel.from_pretrained` and from it.

The weight table of the family (weights/table.py) has the names and the order of rows. A layer of theirs may consist of
several of ours: fused q, k and v. With W = [W_q; W_v], the adapters of q and v are one adapter of rank 2r

    A = [A_q; A_v]        B = [[B_q, 0], [0, B_v]]

with the alpha of the same scale, which `rank_pattern` and `alpha_pattern` state for this layer. On reading, every layer
of ours has the A of the fused layer and its own rows of B. DoRA's magnitudes are joined as rows are; those of parts
without an adapter are the norms of their rows. Layers stored as (in, out) are those with `fan_in_fan_out`. The weights
of a head that was trained beside the adapter are written as they are; their modules are PEFT's `modules_to_save`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from regard.adapt.adapters import DEFAULT, adapter_paths, add_lora_to, check_new_adapter, resolve_adapter
from regard.adapt.lora import LoRA, LoRALayer
from regard.adapt.peft import (
    CONFIG,
    MAGNITUDE,
    MATRICES,
    PREFIX,
    TENSORS,
    adapter_config,
    check_shared,
    copy_tensors,
    identity,
    read_base_format,
    read_config,
    read_options,
    read_tensors,
    spec_of,
    tensor_name,
    write_adapter,
)
from regard.adapt.pissa import INIT, from_residual
from regard.adapt.targets import AdapterError, adaptable_weights, ends_in, select_weights
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.parts.input import Tokens
from regard.weights.ops import InterleavePairs, Split, Transpose
from regard.weights.table import Link, Table, match_placeholders

TASK_TYPES = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True)
class ForeignLayer:
    """A linear layer of another library's model, and our layers that are its rows."""

    path: str
    ours: tuple[str, ...]
    weights: tuple[Tensor, ...]  # of ours
    link: Link

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of ours."""
        return tuple(len(weight) for weight in self.weights)

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1]

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
    adaptable = adaptable_weights(model).values()
    weights = {f"{name}.weight": w.weight.detach() for w in adaptable if not w.stacked for name in w.names}
    found = {}
    for name in weights:
        for link in table.links:
            values = match_placeholders(link.ours[0], name)
            ours = [] if values is None else [pattern.format(**values) for pattern in link.ours]
            if values is None or not all(part in weights for part in ours) or not keeps_columns(link):
                continue
            path, dot, leaf = link.foreign_names(values, 1)[0].rpartition(".")
            if leaf == "weight":
                parts = tuple(part.removesuffix(".weight") for part in ours)
                found[path] = ForeignLayer(path, parts, tuple(weights[part] for part in ours), link)
    return found


def keeps_columns(link: Link) -> bool:
    """Whether the operations only reorder and join rows of our matrices, apart from a transposition."""
    return all(isinstance(op, Transpose | InterleavePairs) or isinstance(op, Split) and op.dim == 0 for op in link.ops)


def export_adapter(
    model: nn.Module,
    folder: Path | str,
    table: Table,
    name: str | None = None,
    base: str | None = None,
    with_head: bool = False,
) -> None:
    """Write one adapter, by default the active one, for the model of another library that the table describes.

    base: the path or name of that model. with_head: write the weights of the model's head too.
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
    lora = spec_of(model, name).of_original
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        a, b = join_adapters(layer, adapted, name)
        ranks[layer.path] = len(a)
        tensors |= {
            tensor_name(layer.path, "lora_A"): a.contiguous(),
            tensor_name(layer.path, "lora_B"): b.contiguous(),
        }
        if lora.dora:
            tensors[tensor_name(layer.path, MAGNITUDE)] = join_magnitudes(layer, adapted, name)
    config: dict[str, Any] = adapter_config(model, name, identity, base) | {
        "target_modules": [layer.path for layer in layers],
        "target_parameters": None,
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "task_type": TASK_TYPES.get(getattr(model.spec, "kind", "")),
    }
    if with_head and (head := head_tensors(model, table)):
        tensors |= {f"{PREFIX}{key}": tensor for key, tensor in head.items()}
        config |= {"modules_to_save": sorted({saved_module(key) for key in head}), "task_type": head_task(model)}
    fused = {path: rank for path, rank in ranks.items() if rank != lora.rank}
    alphas = {path: lora.with_rank(rank).alpha for path, rank in fused.items()}
    patterns = {"rank_pattern": fused, "alpha_pattern": alphas}
    write_adapter(Path(folder), config | (patterns if fused else {}), tensors, lora.base)


@dataclass(frozen=True)
class ForeignHead:
    """The weights of a model's head in PEFT's file."""

    links: list[tuple[Link, list[str], list[Tensor]]]  # with their names in the file, and our weights

    @classmethod
    def of(cls, model: nn.Module, table: Table) -> "ForeignHead":
        ours = {name: p.detach() for name, p in model.named_parameters() if name.startswith("head.")}
        matches = [(link, values, [ours[name] for name in names]) for link, values, names in table.matches(ours)]
        return cls(
            [
                (link, [PREFIX + name for name in link.foreign_names(values, len(link.write(parts)))], parts)
                for link, values, parts in matches
            ]
        )

    @property
    def shapes(self) -> dict[str, list[int]]:
        """By their names in the file."""
        return {
            name: [*tensor.shape]
            for link, names, ours in self.links
            for name, tensor in zip(names, link.write(ours), strict=True)
        }

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a file into the weights of the head; those that the file lacks were not trained."""
        for link, names, ours in self.links:
            if not tensors.keys() >= {*names}:
                continue
            read = link.read([tensors[name] for name in names], link.stages(ours))
            for weight, tensor in zip(ours, read, strict=True):
                weight.copy_(tensor)


def head_tensors(model: nn.Module, table: Table) -> dict[str, Tensor]:
    """The weights of a classification head in the names of the other library; none if the head has no weights."""
    ours = {name: p.detach() for name, p in model.named_parameters() if name.startswith("head.")}
    if ours and not isinstance(getattr(model.spec, "head", None), Classification):
        raise AdapterError(
            f"PEFT's form of an adapter has no place for {min(ours)}, only for the weights of classifiers; write the "
            "whole model: regard export --merge"
        )
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in table.write(ours)}


def saved_module(name: str) -> str:
    """The module with a tensor of a head. PEFT itself adds the modules `classifier` and `score` to those of a task."""
    first = name.partition(".")[0]
    return first if first in ("classifier", "score") else name.rpartition(".")[0]


def head_task(model: nn.Module) -> str | None:
    """PEFT's task of a classifier; None for images, whose models do not have the inputs of PEFT's tasks."""
    spec = model.spec
    assert isinstance(spec, Encoder) and isinstance(spec.head, Classification)
    if not isinstance(spec.input, Tokens):
        return None
    return "TOKEN_CLS" if spec.head.pool == "none" else "SEQ_CLS"


def join_adapters(layer: ForeignLayer, adapted: Mapping[str, LoRALayer], name: str) -> tuple[Tensor, Tensor]:
    """A and B of the adapters of the layer's parts as one adapter."""
    parts = {path: adapted[path].matrices(name) for path in layer.ours if path in adapted}
    a = torch.cat([a for a, _ in parts.values()])  # (n·r, in)
    rank = len(a) // len(parts)
    blocks = []
    for path, size in zip(layer.ours, layer.sizes, strict=True):
        block = a.new_zeros(size, len(a))
        if path in parts:
            column = [*parts].index(path) * rank
            block[:, column : column + rank] = parts[path][1]
        blocks.append(block)
    return a, layer.join(blocks)  # (out, n·r)


def join_magnitudes(layer: ForeignLayer, adapted: Mapping[str, LoRALayer], name: str) -> Tensor:
    """(out,)"""
    magnitudes = [
        adapted[path].magnitude(name).detach() if path in adapted else weight.norm(dim=1)
        for path, weight in zip(layer.ours, layer.weights, strict=True)
    ]
    return layer.join([magnitude.unsqueeze(1) for magnitude in magnitudes])[:, 0].contiguous()


def load_foreign_adapter(model: nn.Module, folder: Path | str, table: Table, name: str = DEFAULT) -> list[str]:
    """Add an adapter that was trained on a model of another library; returns the names of the adapted layers.

    If a head was trained beside it, the model must have such a head, which gets its weights.
    """
    folder = Path(folder)
    options = read_options(folder / CONFIG)
    accepted = {"rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save"}
    lora = read_config(folder / CONFIG, accepted, targets=("all-linear",))  # the file has the layers
    layers = foreign_layers(model, table)
    stored, others = stored_names(folder / TENSORS)
    head = ForeignHead.of(model, table) if options.get("modules_to_save") else ForeignHead([])
    if unread := sorted({*others} - {*head.shapes}):
        raise AdapterError(
            f"{folder / TENSORS}: {unread[0]} is neither a matrix of a LoRA adapter of linear layers nor a weight of a "
            "head that this model has; merge the adapter in PEFT, model.merge_and_unload(), and use the merged model"
        )
    # without the prefix of the whole table: an adapter of the base model
    prefix = "" if any(path.startswith(table.prefix) for path in stored) else table.prefix
    canonical = {path: prefix + path for path in stored}
    unknown = [path for path, own in canonical.items() if own not in layers]
    if unknown:
        raise AdapterError(
            f"{folder}: {unknown[0]} is not a linear layer that this model has (and {len(unknown) - 1} more); load the "
            "adapter into the model that it was trained for"
        )
    stored_loras = {path: layer_spec(options, lora, path) for path in stored}
    stored_parts = {path: layers[own] for path, own in canonical.items()}
    head_shapes = {key: head.shapes[key] for key in others}
    tensors = read_layers(folder / TENSORS, stored_parts, stored_loras, head_shapes)
    loras = {path: each.of_original for path, each in stored_loras.items()}
    first, largest = next(iter(loras.values())), max(each.rank for each in loras.values())
    uniform = all(each == first for each in loras.values())
    ours: dict[str, Tensor] = {}
    for path, own in canonical.items():
        a, b = (tensors[tensor_name(path, side)] for side in MATRICES)
        if not uniform:  # one rank for all layers: the others are filled with zeros, and B includes the scale
            extra = largest - len(a)
            a, b = nn.functional.pad(a, (0, 0, 0, extra)), nn.functional.pad(b * loras[path].scale, (0, extra))
        for part, rows in zip(layers[own].ours, layers[own].split(b), strict=True):
            ours |= {tensor_name(part, "lora_A"): a, tensor_name(part, "lora_B"): rows}
        if lora.dora:
            split = layers[own].split(tensors[tensor_name(path, MAGNITUDE)].unsqueeze(1))
            ours |= {tensor_name(part, MAGNITUDE): m[:, 0] for part, m in zip(layers[own].ours, split, strict=True)}
    paths = tuple(part for own in canonical.values() for part in layers[own].ours)
    if not uniform:
        first = replace(first, rank=largest, alpha=float(largest), rslora=False)
    lora = replace(first, targets=paths, base=read_base_format(folder))
    weights = select_weights(model, paths)
    check_new_adapter(model, weights, lora, name)
    check_shared(folder / TENSORS, weights, ours, identity)
    added = add_lora_to(model, weights, lora, name=name)
    copy_tensors(model, name, ours, identity)
    head.copy(tensors)
    return added


def layer_spec(options: Mapping[str, Any], lora: LoRA, path: str) -> LoRA:
    """The adapter of one layer, with its rank and alpha of the patterns."""
    rank = pattern_value(options.get("rank_pattern"), path, lora.rank)
    return replace(lora, rank=int(rank), alpha=pattern_value(options.get("alpha_pattern"), path, lora.alpha))


def read_layers(
    file: Path, layers: Mapping[str, ForeignLayer], loras: Mapping[str, LoRA], others: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """The tensors of a file; those of PiSSA converted to adapters of the original weights.

    others: the shapes of the further tensors in the file
    """
    shapes = {**others}
    for path, layer in layers.items():
        outputs, rank = sum(layer.sizes), loras[path].rank
        shapes |= {tensor_name(path, "lora_A"): [rank, layer.inputs], tensor_name(path, "lora_B"): [outputs, rank]}
        if loras[path].dora:
            shapes[tensor_name(path, MAGNITUDE)] = [outputs]
    tensors = read_tensors(file, shapes, shapes.keys())
    for path, layer in layers.items():
        if loras[path].init != INIT:
            weight = layer.join(layer.weights)
            a, b = (tensor_name(path, side) for side in MATRICES)
            rank, scale = loras[path].rank, loras[path].scale
            tensors[a], tensors[b] = from_residual(tensors[a], tensors[b], weight, rank, scale)
    return tensors


def has_foreign_names(model: nn.Module, folder: Path) -> bool:
    """Whether the adapter's layers are not those of our model."""
    modules = {name for name, _ in model.named_modules()}
    return not any(path.replace(".base_layer", "") in modules for path in stored_names(folder / TENSORS)[0])


def stored_names(file: Path) -> tuple[list[str], list[str]]:
    """The paths of the layers whose adapters a file has, and the names of its other tensors."""
    try:
        with safe_open(file, framework="pt") as stream:
            names = list(stream.keys())
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    parts = r"base_model\.model\.(.+)\.(?:lora_[AB]\.weight|lora_magnitude_vector)"
    matches = [re.fullmatch(parts, name) for name in names]
    others = [name for name, match in zip(names, matches, strict=True) if match is None]
    if len(others) == len(names):
        raise AdapterError(f"{file}: {(others or ['no tensor'])[0]} is not a matrix of a LoRA adapter of linear layers")
    return list(dict.fromkeys(match[1] for match in matches if match)), others


def stored_labels(folder: Path) -> int | None:
    """The number of outputs of a head named `score`, as in the classifiers of decoders; None if there is none."""
    name = f"{PREFIX}score.weight"
    if name not in stored_names(folder / TENSORS)[1]:
        return None
    with safe_open(folder / TENSORS, framework="pt") as stream:
        shape = stream.get_slice(name).get_shape()
    return shape[0] if len(shape) == 2 else None


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
