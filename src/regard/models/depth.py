"""The stacks of a model, however many it has, without building any: a config may claim any depth."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from regard.models.stack import Repeat
from regard.spec import Spec

StackSpec = TypeVar("StackSpec", bound=Spec)


def stacks(spec: Spec) -> Iterator[tuple[tuple[Repeat, ...], int]]:
    """The layers and the width of every stack."""
    for name, value in values(spec).items():
        if name == "layers":
            yield value, values(spec)["width"]
        elif isinstance(value, Spec):
            yield from stacks(value)


def once(spec: StackSpec) -> StackSpec:
    """The same model with every run of layers there once."""
    changed: dict[str, Any] = {name: once(value) for name, value in values(spec).items() if isinstance(value, Spec)}
    if "layers" in values(spec):
        changed["layers"] = tuple(replace(run, times=1) for run in values(spec)["layers"])
    return replace(spec, **changed)


def values(spec: Spec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}
