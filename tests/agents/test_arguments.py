"""Arguments are checked as by another library, on random schemas."""

import random
from typing import Any

import jsonschema_rs
import pytest

from regard.agents.arguments import violation
from regard.agents.tool import AgentTool, Toolbox, ToolFailure
from tests.engine.random_schemas import VALUES, random_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["a", 1]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]+$"}},
}


@pytest.mark.ledger("tool.call")
@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"city": "Rome"}, None),
        ({"city": "Rome", "count": 3, "kind": 1, "tags": ["x"]}, None),
        ({}, "city is missing"),
        ({"city": 3}, "city=3 must be of type string"),
        ({"city": "Florence"}, 'city="Florence" must have at most 5 characters'),
        ({"city": "Rome", "count": 10}, "count=10 must be at most 9"),
        ({"city": "Rome", "count": 10**400}, f"count={'1' + '0' * 56}… must be at most 9"),
        ({"city": "Rome", "count": True}, "count=true must be of type integer"),
        ({"city": "Rome", "kind": True}, 'kind=true must be one of "a", 1'),
        ({"city": "Rome", "tags": ["x", "Y"]}, 'tags[1]="Y" must match ^[a-z]+$'),
        ({"city": "Rome", "other": 1}, "other is not allowed"),
        ([], "the object=[] must be of type object"),
    ],
)
def test_violations_are_named(arguments: Any, wrong: str | None) -> None:
    assert violation(arguments, SCHEMA) == wrong


@pytest.mark.parametrize(
    "wrong", [{"pattern": "("}, {"type": 3}, {"maxLength": "5"}, {"enum": 7}, {"allOf": 1}, {"$ref": 4}, {"anyOf": []},
     {"pattern": "a{99999999999}"}, {"pattern": "(" * 5000 + ")" * 5000}],
)  # fmt: skip
def test_a_tool_with_an_invalid_schema_cannot_be_called(wrong: dict[str, Any]) -> None:
    """A server may send anything as a schema; the loop goes on."""
    schema = {"type": "object", "properties": {"text": wrong}}
    box = Toolbox([AgentTool("echo", "", schema, lambda arguments: arguments["text"])])
    with pytest.raises(ToolFailure, match="echo cannot be called: its schema is invalid"):
        box.run("echo", {"text": "a"})


def test_references_through_arrays_and_escaped_names() -> None:
    choice = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    refers = {"b": {"$ref": "#/properties/a/anyOf/0"}, "c": {"$ref": "#/$defs/x~1y~0z%20"}, "d": {"$ref": "#/$defs/9"}}
    schema = {"properties": {"a": choice, **refers}, "$defs": {"x/y~z ": {"type": "integer"}}}
    assert violation({"b": "x", "c": 1}, schema) is None
    assert violation({"b": 1}, schema) == "b=1 must be of type string"
    assert violation({"c": "x"}, schema) == 'c="x" must be of type integer'
    assert violation({"d": 1}, schema) == "d is not allowed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    for kind in ("number", "integer"):
        assert violation(value, {"type": kind}) is not None


def test_branches_that_refer_to_each_other_end() -> None:
    branches = {"anyOf": [{"$ref": "#/$defs/x"}] * 6}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": branches}}
    box = Toolbox([AgentTool("echo", "", schema, lambda arguments: "ran")])
    with pytest.raises(ToolFailure, match="take more than 100,000 steps to validate"):
        box.run("echo", {"a": 1})
    branches["anyOf"] = [{"type": "integer"}, *branches["anyOf"]]
    assert box.run("echo", {"a": 1}) == "ran"  # the first valid branch ends the search


def test_equal_to_another_library() -> None:
    """Valid or not, on random schemas without formats, for values of all kinds and for parts of them."""
    rng, valid, count = random.Random(1), 0, 0
    for _ in range(400):
        schema = random_schema(rng)
        if '"format"' in repr(schema).replace("'", '"'):
            continue
        validator = jsonschema_rs.validator_for(schema)
        for value in [*VALUES, *(sample(schema, rng) for _ in range(6))]:
            expected = validator.is_valid(value)
            assert (violation(value, schema) is None) == expected, (schema, value)
            valid, count = valid + expected, count + 1
    assert count > 3000 and valid > 500


def sample(schema: Any, rng: random.Random) -> Any:
    """A value that is often valid for a schema."""
    if not isinstance(schema, dict):
        return rng.choice(VALUES)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return sample(rng.choice(schema[keyword]), rng)
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            kept = [name for name in properties if name in schema.get("required", []) or rng.random() < 0.5]
            return {name: sample(properties[name], rng) for name in kept}
        case "array":
            return [sample(schema.get("items"), rng) for _ in range(rng.randint(0, 3))]
        case "integer" | "number":
            return rng.choice([rng.randint(-1100, 1100), rng.randint(-5, 5), 4.0, 2.5])
        case "string":
            return rng.choice(["", "a", "abc", "xyz", "abcdef", "a]1.", "zzzz"])
        case "boolean":
            return rng.random() < 0.5
    return None


def test_deep_values_are_refused() -> None:
    schema = {"$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}, "$ref": "#/$defs/list"}
    wrong = violation([[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]], schema)
    assert wrong is not None and "nested deeper" in wrong
    assert violation({"a": 1}, {"$ref": "#/$defs/none"}) == "the object is not allowed"
