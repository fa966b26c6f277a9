"""Which replica a request goes to: the requests of one conversation go to the same one, which has its prefix cached.

    replica = argmax over replicas of hash(conversation, replica)

Rendezvous hashing (Thaler & Ravishankar 1998): if a replica ends, only its conversations move. The conversation of a
request is found in its body: the key that the client gives (`prompt_cache_key`), or the start of its prompt, which the
later requests of the conversation repeat. A long body is not parsed, which would block the event loop: its start is
taken instead.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

PROMPT_START = 256  # characters or ids of a prompt that is no list of messages; about four blocks of cached tokens
LONG_BODY, BODY_START = 1 << 18, 1 << 12  # bytes; parsing LONG_BODY takes at most 10 ms


def conversation_of(body: bytes) -> str | None:
    """The conversation that a request with this body belongs to; None: no prompt is found in it."""
    if len(body) > LONG_BODY:
        return digest(body[:BODY_START])
    try:
        fields = json.loads(body)
        start = fields.get("prompt_cache_key") or prompt_start(fields) if isinstance(fields, dict) else None
        return digest(json.dumps([fields.get("model"), fields.get("cache_salt"), start]).encode()) if start else None
    except (ValueError, RecursionError):  # the route will refuse it
        return None


def digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


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
