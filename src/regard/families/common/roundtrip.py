"""Writing a foreign config: the config is read back, and must result in the spec that it was written from.

The first field in which the two specs differ is one that the foreign class cannot express, so no family has to list
the fields that it lacks.
"""

import dataclasses
from collections.abc import Callable, Iterator
from textwrap import shorten
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
        read_back = canonical(read(config))
    except SpecError as error:  # the config selects another part, which cannot have these values
        raise FamilyError(f"a {model_type} model cannot express this spec ({error}); {REMEDY}") from error
    if read_back != canonical(model):
        found = list(differences(canonical(model), read_back, model.kind))
        path, value, supported = found[0]
        refusal = FamilyError(
            f"a {model_type} model cannot express {path}={brief(value)}, only {brief(supported)}; {REMEDY}"
        )
        refusal.differences = len(found)
        raise refusal
    return config


def brief(value: Any) -> str:
    """The repr of a value, cut between two fields if it is long."""
    return shorten(repr(value), 120, placeholder=" …)" if isinstance(value, Spec) else " …")


def bodies(block: Block, *types: type) -> tuple[Any, ...]:
    """The bodies of a block's sublayers; raises FamilyError unless they have these types."""
    found = tuple(sublayer.body for sublayer in block.sublayers)
    if len(found) != len(types) or not all(map(isinstance, found, types)):
        kinds, expected = ", ".join(body.kind for body in found), ", ".join(t.__name__ for t in types)
        raise FamilyError(f"the model's blocks hold {kinds}; this family's blocks hold {expected}; {REMEDY}")
    return found


def require_type(part: Any, expected: type[SpecType]) -> SpecType:
    """Return the part; raises FamilyError unless it has the type that the family requires."""
    if not isinstance(part, expected):
        raise FamilyError(f"the model has {brief(part)}; this family has {expected.__name__} instead; {REMEDY}")
    return part


def canonical(spec: Any, width: int = 0) -> Any:
    """A normal form, in which equal models have equal specs: defaults filled in, layers unrolled, dropout 0.

    The width of a part outside a model is unknown (0); fields that default to a function of the width then stay None.
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


def differences(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The path and both values of every field in which two specs differ."""
    if isinstance(a, Spec) and type(a) is type(b):
        for field in dataclasses.fields(a):
            yield from differences(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{path}[{n}]")
    elif a != b:
        yield path, a, b
