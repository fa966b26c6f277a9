"""Lookahead: the model's own guesses at later tokens, and the n-grams that they form, are the draft.

    inputs         tₙ   d₁   d₂   d₃        one forward, in which d₁ … are guesses
    predictions    y₀   y₁   y₂   y₃        the most likely token after each input: a step of Jacobi's iteration
    next draft     the guesses after the accepted tokens: y_{a+1} … , each replaced where the pool knows an n-gram

Greedy decoding is the fixed point yᵢ = dᵢ₊₁ of this iteration, and every step fixes at least one more token. Each
forward also gives pairs (dᵢ₋₁ dᵢ → yᵢ), which are kept in a pool for each request: a phrase that was guessed too early
or in another place is found again there. No second model and no training. Song et al. 2021 (Jacobi), Fu et al. 2024
(lookahead decoding). Theirs extends several trajectories at once with a special mask; here it is one, so that any
mixer can verify it.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from regard.engine.request import Draft, Request
from regard.models.decoder import DecoderModule


class GuessPool:
    """The n-grams of one request, and its guesses at the tokens after the last one."""

    def __init__(self) -> None:
        self.next: dict[tuple[int, ...], int] = {}  # by the last two tokens, and by the last one
        self.indexed = 0  # tokens of the request
        self.guesses: list[int] = []

    def add(self, context: tuple[int, ...], id: int) -> None:
        self.next[context] = self.next[context[-1:]] = id

    def update(self, tokens: Sequence[int]) -> None:
        """Add the n-grams of the prompt and the new tokens."""
        for position in range(max(self.indexed, 2), len(tokens)):
            self.add(tuple(tokens[position - 2 : position]), tokens[position])
        self.indexed = len(tokens)

    def continue_from(self, tokens: Sequence[int], length: int) -> list[int]:
        """By n-grams of the pool, else by the guesses, else by the last token again."""
        ids = list(tokens[-2:])
        start = len(ids)
        for i in range(length):
            guess = self.guesses[i] if i < len(self.guesses) else self.next.get(tuple(ids[-1:]), ids[-1])
            ids.append(self.next.get(tuple(ids[-2:]), guess))
        return ids[start:]


class Lookahead:
    def __init__(self) -> None:
        self.pools: WeakKeyDictionary[Request, GuessPool] = WeakKeyDictionary()

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        pass

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        drafts = []
        for request, length in zip(requests, lengths, strict=True):
            pool = self.pools.get(request)
            if pool is None:
                pool = self.pools[request] = GuessPool()
            pool.update(request.tokens)
            drafts.append(Draft(pool.continue_from(request.tokens, length)))
        return drafts

    def observe(self, request: Request, inputs: Sequence[int], accepted: int, logits: Tensor) -> None:
        pool, predictions = self.pools[request], logits.argmax(-1).tolist()
        for i, id in enumerate(predictions):
            pool.add(tuple(inputs[max(0, i - 1) : i + 1]), id)
        pool.guesses = predictions[accepted + 1 :]
