"""The bytes that each token of a vocabulary adds to a text, for grammars that constrain the output and for logprobs.

The decoder of a tokenizer maps tokens to text: byte-level BPE writes each byte as a printable character, SentencePiece
writes a space as ▁ and a byte as <0x0A>. A token may be only a part of a character, so text is not enough.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from regard.text.tokenizer import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every id in the middle of a text; b"" for special tokens, stop ids and ids without a token."""
    to_bytes = byte_decoder(tokenizer)
    silent = {*tokenizer.all_special_ids, *tokenizer.stop_ids}
    vocabulary = [b""] * tokenizer.vocab_size
    for token, id in tokenizer.core.get_vocab(with_added_tokens=True).items():
        if id not in silent:
            vocabulary[id] = to_bytes(token)
    return vocabulary


@lru_cache(maxsize=16)
def byte_decoder(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """The function from tokens, as they are in the vocabulary, to bytes; ValueError if the decoder is not supported."""
    state = json.loads(tokenizer.core.to_str())["decoder"]
    steps = state["decoders"] if state is not None and state["type"] == "Sequence" else [state]
    names = ["none" if step is None else step["type"] for step in steps]
    if unknown := [
        name for name in names if name not in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")
    ]:
        raise ValueError(
            f"the tokenizer's decoder is {unknown[0]}, for which structured output is not supported; "
            "use a tokenizer of bytes, characters, byte-level BPE or SentencePiece"
        )
    return partial(decode, steps=steps, characters=byte_characters() if "ByteLevel" in names else {})


def decode(token: str, steps: list[Any], characters: dict[str, int]) -> bytes:
    """The bytes of one token after the decoder's steps. Steps that join tokens or strip the text do not change it."""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                token = token.replace(pattern, content)
            case {"type": "Metaspace", "replacement": replacement}:
                token = token.replace(replacement, " ")
            case {"type": "ByteFallback"} if found := BYTE.fullmatch(token):
                return bytes.fromhex(found[1])
            case {"type": "ByteLevel"} if all(character in characters for character in token):
                return bytes(characters[character] for character in token)
            case {"type": "Replace", "pattern": pattern}:
                raise ValueError(f"the tokenizer's decoder replaces {pattern}; only plain strings are supported")
    return token.encode()


def byte_characters() -> dict[str, int]:
    """The byte of each printable character of byte-level BPE: itself, or for the others 256, 257 … in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
