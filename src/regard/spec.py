"""Specs: a model as a tree of small frozen dataclasses, with the same content in Python, JSON and TOML.

The class of a spec selects the part. In a file the class is given by its `kind`, which is looked up in the literal
tables of kinds.py. Values are checked against the types of their fields on construction; an unknown key or kind is an
error that suggests the nearest one. A spec defines the meaning of the weights only: backend, dtype, device and cache
are chosen at run time.
"""

import dataclasses
import difflib
import importlib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar, Union

from regard.kinds import TABLES

SpecClass = TypeVar("SpecClass", bound="Spec")
REGISTERED: dict[str, type["Spec"]] = {}  # kinds of classes outside the package


class SpecError(ValueError):
    """An invalid spec; the message contains the path of the field, its value and the expected value.

    place: the dotted name of the part, relative to the spec that raises the error.
    """

    def __init__(self, message: str, place: str = ""):
        super().__init__(f"{place}: {message}" if place else message)
        self.message, self.place = message, place


@dataclasses.dataclass(frozen=True)
class Spec:
    """Base of all specs. Subclasses are frozen dataclasses; rules across fields belong in `check`.

    A field that accepts None has the default None, because files leave out None.
    """

    kind_table: ClassVar[str] = "parts"  # the table of kinds.py that has the kinds of this class

    def __new__(cls, /, *values: Any, **named: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in named:
            if name not in known:  # not `require`, whose message would be composed for every correct name
                raise SpecError(f"{cls.__name__} has no field {name!r}; {suggest_name(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            value = convert(getattr(self, name), hint, f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise SpecError if fields contradict each other."""

    def unpack(self) -> "tuple[Spec, ...]":
        """The specs that replace this one in a tuple field. The default is the spec itself; `Tiled` has several."""
        return (self,)

    def canonical(self, width: int) -> Self:
        """The same part with its defaults filled in and its training options reset, so that equal parts compare equal.

        `width` is that of the stack; 0: unknown, and the fields that depend on it are not filled in.
        """
        return self

    @property
    def kind(self) -> str:
        return kind_of(type(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data with all values, defaults included, except None (TOML has no null)."""
        values = {f.name: to_plain_data(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"kind": self.kind} | {k: v for k, v in values.items() if v is not None}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def fields_to_write(self) -> dict[str, Any]:
        """The field values for `to_toml`; a model overrides it to leave out the values that it fills in itself."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_toml(self, defaults: bool = False) -> str:
        """TOML in which fields with their default value are left out unless `defaults`."""
        return "\n".join(toml_lines(self.to_dict() if defaults else without_defaults(self))) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        spec = parse_spec(data, cls.__name__, cls)
        if not isinstance(spec, cls):
            raise SpecError(f"expected a spec of the class {cls.__name__}, found kind={data.get('kind')!r}")
        return spec

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        return cls.from_dict(tomllib.loads(text))


ELSEWHERE = {  # names of other libraries: ours
    "learning_rate": "lr", "max_steps": "steps", "warmup_steps": "warmup", "batch_size": "rows",
    "per_device_train_batch_size": "rows", "gradient_accumulation_steps": "accumulate", "max_length": "length",
    "max_seq_length": "length", "r": "rank", "lora_alpha": "alpha", "num_generations": "group",
    "max_completion_length": "max_new", "hidden_size": "width",
}  # fmt: skip


def suggest_name(name: str, names: Iterable[str]) -> str:
    """The remedy for an unknown name: 'did you mean …?' with the nearest of the names, else the list of all."""
    names = sorted(names)
    known = [ELSEWHERE[name]] if ELSEWHERE.get(name) in names else []
    close = known or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(names)}"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def register(kind: str) -> Callable[[type[SpecClass]], type[SpecClass]]:
    """A class decorator that assigns a kind to a spec class outside the package, so that files can contain it.

        @regard.register("my_mixer")
        @dataclass(frozen=True)
        class MyMixer(regard.Body): ...

    A folder or file with this kind can be read once the module with the class was imported.
    """
    if not (isinstance(kind, str) and kind.strip()):
        raise ValueError(f"the kind {kind!r} is not a name; write @regard.register('a_name')")

    def add(cls: type[SpecClass]) -> type[SpecClass]:
        if not (isinstance(cls, type) and issubclass(cls, Spec) and dataclasses.is_dataclass(cls)):
            raise TypeError(f"{cls!r} must be a frozen dataclass that derives from Spec, for example from regard.Body")
        registered = REGISTERED.get(kind)
        owner = TABLES[cls.kind_table].get(kind, None if registered is None else import_path(registered))
        if owner not in (None, import_path(cls)):
            raise ValueError(f"kind {kind!r} is taken by {owner}; choose another name")
        for field in dataclasses.fields(cls):
            path = f"{cls.__name__}.{field.name}"
            require(not hasattr(Spec, field.name), f"{path}: every spec has an attribute of this name; choose another")
            require(field.init, f"{path}: a field with init=False cannot be read from a file; use a property instead")
        REGISTERED[kind] = cls
        kind_of.cache_clear()
        return cls

    return add


@cache
def field_types(cls: "type[Spec]") -> dict[str, Any]:
    """The type of each field. SpecError if a field accepts None, but None is not its default."""
    resolved = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if default_of(field) is not None and accepts_none(resolved[field.name]):
            raise SpecError(
                f"{cls.__name__}.{field.name} accepts None, but None is not its default, and files leave out None; "
                "make None the default, or remove it from the type"
            )
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def default_of(field: dataclasses.Field) -> Any:
    """The default of a field; `dataclasses.MISSING` if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def accepts_none(hint: Any) -> bool:
    try:
        return convert(None, hint, "") is None
    except SpecError:
        return False


@cache
def kind_of(cls: type) -> str:
    kinds = [kind for table in TABLES.values() for kind, path in table.items() if path == import_path(cls)]
    kinds += [kind for kind, registered in REGISTERED.items() if registered is cls]
    if not kinds:
        raise SpecError(f"{import_path(cls)} has no kind; decorate the class with @regard.register('a_name')")
    return kinds[0]


def has_kind(cls: type) -> bool:
    return any(import_path(cls) in table.values() for table in TABLES.values()) or cls in REGISTERED.values()


def import_path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def class_of(kind: str, path: str, base: type[Spec] = Spec) -> type[Spec]:
    """The class of a kind, from the table of its base class; `path` is the position in the tree, for error messages."""
    known = TABLES[base.kind_table] | {k: cls for k, cls in REGISTERED.items() if cls.kind_table == base.kind_table}
    if not isinstance(kind, str) or kind not in known:
        fitting = [name for name, found in known.items() if issubclass(import_class(found), base)]
        raise SpecError(
            f"{path}: there is no kind {kind!r}; {suggest_name(str(kind), fitting)} "
            "(a registered class is known once its module was imported)"
        )
    return import_class(known[kind])


def import_class(found: str | type[Spec]) -> type[Spec]:
    """A class, or that of an entry `module:name` of a table."""
    if isinstance(found, type):
        return found
    module, name = found.split(":")
    return getattr(importlib.import_module(module), name)


def parse_spec(data: Any, path: str, hint: Any = None, default: "type[Spec] | None" = None) -> Spec:
    """A spec from plain data. `path` is its position in the tree, for error messages.

    `hint` is the type of the field. Data without a `kind` have the kind of `hint`, or else of `default`.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"{path}: expected a table with a 'kind', found {data!r:.80}")
    base = hint if isinstance(hint, type) and issubclass(hint, Spec) else Spec
    cls = class_of(data["kind"], path, base) if "kind" in data else base if has_kind(base) else default
    if cls is None:
        raise SpecError(f"{path}: expected a table with a 'kind', found only {', '.join(map(str, data)) or 'nothing'}")
    expected, fields = field_types(cls), {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key != "kind" and key not in expected:
            raise SpecError(f"{path}: {kind_of(cls)} has no key {key!r}; {suggest_name(str(key), expected)}")
    missing = [name for name, field in fields.items() if default_of(field) is dataclasses.MISSING and name not in data]
    if missing:
        raise SpecError(f"{path}: {kind_of(cls)} needs {', '.join(missing)}")
    given = {key: value for key, value in data.items() if key != "kind"}
    values = {k: parse_value(v, f"{path}.{k}", expected[k], default_of(fields[k])) for k, v in given.items()}
    try:
        return cls(**values)
    except SpecError as error:
        place = setting_name(path, data, error.place)
        raise SpecError(error.message, place if "." in place else "") from error  # messages name `train`, `data` …


def setting_name(path: str, data: Any, place: str) -> str:
    """The dotted name of a part for an override, `model.layers.0.blocks.1`.

    Without `place` if the data do not have it: a pattern of layers has no blocks of its own.
    """
    path = re.sub(r"^[A-Z]\w*\.?", "", re.sub(r"\[(\d+)\]", r".\1", path))  # the class at the root has no name
    for key in place.split(".") if place else ():
        is_inside = key in data if isinstance(data, Mapping) else isinstance(data, list) and int(key) < len(data)
        if not is_inside:
            return path
        data = data[key] if isinstance(data, Mapping) else data[int(key)]
    return ".".join(filter(None, (path, place)))


def parse_value(value: Any, path: str, hint: Any, default: Any = None) -> Any:
    """The value of a field, with tables read as specs and lists as tuples."""
    inner = [h for h in typing.get_args(hint) if h not in (types.NoneType, ...)]
    hint = inner[0] if inner else hint  # Norm, for `Norm | None` and for `tuple[Norm, ...]`
    if isinstance(value, Mapping):
        return parse_spec(value, path, hint, type(default) if isinstance(default, Spec) else None)
    if isinstance(value, list | tuple):
        return tuple(parse_value(v, f"{path}[{i}]", hint) for i, v in enumerate(value))
    return value


def without_defaults(spec: Spec) -> dict[str, Any]:
    """Plain data of the fields that differ from their defaults."""
    data: dict[str, Any] = {"kind": spec.kind}
    values = spec.fields_to_write()
    for field in dataclasses.fields(spec):
        value = values[field.name]
        if value != default_of(field) and value is not None:
            data[field.name] = to_plain_data(value, without_defaults)
    return data


def to_plain_data(value: Any, spec_to_dict: Callable[[Spec], dict[str, Any]] = Spec.to_dict) -> Any:
    """The value as data for JSON or TOML."""
    if isinstance(value, Spec):
        return spec_to_dict(value)
    return [to_plain_data(v, spec_to_dict) for v in value] if isinstance(value, tuple) else value


def convert(value: Any, hint: Any, path: str) -> Any:
    """The value in the type of its field (an int becomes a float, a list a tuple), or a SpecError."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        options = [h for h in inner if h is not types.NoneType]
        if len(options) == 1:
            return convert(value, options[0], path)
        if any(isinstance(h, type) and type(value) is h for h in options):
            return value
        for option in options:
            if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
                return convert(value, option, path)
            if typing.get_origin(option) is Literal and value in typing.get_args(option):
                return value
        raise SpecError(f"{path}: expected {hint}, found {value!r:.80}")
    elif origin is Literal:
        if value in inner:
            return value
        raise SpecError(f"{path}={value!r}: {suggest_name(str(value), map(str, inner))}")
    elif origin is tuple and isinstance(value, list | tuple | Spec):
        items = [value] if isinstance(value, Spec) else value
        items = [part for item in items for part in (item.unpack() if isinstance(item, Spec) else (item,))]
        return tuple(convert(item, inner[0], f"{path}[{i}]") for i, item in enumerate(items))
    elif hint is float and type(value) in (int, float):
        require(math.isfinite(value), f"{path}={value!r}: must be a finite number")
        return float(value)
    elif isinstance(hint, type) and (type(value) is hint or issubclass(hint, Spec) and isinstance(value, hint)):
        return value
    name = "a list" if origin is tuple else getattr(hint, "__name__", hint)
    raise SpecError(f"{path}: expected {name}, found {value!r:.80}")


def toml_lines(table: Mapping[str, Any], path: str = "") -> Iterable[str]:
    """A nested table as lines of TOML: plain values first, then tables and arrays of tables."""
    tables: dict[str, list[Any]] = {}
    for key, value in table.items():
        name, items = f"{path}.{key}" if path else key, value if isinstance(value, list) else [value]
        if items and all(isinstance(item, Mapping) for item in items):
            tables[f"[[{name}]]" if isinstance(value, list) else f"[{name}]"] = items
        else:
            yield f"{key} = {toml_value(value, name)}"
    for header, items in tables.items():
        for item in items:
            yield from ("", header, *toml_lines(item, header.strip("[]")))


def toml_value(value: Any, path: str) -> str:
    """A value on one line, tables included. `path` is its position in the tree, for the error message."""
    if value is None:
        raise SpecError(f"{path} is None, and TOML has no null; use to_json")
    if isinstance(value, Mapping):
        items = (f"{key} = {toml_value(item, f'{path}.{key}')}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item, f'{path}[{i}]') for i, item in enumerate(value))}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
