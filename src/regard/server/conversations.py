"""Which replica a request goes to: the requests of one conversation go to the same one, which has its prefix cached.

    replica = argmax over replicas of hash(conversation, replica)

Rendezvous hashing (Thaler & Ravishankar 1998): if a replica ends, only its conversations move. The conversation of a
request is found in its body: the key that the client gives (`prompt_cache_key`), or the start of its prompt, which the
later requests of the conversation repeat.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

PROMPT_START = 256  # characters or ids of a prompt that is no list of messages; about four blocks of cached tokens


def conversation_of(body: bytes) -> str | None:
    """The conversation that a request with this body belongs to; None: no prompt is found in it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the route will refuse it
        return None
    if not isinstance(fields, dict):
        return None
    start = fields.get("prompt_cache_key") or prompt_start(fields)
    if not start:
        return None
    text = json.dumps([fields.get("model"), fields.get("cache_salt"), start])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def prompt_start(fields: dict[str, Any]) -> Any:
    """The start of the prompt of a completion, chat or response."""
    messages = fields.get("messages") or fields.get("input")
    if isinstance(messages, list):
        return [fields.get("instructions"), *first_turn(messages)]
    prompt = messages or fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):  # several prompts
        prompt = prompt[0]
    return prompt[:PROMPT_START] if isinstance(prompt, str | list) else None


def first_turn(messages: list[Any]) -> list[Any]:
    """The messages up to the first one of the user."""
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: index + 1]
    return messages[:1]


def preferred(conversation: str, replicas: Iterable[str]) -> str:
    """The replica of a conversation."""
    return max(replicas, key=lambda replica: hashlib.blake2b(f"{conversation} {replica}".encode()).digest())
