"""The message of a request that pydantic refuses: the value, the rule and the remedy.

temperature=3 must be at most 2; lower it
stop=7 must be a string or a list; correct its type
unknown or unsupported parameter 'temprature'; did you mean 'temperature'?
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SHOWN, MAX_BITS = 60, 200  # characters of a string, bits of an integer

TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
RULES = {  # by the type of a violation, with the fields of its context
    "greater_than": "must be above {gt}; raise it",
    "greater_than_equal": "must be at least {ge}; raise it",
    "less_than": "must be below {lt}; lower it",
    "less_than_equal": "must be at most {le}; lower it",
    "finite_number": "must be a finite number; send another, or omit it",
    "literal_error": "must be {expected}; send one of these values, or omit it",
    "string_too_long": "has more than {max_length} characters; shorten it",
    "string_too_short": "has fewer than {min_length} characters; send more, or omit it",
    "too_long": "has more than {max_length} items; send fewer",
    "too_short": "has fewer than {min_length} items; send more",
    "string_pattern_mismatch": "must match the pattern {pattern}; correct it",
    "string_unicode": "has characters that are no valid Unicode; remove them",
    "union_tag_invalid": "has {discriminator}={tag!r:.60}, which must be one of {expected_tags}; send one of them",
    "union_tag_not_found": "has no {discriminator}; send it",
}


def most_specific(violations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The violation to report. A field of a union type has a "wrong type" violation for every other member of the
    union, so one of these comes last; an unknown field is never a matter of the member."""
    ranks = {"unknown_field": 0} | dict.fromkeys(TYPES, 2)
    return min(violations, key=lambda violation: ranks.get(violation["type"], 1))


def field_path(violation: Mapping[str, Any]) -> str:
    """The field, such as `messages.0.content`; of an invalid key, the object that has it."""
    steps = violation["loc"][1:-2] if violation["loc"][-1] == "[key]" else violation["loc"][1:]
    return ".".join(str(step) for step in steps if is_field(step))


def is_field(step: str | int) -> bool:
    """Whether a step of a pydantic path is a field or an index.

    Paths also contain the types of a union, as in (`prompt`, `list[constrained-str]`, 3) and (`tool_choice`,
    `NamedToolChoice`, `function`).
    """
    return isinstance(step, int) or (step.isidentifier() and step != "str" and not step[0].isupper())


def message_of(violation: Mapping[str, Any], violations: Sequence[Mapping[str, Any]]) -> str:
    """violations: all of the request, among which others may concern the same field."""
    path, kind, value = field_path(violation), violation["type"], violation.get("input")
    if kind == "missing":
        return f"{path} is missing; send it"
    shown = shown_value(value)
    subject = path if shown is None else f"{path}={shown}"
    if violation["loc"][-1] == "[key]":
        subject = f"the key {shown} of {path}"
    if kind in TYPES:
        expected = dict.fromkeys(
            TYPES[other["type"]] for other in violations if other["type"] in TYPES and field_path(other) == path
        )
        return f"{subject} must be {' or '.join(expected)}; {type_remedy(list(expected), value)}"
    try:
        rule = RULES[kind].format(**readable(violation.get("ctx") or {}))
    except KeyError:  # another kind, or a validator of ours, whose message has a remedy
        rule = violation["msg"]
        return f"{path}: {rule}" if ";" in rule else f"{path}: {rule}; correct it, or omit it"
    if kind == "literal_error":
        rule = rule.replace("True", "true").replace("False", "false")
    return f"{subject} {rule}"


def readable(context: Mapping[str, Any]) -> dict[str, Any]:
    """2 for a limit of 2.0, and type for 'type'."""
    whole = {key: int(value) for key, value in context.items() if isinstance(value, float) and value.is_integer()}
    return {**context, **whole, "discriminator": str(context.get("discriminator")).strip("'")}


def type_remedy(expected: Sequence[str], value: Any) -> str:
    if isinstance(value, str) and not {"a string", "a list", "an object"} & set(expected):
        return "send it without quotes"
    if isinstance(value, int | float) and list(expected) == ["a string"]:
        return "send it in quotes"
    return "correct its type"


def shown_value(value: Any) -> str | None:
    """A value as in JSON; None for one that is long, or not a plain value."""
    if not (value is None or isinstance(value, str | int | float)):
        return None
    if isinstance(value, int) and value.bit_length() > MAX_BITS or isinstance(value, str) and len(value) > MAX_SHOWN:
        return None
    return json.dumps(value, ensure_ascii=False)
