"""Prompt lookup: the tokens that followed the last occurrence of the last few tokens, in the prompt or the new tokens.

    … the cat sat on the mat … the cat          draft: sat on the mat …

It costs nothing, needs no second model, and pays where the output repeats parts of the input: editing, summaries,
code, quotations. A draft that reaches the end of the sequence continues with its own first tokens, so a loop of any
period is predicted. Saxena 2023; Yang et al. 2023 (LLMA).
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from regard.engine.request import Draft, Request
from regard.models.decoder import DecoderModule


class NgramIndex:
    """The last position after each n-gram of a sequence that grows."""

    def __init__(self, smallest: int, largest: int):
        self.sizes = range(largest, smallest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}
        self.indexed = 0  # positions

    def update(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that are followed by a token."""
        for position in range(self.indexed, len(tokens)):
            for size in self.sizes:
                if size <= position:
                    self.after[tuple(tokens[position - size : position])] = position
        self.indexed = len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position after the last occurrence of the longest n-gram at the end of the tokens."""
        found = (self.after.get(tuple(tokens[-size:])) for size in self.sizes if size <= len(tokens))
        return next((position for position in found if position is not None), None)


class PromptLookup:
    def __init__(self, smallest: int = 3, largest: int = 5):
        """smallest, largest: tokens of the n-grams that are looked up, the largest first."""
        if not 1 <= smallest <= largest:
            raise ValueError(f"smallest={smallest} and largest={largest} must be sizes of n-grams, 1 or more, in order")
        self.smallest, self.largest = smallest, largest
        self.indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        pass

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        return [Draft(self.continuation(request, length)) for request, length in zip(requests, lengths, strict=True)]

    def continuation(self, request: Request, length: int) -> list[int]:
        index = self.indices.get(request)
        if index is None:
            index = self.indices[request] = NgramIndex(self.smallest, self.largest)
        index.update(request.tokens)
        position = index.find(request.tokens)
        if position is None:
            return []
        ids = request.tokens[position : position + length]
        while len(ids) < length:
            ids.append(ids[len(ids) - (len(request.tokens) - position)])
        return ids
