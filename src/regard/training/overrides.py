"""Values of a recipe that are set by their dotted names: `--train.lr=3e-4`, `--model.layers.0.times=6`."""

import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from regard.spec import class_of, field_types, require, toml_value
from regard.training.data_settings import read_data_table, without_source
from regard.training.optimizer import Optimizer
from regard.training.schedule import Schedule


def override(tables: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Set values by dotted names, in which a number is an index of a list. A value that is not TOML is a string; `from`
    is always one.

    A new source of data replaces that of the tables with all its options. A new kind of optimizer or schedule keeps the
    options of the tables that it has too.
    """
    tables = deepcopy(dict(tables))
    if {"data.path", "data.source", "data.sources"} & values.keys() and isinstance(tables.get("data"), Mapping):
        tables["data"] = without_source(tables["data"])
    elif any(name.startswith("data.sources.") for name in values):
        tables["data"] = with_replaced_kinds(tables.get("data", {}), values)
    for name, value in values.items():
        *path, last = name.split(".")
        table: Any = tables
        for key in path:
            table = table[index(table, key, name)] if isinstance(table, list) else table.setdefault(key, {})
            require(isinstance(table, dict | list), f"--{name}: {key} is a single value, not a table")
        key = index(table, last, name) if isinstance(table, list) else last
        table[key] = value if name == "from" else parse_value(value)
    if "tokenizer.by" in values and "tokenizer.path" not in values:
        tables["tokenizer"].pop("path", None)
    for name, base in (("optimizer", Optimizer), ("schedule", Schedule)):
        if f"train.{name}.kind" in values:
            known = {"kind", *field_types(class_of(tables["train"][name]["kind"], f"train.{name}", base))}
            for key in tables["train"][name].keys() - known:
                if f"train.{name}.{key}" not in values:  # a wrong override is reported as such
                    del tables["train"][name][key]
    return tables


def with_replaced_kinds(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The table [data] with a list of sources; those that get another kind have no options but their weight."""
    table = {"sources": [{"kind": "world"}], **read_data_table(table)}
    table["sources"] = [
        {key: value for key, value in source.items() if key == "weight"}
        if values.get(f"data.sources.{number}.kind", source.get("kind")) != source.get("kind")
        else dict(source)
        for number, source in enumerate(table["sources"])
    ]
    return table


def index(items: list, key: str, name: str) -> int:
    require(
        key.isascii() and key.isdigit() and int(key) < len(items),
        f"--{name}: {key!r} is not an index of a list of {len(items)}; count from 0",
    )
    return int(key)


def quoted(text: str) -> str:
    """A value that is a string, whatever it looks like."""
    return toml_value(text, "")


def parse_value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    if text in ("True", "False"):
        return text == "True"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """Arguments such as `--train.lr=3e-4 --data.level 2` as {name: value}."""
    values: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        is_override = argument.startswith("--") and "." in name
        require(is_override, f"unexpected {argument!r}; overrides look like --train.lr=3e-4")
        require(bool(equals or remaining), f"{argument} has no value; overrides look like --train.lr=3e-4")
        values[name] = value if equals else remaining.pop(0)
    return values
