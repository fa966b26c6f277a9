"""Whether the arguments of a call are valid for the JSON schema of a tool, and if not, why.

The grammar of a call enforces the schema while a model generates. This check does not depend on it: it also holds for
schemas that the grammar cannot enforce, and for models without a grammar. Keywords that it does not know, such as
`format`, are not checked.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from regard.agents.patterns import PatternMatcher

MAX_DEPTH = 32
MAX_STEPS = 100_000  # a schema whose branches refer to each other takes exponentially many
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "object": dict, "array": list, "boolean": bool,
    "null": type(None),
}  # fmt: skip
LIMITS = {  # keyword: the size that it limits, whether a size is within it, and its name
    "minimum": (float, lambda size, limit: size >= limit, "at least"),
    "maximum": (float, lambda size, limit: size <= limit, "at most"),
    "exclusiveMinimum": (float, lambda size, limit: size > limit, "more than"),
    "exclusiveMaximum": (float, lambda size, limit: size < limit, "less than"),
    "minLength": (str, lambda size, limit: size >= limit, "at least"),
    "maxLength": (str, lambda size, limit: size <= limit, "at most"),
    "minItems": (list, lambda size, limit: size >= limit, "at least"),
    "maxItems": (list, lambda size, limit: size <= limit, "at most"),
    "minProperties": (dict, lambda size, limit: size >= limit, "at least"),
    "maxProperties": (dict, lambda size, limit: size <= limit, "at most"),
}
UNITS = {str: " characters", list: " items", dict: " properties", float: ""}


class Root(NamedTuple):
    schema: Any  # the whole schema, to which references are relative
    steps: Iterator[int]  # that are left
    matcher: PatternMatcher


def violation(value: Any, schema: Any) -> str | None:
    """What is wrong with a value, or None."""
    with PatternMatcher() as matcher:
        return wrong_for(value, schema, Root(schema, iter(range(MAX_STEPS)), matcher))


def wrong_for(value: Any, schema: Any, root: Root, path: str = "", depth: int = 0) -> str | None:
    """What is wrong with a part of a value, or None. `path` leads to it, such as `.filter.names[0]`."""
    name = path.removeprefix(".") or "the object"
    if next(root.steps, None) is None:
        raise ValueError(f"the arguments take more than {MAX_STEPS:,} steps to validate; simplify the schema")
    if depth > MAX_DEPTH:
        return f"{name} is nested deeper than {MAX_DEPTH} levels"
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        return None if schema is not False else f"{name} is not allowed"
    if "$ref" in schema:
        return wrong_for(value, resolve(root.schema, schema["$ref"]), root, path, depth + 1)
    return (
        wrong_type(value, schema, name)
        or wrong_value(value, schema, root, name)
        or wrong_size(value, schema, name)
        or wrong_part(value, schema, root, path, depth)
        or wrong_choice(value, schema, root, path, depth)
    )


def resolve(root: Any, reference: str) -> Any:
    """The schema that `#/$defs/name` refers to; nothing is valid for one that does not exist."""
    found = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ["?"]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else False
        elif key:
            found = found.get(key, False) if isinstance(found, Mapping) else False
    return found


def wrong_type(value: Any, schema: Mapping[str, Any], name: str) -> str | None:
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not kinds or any(has_kind(value, kind) for kind in kinds):
        return None
    return f"{name}={shown(value)} must be of type {' or '.join(kinds)}"


def has_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):
        return False  # JSON has no NaN and no infinities
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, KINDS.get(kind, ()))


def wrong_value(value: Any, schema: Mapping[str, Any], root: Root, name: str) -> str | None:
    if "const" in schema and not equal(value, schema["const"]):
        return f"{name}={shown(value)} must be {shown(schema['const'])}"
    if "enum" in schema and not any(equal(value, each) for each in schema["enum"]):
        return f"{name}={shown(value)} must be one of {', '.join(map(shown, schema['enum']))}"
    pattern = schema.get("pattern")
    if pattern is None or not isinstance(value, str):
        return None
    return None if root.matcher.search(pattern, value) else f"{name}={shown(value)} must match {pattern}"


def equal(a: Any, b: Any) -> bool:
    """As values of JSON: true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True) or (
        isinstance(a, int | float) and isinstance(b, int | float) and bool not in (type(a), type(b)) and a == b
    )


def wrong_size(value: Any, schema: Mapping[str, Any], name: str) -> str | None:
    for keyword, (kind, holds, words) in LIMITS.items():
        if keyword not in schema:
            continue
        if kind is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            size = value
        elif isinstance(value, kind):
            size = len(value)
        else:
            continue
        finite = not isinstance(size, float) or math.isfinite(size)  # math.isfinite fails for integers of 400 digits
        if not finite or not holds(size, schema[keyword]):
            verb = "be" if kind is float else "have"
            return f"{name}={shown(value)} must {verb} {words} {schema[keyword]}{UNITS[kind]}"
    return None


def wrong_part(value: Any, schema: Mapping[str, Any], root: Root, path: str, depth: int) -> str | None:
    if isinstance(value, dict):
        if missing := [key for key in schema.get("required", []) if key not in value]:
            return f"{(path + '.' + missing[0]).removeprefix('.')} is missing"
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key, item in value.items():
            schemas = [properties[key]] if key in properties else []
            schemas += [part for pattern, part in patterns.items() if root.matcher.search(pattern, key)]
            for part in schemas or [schema.get("additionalProperties", True)]:
                if (wrong := wrong_for(item, part, root, f"{path}.{key}", depth + 1)) is not None:
                    return wrong
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            part = first[index] if index < len(first) else schema.get("items", True)
            if (wrong := wrong_for(item, part, root, f"{path}[{index}]", depth + 1)) is not None:
                return wrong
    return None


def wrong_choice(value: Any, schema: Mapping[str, Any], root: Root, path: str, depth: int) -> str | None:
    for part in schema.get("allOf", []):
        if (wrong := wrong_for(value, part, root, path, depth + 1)) is not None:
            return wrong
    for keyword in ("anyOf", "oneOf"):
        if keyword not in schema:
            continue
        wrongs = []
        for part in schema[keyword]:
            wrongs.append(wrong_for(value, part, root, path, depth + 1))
            if keyword == "anyOf" and wrongs[-1] is None:
                break
        valid = wrongs.count(None)
        if valid == 0:
            return wrongs[0]
        if keyword == "oneOf" and valid > 1:
            return f"{path.removeprefix('.') or 'the object'} is valid for {valid} schemas of oneOf; it must be one"
    return None


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
