"""Random JSON schemas of every keyword that structured output enforces, and mutations of them."""

import json
import random
from typing import Any

from regard.engine.json_schema import ANNOTATIONS, TYPE_KEYWORDS, VALUE_KEYWORDS

STRINGS = [
    {}, {"minLength": 2, "maxLength": 5}, {"maxLength": 3}, {"pattern": "^[a-f]{1,4}$"}, {"pattern": "x|y+z?"},
    {"format": "date"}, {"format": "ipv4"}, {"format": "uuid"}, {"format": "time"}, {"pattern": '[^"x]{2,4}'},
    {"pattern": "^.{3}\\S[\\s\\w]?\\W$"}, {"pattern": "^[ -~]{2,5}$"}, {"pattern": r"[^\]\d]\D\."},
]  # fmt: skip
NUMBERS = [
    {}, {"minimum": -12}, {"maximum": 7}, {"minimum": 3, "maximum": 40}, {"exclusiveMinimum": 0, "maximum": 1000},
    {"exclusiveMaximum": 5, "minimum": -5}, {"minimum": -1000, "exclusiveMaximum": -10},
]  # fmt: skip
VALUES = ["red", 'a "quote"', "ünïcode\n", 3, -1.5, True, None, [1, "a"], {"k": [None]}]

JUNK = [
    None, True, False, 0, -1, 3, 2**70, 1e400, -2.5, "", "a", "(", "[", "\\", "^$", "#/nope", "string", "object", [],
    [[]], ["a"], ["string", {}], [{}], {}, {"a": 1}, {"type": "string"}, {"type": ["null"]}, "\ud800", "é",
    float("nan"),
]  # fmt: skip
KEYWORDS = sorted({*ANNOTATIONS, *VALUE_KEYWORDS, *(name for names in TYPE_KEYWORDS.values() for name in names), "not"})


def mutate(rng: random.Random, schema: Any) -> Any:
    """A copy in which one to three values are replaced or keywords added."""
    schema = json.loads(json.dumps(schema))
    nodes = [schema]
    for node in nodes:  # grows
        values = node.values() if isinstance(node, dict) else node
        nodes += [value for value in values if isinstance(value, dict | list)]
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(nodes)
        if isinstance(node, dict):
            node[rng.choice([*node, *KEYWORDS])] = rng.choice(JUNK)
        elif node:
            node[rng.randrange(len(node))] = rng.choice(JUNK)
    return schema


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema whose nested schemas have at most this depth."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "types"]
    kind = rng.choice(
        leaves if depth == 0 else [*leaves, "object", "object", "object", "array", "array", "anyOf", "oneOf"]
    )
    match kind:
        case "string":
            return {"type": "string"} | rng.choice(STRINGS)
        case "integer" | "number":
            return {"type": kind} | rng.choice(NUMBERS)
        case "boolean" | "null":
            return {"type": kind, "title": "a title"}
        case "enum":
            return {"enum": rng.sample(VALUES, k=rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(VALUES)}
        case "types":
            return {"type": rng.sample(["string", "integer", "null", "boolean"], k=2)}
        case "array":
            return random_array(rng, depth - 1)
        case "object":
            return random_object(rng, depth - 1)
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case _:
            tags = [{"type": "object", "properties": {"tag": {"const": tag}}, "required": ["tag"]} for tag in "ab"]
            return {"oneOf": [*tags, {"type": "integer", "maximum": 20}]}


def random_array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]
        return schema | rng.choice([{}, {"items": False}, {"minItems": 1}])
    low = rng.randint(0, 2)
    return schema | {"items": random_schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def random_object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(["a", "b", "long name", 'q"uote', "é", "$x", "n1"], k=rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    if not names:
        return rng.choice([{"type": "object"}, {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}}])
    schema["required"] = rng.sample(names, k=rng.randint(0, len(names)))
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.choice([False, random_schema(rng, 0)])
    elif rng.random() < 0.3:
        schema["maxProperties"] = len(names)
    return schema
