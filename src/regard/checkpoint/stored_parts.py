"""Parts of a model that depend on the tensors in its files: a tied head, as in `transformers` 5, and a pooler.

If the config ties the head to the embeddings, it depends on the tensors in the files:
    one of the two                   it is used for both
    both, with equal numbers         they are tied
    both, with different numbers     both are kept, with a warning
If the class has a pooler and the files hold none, the model has none.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.models.base import Model, build_on_meta
from regard.models.encoder import Encoder
from regard.models.heads import Pooler
from regard.models.stack import AnySpec, field_values, without_repeats
from regard.spec import Spec
from regard.weights.table import StoredTensor, Table

MakeTable = Callable[[Model], Table]


def drop_missing_pooler(spec: Model, make_table: MakeTable, stored: Mapping[str, StoredTensor]) -> Model:
    """The spec without the pooler of a base model if the files have none: `add_pooling_layer=False` in transformers."""
    if not (isinstance(spec, Encoder) and isinstance(spec.head, Pooler)):
        return spec
    table = make_table(spec)
    found = table.foreign_name("head.dense.dense.weight") in table.canonical_names(stored)
    return spec if found else replace(spec, head=None)


def resolve_tying(
    folder: Path, spec: Model, make_table: MakeTable, stored: Mapping[str, StoredTensor]
) -> tuple[Model, Mapping[str, StoredTensor]]:
    """The spec, untied if the files hold a head that differs from the embeddings, and the tensors by canonical name."""
    without_tying = untie(spec)
    if without_tying == spec:
        return spec, stored
    tied_table, untied_table = make_table(spec), make_table(without_tying)
    untied = dict(build_on_meta(without_repeats(without_tying)).named_parameters())
    stored = tied_table.canonical_names(stored)
    for name, first_name in tied_names(build_on_meta(without_repeats(spec))):
        if name not in untied:  # still tied by another rule, such as one table for encoder and decoder
            continue
        head, embedding = untied_table.foreign_name(name), tied_table.foreign_name(first_name)
        if head not in stored:
            continue
        if embedding not in stored:
            return spec, {embedding: stored[head], **stored}
        if not equal(stored[head], stored[embedding]):
            warnings.warn(
                f"{folder}: the config ties {head} to {embedding}, but the files hold different numbers, so both are "
                "kept. If this is intended, set tie_word_embeddings to false in config.json.",
                stacklevel=3,
            )
            return without_tying, stored
    return spec, stored


def untie(spec: AnySpec) -> AnySpec:
    """The same spec with tied=False in every part that has this field."""
    values = field_values(spec)
    changed: dict[str, Any] = {name: untie(value) for name, value in values.items() if isinstance(value, Spec)}
    if "tied" in values:
        changed["tied"] = False
    return replace(spec, **changed)


def tied_names(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Every further name of a tied parameter, with its first name."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            yield name, first[id(parameter)]


def equal(a: StoredTensor, b: StoredTensor) -> bool:
    return a.shape == b.shape and torch.equal(a.read(), b.read())
