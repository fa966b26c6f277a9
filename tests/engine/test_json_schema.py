"""Schemas whose keywords cannot be enforced are refused by name; patterns are rewritten for JSON strings."""

import json
import random
import re

import pytest

from regard.engine.json_pattern import json_pattern
from regard.engine.json_schema import check_schema, enforced_schema

REFUSED = [
    ({"not": {}}, "schema: not cannot be enforced without type"),
    ({"type": "array", "uniqueItems": True}, "schema: uniqueItems cannot be enforced"),
    ({"type": "array", "contains": {}}, "contains cannot be enforced"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf cannot be enforced"),
    ({"minLength": 3}, "minLength cannot be enforced without type"),
    ({"minimum": 3}, "minimum cannot be enforced without type"),
    ({"type": "boolean", "minimum": 3}, "minimum cannot be enforced"),
    ({"type": "text"}, "there is no type 'text'; the types are string"),
    ({"type": "object", "properties": {"a": {"if": {}}}}, "schema.properties.a: if cannot be enforced"),
    ({"$defs": {"x": {"dependentRequired": {}}}}, "schema.\\$defs.x: dependentRequired cannot be enforced"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {}}}, "minimum cannot be enforced beside \\$ref"),
    ({"$ref": "other.json"}, "must refer to a part of this schema"),
    ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum cannot be enforced beside anyOf"),
    ({"anyOf": [{}], "enum": [1]}, "has enum and anyOf, which cannot be enforced together"),
    ({"anyOf": []}, r"anyOf=\[\] must be an array of at least one element"),
    ({"allOf": [{}, {}]}, "allOf with several schemas cannot be enforced; merge them"),
    ({"enum": []}, r"enum=\[\] must be an array of at least one element"),
    ({"type": "string", "enum": ["a", 1]}, "1 is not of type string; remove it"),
    ({"type": "integer", "const": True}, "true is not of type integer"),
    ({"type": "string", "pattern": "a", "minLength": 2}, "pattern and minLength cannot be enforced together"),
    ({"type": "string", "pattern": "a", "format": "date"}, "pattern and format cannot be enforced together"),
    ({"type": "string", "pattern": 3}, "pattern=3 must be a string"),
    ({"type": "string", "format": "postcode"}, "format='postcode' cannot be enforced; choose one of date"),
    ({"type": "string", "maxLength": 10**9}, "maxLength=1000000000 must be an integer from 0 to 10000"),
    ({"type": "array", "minItems": -1}, "minItems=-1 must be an integer"),
    ({"type": "array", "items": [{}]}, "must be one schema; use prefixItems"),
    ({"type": "object", "required": ["a"]}, "'a' is required but not in properties"),
    ({"type": "object", "minProperties": 1}, "minProperties can be enforced only if the names"),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}}, "only with one pattern"),
    ({"type": "object", "properties": []}, r"properties=\[\] must be an object"),
    ({"type": {}}, "type={} must be a string or an array of strings"),
    ({"type": "object", "required": [[]]}, "must be an array of names"),
    ({"type": "integer", "minimum": "3"}, "must be a number of at most 2"),
    ({"type": "array", "items": 3}, "items=3 must be one schema"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf are not recognized as exclusive; use anyOf"),
    ({"oneOf": [{}, {"type": "string"}]}, "oneOf are not recognized as exclusive"),
    ({"anyOf": [3]}, r"schema.anyOf\[0\] must be an object, true or false, not 3"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_enforced_is_refused(schema, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schema(schema)


def test_a_deep_schema_is_refused() -> None:
    schema: dict = {}
    for _ in range(33):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="is nested deeper than 32 levels"):
        check_schema(schema)


def test_exclusive_schemas_of_one_of_become_any_of() -> None:
    tagged = [
        {"type": "object", "properties": {"kind": {"const": kind}, "oneOf": {}}, "required": ["kind"]} for kind in "ab"
    ]
    schema = {"description": "two kinds", "oneOf": [*tagged, {"type": "null"}, {"type": ["string", "integer"]}]}
    check_schema(schema)
    assert enforced_schema(schema) == {"anyOf": schema["oneOf"]}
    check_schema({"oneOf": [{"const": 1}, {"enum": [2, "a"]}]})


@pytest.mark.parametrize(
    "pattern",
    [
        ".", "^a.b$", "[^a]", "[^\\]a-c]+", "[ -~]", "\\S\\s?", "[\\w\\s.-]*", "\\W|\\D", "(a|[^\\x41])", "\\u00e9\\.",
        "\\[x\\]", "[^\\n\\t]", "[a\\-z]",
    ],
)  # fmt: skip
def test_strings_of_a_rewritten_pattern_match_and_need_no_escape(pattern: str) -> None:
    rewritten, rng = json_pattern(pattern), random.Random(0)
    characters = [*map(chr, range(128)), "é", "漢", "😀"]
    strings = ["".join(rng.choices('abxzé漢[].-_5 \n"\\', k=length)) for length in (2, 3) for _ in range(9000)]
    matched = 0
    for string in characters + strings:
        safe = json.dumps(string, ensure_ascii=False)[1:-1] == string
        found = re.fullmatch(rewritten, string) is not None
        assert found == (safe and re.fullmatch(pattern, string, re.ASCII) is not None), (string, rewritten)
        matched += found
    assert matched


@pytest.mark.parametrize("pattern", ['a"', "\\\\", "\\n", "\\x1f", '["\\\\]', "[z-a]", "\\u0022"])
def test_a_pattern_of_escaped_characters_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern=.* has "):
        json_pattern(pattern)
