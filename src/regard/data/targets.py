"""The target of an example: the string that a generated output is compared with.

{"prompt": …, "completion": …}, {"prompt": …, "answer": …}, {"source": …, "target": …}
{"messages": […]}      the last message, of the assistant
"""

import json
from typing import Any

from regard.data.sources.base import Example, shown

TARGETS = ("completion", "answer", "target")


def has_target(example: Example) -> bool:
    """Whether there is one; a conversation has a target if it ends with an answer of the assistant, and a completion
    with a `label` may be a bad one (KTO)."""
    messages = example.get("messages")
    if messages is not None:
        return len(messages) > 1 and messages[-1]["role"] == "assistant"
    return "label" not in example and any(name in example for name in TARGETS)


def target_of(example: Example) -> str:
    """Without the white space around it."""
    if example.get("messages") is not None:
        *before, last = example["messages"]
        if not before or last["role"] != "assistant":
            raise ValueError(f"this conversation does not end with an answer of the assistant: {shown(example)}")
        return last["content"].strip()
    name = next((name for name in TARGETS if name in example), None)
    if name is None:
        raise ValueError(
            "outputs are compared with the targets of examples: messages, completion, answer or target; this example "
            f"has {', '.join(example)}"
        )
    target = example[name]
    if isinstance(target, list) and target and isinstance(target[-1], dict):  # messages of the assistant
        target = target[-1].get("content")
    if not isinstance(target, str):
        raise ValueError(f"`{name}` of an example must be a string or messages, found {example[name]!r:.60}")
    return target.strip()


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a string is; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_well_formed(output: str, target: str) -> bool | None:
    """Whether the output is a JSON object with the keys of the target; None if the target is not a JSON object."""
    expected = read_object(target)
    return None if expected is None else (read_object(output) or {}).keys() == expected.keys()
