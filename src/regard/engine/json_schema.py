"""Check that structured output can enforce every keyword of a JSON schema, and write the schema that it enforces.

The grammar library drops some keywords, alone or in combination. An output could then violate the schema, so schemas
with these are refused by name. The grammar may accept less than the schema: objects have no properties beyond those
listed, unless `additionalProperties` asks for them, and a `pattern` matches the whole string.
"""

import json
from itertools import combinations
from typing import Any

from regard.engine.json_pattern import json_pattern

MAX_DEPTH = 32
MAX_COUNT = 10_000  # of minItems, maxLength …: the grammar grows with them
ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
    "$defs", "definitions",
}  # fmt: skip
VALUE_KEYWORDS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # a schema has one of them, or a type
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
TYPE_KEYWORDS: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "boolean": set(),
    "null": set(),
}
FORMATS = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "object": dict, "array": list, "boolean": bool,
    "null": type(None),
}  # fmt: skip

RANGES = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
SHAPES = {  # keywords: whether a value has the right type, and what it must be
    ("properties", "patternProperties", "$defs", "definitions"): (lambda value: isinstance(value, dict), "an object"),
    ("enum", "anyOf", "oneOf", "allOf", "prefixItems"): (
        lambda value: isinstance(value, list) and bool(value),
        "an array of at least one element",
    ),
    ("required",): (lambda value: is_strings(value), "an array of names"),
    ("type",): (lambda value: isinstance(value, str) or is_strings(value), "a string or an array of strings"),
    ("items",): (lambda value: isinstance(value, dict | bool), "one schema; use prefixItems for an array of schemas"),
    ("pattern", "format", "$ref"): (lambda value: isinstance(value, str), "a string"),
    tuple(sorted(RANGES)): (
        lambda value: has_type(value, "number") and abs(value) <= 2**53,
        "a number of at most 2**53",
    ),
    tuple(sorted(COUNTS)): (
        lambda value: has_type(value, "integer") and 0 <= value <= MAX_COUNT,
        f"an integer from 0 to {MAX_COUNT}",
    ),
}


def check_shapes(schema: dict[str, Any], path: str) -> None:
    for names, (has_shape, expected) in SHAPES.items():
        for name in names:
            if name in schema and not has_shape(schema[name]):
                raise ValueError(f"{path}: {name}={json.dumps(schema[name])[:80]} must be {expected}")


def is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def check_schema(schema: Any, path: str = "schema", depth: int = 0) -> None:
    """Raise ValueError if a schema, or one inside it, has keywords that cannot be enforced together."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be an object, true or false, not {json.dumps(schema)[:80]}")
    if depth > MAX_DEPTH:
        raise ValueError(f"{path} is nested deeper than {MAX_DEPTH} levels; simplify the schema, or use $ref")
    check_shapes(schema, path)
    for name, part in parts(schema):
        check_schema(part, f"{path}.{name}", depth + 1)
    keywords = schema.keys() - ANNOTATIONS
    chosen = [name for name in VALUE_KEYWORDS if name in schema]
    if len(chosen) > 1:
        raise ValueError(f"{path} has {chosen[0]} and {chosen[1]}, which cannot be enforced together; keep one")
    if chosen:
        others = keywords - {chosen[0]} - ({"type"} if chosen[0] in ("const", "enum") else set())
        check_value_keyword(schema, chosen[0], path)
    else:
        types = types_of(schema, path)
        others = keywords - {"type"} - {name for kind in types for name in TYPE_KEYWORDS[kind]}
        for kind in types:
            TYPE_CHECKS.get(kind, lambda schema, path: None)(schema, path)
    if others:
        beside = f" beside {chosen[0]}" if chosen else "" if "type" in schema else " without type"
        raise ValueError(f"{path}: {min(others)} cannot be enforced{beside}; remove it, or write the schema without it")


def enforced_schema(schema: Any) -> Any:
    """The schema with patterns that are safe inside quotes, and with anyOf for oneOf, whose schemas are exclusive."""
    if not isinstance(schema, dict):
        return schema
    result = {name: value for name, value in schema.items() if name not in ANNOTATIONS - {"$defs", "definitions"}}
    for name in {"items", "additionalProperties"} & result.keys():
        result[name] = enforced_schema(result[name])
    for name in {"$defs", "definitions", "properties", "patternProperties"} & result.keys():
        rename = json_pattern if name == "patternProperties" else str
        result[name] = {rename(key): enforced_schema(part) for key, part in result[name].items()}
    for name in {"anyOf", "oneOf", "allOf", "prefixItems"} & result.keys():
        result[name] = [enforced_schema(part) for part in result[name]]
    if "oneOf" in result:
        result["anyOf"] = result.pop("oneOf")
    if {"minLength", "maxLength"} & result.keys():  # xgrammar would allow control characters
        result["pattern"] = rf"[\s\S]{{{result.pop('minLength', 0)},{result.pop('maxLength', '')}}}"
    if "pattern" in result:
        result["pattern"] = json_pattern(result["pattern"])
    return result


def parts(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schemas inside a schema, with their names."""
    found = [(name, schema[name]) for name in ("items", "additionalProperties") if name in schema]
    for name in ("$defs", "definitions", "properties", "patternProperties"):
        found += [(f"{name}.{key}", part) for key, part in schema.get(name, {}).items()]
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        found += [(f"{name}[{i}]", part) for i, part in enumerate(schema.get(name, []))]
    return found


def types_of(schema: dict[str, Any], path: str) -> list[str]:
    kinds = schema.get("type", ["object"] if "properties" in schema else [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if unknown := [kind for kind in kinds if kind not in TYPE_KEYWORDS]:
        raise ValueError(f"{path}: there is no type {unknown[0]!r}; the types are {', '.join(TYPE_KEYWORDS)}")
    return kinds


def check_value_keyword(schema: dict[str, Any], name: str, path: str) -> None:
    value = schema[name]
    if name == "$ref":
        if not value.startswith("#"):
            raise ValueError(f"{path}: $ref={value!r} must refer to a part of this schema, such as #/$defs/name")
    elif name in ("const", "enum"):
        values = [value] if name == "const" else value
        kinds = types_of(schema, path)
        for each in values:
            if kinds and not any(has_type(each, kind) for kind in kinds):
                raise ValueError(f"{path}: {json.dumps(each)} is not of type {' or '.join(kinds)}; remove it")
    elif name == "allOf" and len(value) > 1:
        raise ValueError(f"{path}: allOf with several schemas cannot be enforced; merge them into one schema")
    elif name == "oneOf" and not all(exclusive(*pair) for pair in combinations(value, 2)):
        raise ValueError(
            f"{path}: the schemas of oneOf are not recognized as exclusive; use anyOf, or give them different types or "
            "a required property with different constants"
        )


def exclusive(first: Any, second: Any) -> bool:
    """Whether no value is valid for both schemas: they differ in type, or in a required property's constants."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    values = [allowed_values(schema) for schema in (first, second)]
    if values[0] is not None and values[1] is not None:
        return not {json.dumps(value) for value in values[0]} & {json.dumps(value) for value in values[1]}
    kinds = [
        set(schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")])
        for schema in (first, second)
    ]
    kinds = [group | ({"number"} if "integer" in group else set()) for group in kinds]
    if None not in kinds[0] | kinds[1] and not kinds[0] & kinds[1]:
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    shared = set(first.get("required", [])) & set(second.get("required", []))
    return any(
        exclusive(first["properties"][name], second["properties"][name])
        for name in shared
        if name in first.get("properties", {}) and name in second.get("properties", {})
    )


def allowed_values(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def has_type(value: Any, kind: str) -> bool:
    return isinstance(value, PYTHON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def check_string(schema: dict[str, Any], path: str) -> None:
    groups = [name for name in ("pattern", "format") if name in schema]
    groups += [name for name in ("minLength", "maxLength") if name in schema][:1]
    if len(groups) > 1:
        raise ValueError(f"{path}: {groups[0]} and {groups[1]} cannot be enforced together; keep one")
    if "format" in schema and schema["format"] not in FORMATS:
        raise ValueError(
            f"{path}: format={schema['format']!r} cannot be enforced; choose one of {', '.join(sorted(FORMATS))}"
        )


def check_object(schema: dict[str, Any], path: str) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if missing := [name for name in required if name not in properties]:
        raise ValueError(f"{path}: {missing[0]!r} is required but not in properties; describe it there")
    patterns = schema.get("patternProperties", {})
    if len(patterns) > 1 or (patterns and (properties or "additionalProperties" in schema)):
        raise ValueError(f"{path}: patternProperties can be enforced only with one pattern and no other properties")
    extra = not properties or schema.get("additionalProperties", False) is not False
    if "minProperties" in schema and extra:  # a repeated name would count twice
        raise ValueError(f"{path}: minProperties can be enforced only if the names of all properties are listed")


TYPE_CHECKS = {"string": check_string, "object": check_object}
