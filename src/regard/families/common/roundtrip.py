"""Writing a foreign config: the config is read back, and must result in the spec that it was written from.

The first field in which the two specs differ is one that the foreign class cannot express, so no family has to list
the fields that it lacks.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from regard.families.common.config_reader import FamilyError
from regard.models.base import Model
from regard.models.stack import Repeat, unroll
from regard.parts.block import Block
from regard.spec import Spec, SpecError

ModelType = TypeVar("ModelType", bound=Model)
SpecType = TypeVar("SpecType", bound=Spec)
REMEDY = "change the spec, choose another family, or save the model in regard's own format"


def check_roundtrip(
    model_type: str, model: ModelType, config: dict[str, Any], read: Callable[[dict], ModelType]
) -> dict[str, Any]:
    """Return the config if `read` returns this model for it; otherwise raise an error that names the difference."""
    try:
        back = canonical(read(config))
    except SpecError as error:  # the config selects another part, which cannot have these values
        raise FamilyError(f"a {model_type} model cannot express this spec ({error}); {REMEDY}") from error
    if back != canonical(model):
        found = list(differences(canonical(model), back, model.kind))
        path, ours, theirs = found[0]
        refusal = FamilyError(
            f"a {model_type} model cannot express {path}={ours!r:.120}, only {theirs!r:.120}; {REMEDY}"
        )
        refusal.differences = len(found)
        raise refusal
    return config


def bodies(block: Block, *types: type) -> tuple[Any, ...]:
    """The bodies of a block's sublayers; raises FamilyError unless they have these types."""
    found = tuple(sublayer.body for sublayer in block.sublayers)
    if len(found) != len(types) or not all(map(isinstance, found, types)):
        has, expected = ", ".join(body.kind for body in found), ", ".join(t.__name__ for t in types)
        raise FamilyError(f"the model's blocks hold {has}; this family's blocks hold {expected}; {REMEDY}")
    return found


def require_type(part: Any, expected: type[SpecType]) -> SpecType:
    """The part itself; raises FamilyError unless it has the type that the family has in its place."""
    if not isinstance(part, expected):
        raise FamilyError(f"the model has {part!r:.80}; this family has {expected.__name__} there; {REMEDY}")
    return part


def canonical(spec: Any, width: int = 0) -> Any:
    """The spec in one of its equal spellings: defaults filled in, layers unrolled, options of training reset.

    A part outside a model has no known width (0); the fields that default to a function of the width then stay None.
    """
    if isinstance(spec, tuple):
        return tuple(canonical(item, width) for item in spec)
    if not isinstance(spec, Spec):
        return spec
    width = getattr(spec, "width", width)
    spec = spec.canonical(width)
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    if "layers" in values:
        values["layers"] = tuple(  # no family has tied layers
            Repeat((block,), tied=run.tied and run.times > 1) for run in values["layers"] for block in unroll((run,))
        )
    if "dropout" in values:
        values["dropout"] = 0.0
    return dataclasses.replace(spec, **{name: canonical(value, width) for name, value in values.items()})


def differences(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The path and both values of every field in which two specs differ."""
    if isinstance(ours, Spec) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            yield from differences(getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}")
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(a, b, f"{path}[{n}]")
    elif ours != theirs:
        yield path, ours, theirs
