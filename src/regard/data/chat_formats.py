"""Conversations in the formats of widely used data sets, as `messages`.

    ShareGPT    {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}
    Alpaca      {"instruction": …, "input": …, "output": …}      `input` may be missing or empty

An example that has fields of this package already (`messages`, `prompt`, `text`) is left as it is.
"""

from collections.abc import Mapping
from typing import Any

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # others keep their names
OWN_FIELDS = ("messages", "prompt", "text")


def with_messages(example: dict[str, Any]) -> dict[str, Any]:
    if any(field in example for field in OWN_FIELDS):
        return example
    turns = example.get("conversations")
    if isinstance(turns, list) and all(
        isinstance(turn, Mapping) and turn.keys() >= {"from", "value"} for turn in turns
    ):
        messages = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
        return {name: value for name, value in example.items() if name != "conversations"} | {"messages": messages}
    request, answer = [example.get("instruction"), example.get("input") or ""], example.get("output")
    if all(isinstance(text, str) for text in (*request, answer)):
        messages = [
            {"role": "user", "content": "\n\n".join(filter(None, request))},
            {"role": "assistant", "content": answer},
        ]
        others = {name: value for name, value in example.items() if name not in ("instruction", "input", "output")}
        return others | {"messages": messages}
    return example
