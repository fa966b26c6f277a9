"""A request: a prompt (ids), its sampling settings, and the tokens generated so far.

A request for an encoder-decoder has the ids of a source too; its prompt is the start of the target. A prompt may have
embeddings that replace those of its ids, for example those of image patches.

Log-probabilities are those of the model's distribution, before penalties, temperature and filters.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

RULES = {  # setting: (type, lowest, highest, rule); NaN is in no range
    "max_new": (int, 1, 2**31, "a positive integer"),
    "temperature": (float, 0, 1e9, "at least 0 and finite; 0 always takes the most likely token"),
    "top_k": (int, 0, 2**31, "an integer of at least 0; 0 keeps all tokens"),
    "top_p": (float, 1e-9, 1, "above 0 and at most 1; 1 keeps all tokens"),
    "min_p": (float, 0, 1, "from 0 to 1; 0 keeps all tokens"),
    "repetition_penalty": (float, 0.01, 100, "from 0.01 to 100; 1 changes nothing"),
    "presence_penalty": (float, -2, 2, "from -2 to 2; 0 changes nothing"),
    "frequency_penalty": (float, -2, 2, "from -2 to 2; 0 changes nothing"),
    "top_logprobs": (int, 0, 2**31, "an integer of at least 0"),
}


class GenerationError(RuntimeError):
    """The model failed on a request."""


class QueueFull(RuntimeError):
    """The queue of waiting requests is full; try again later."""


@dataclass(frozen=True)
class Sampling:
    max_new: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and new tokens, as in transformers
    presence_penalty: float = 0.0  # over new tokens, as in OpenAI's API
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a random one for each request
    stop_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()  # never generated
    forced_bos_id: int | None = None  # always the first new token
    forced_eos_id: int | None = None  # always the last of max_new tokens, unless the sequence stops earlier
    top_logprobs: int = 0  # how many of the most likely tokens are returned with each token

    def __post_init__(self) -> None:
        for name, (kind, lowest, highest, rule) in RULES.items():
            value = getattr(self, name)
            number = isinstance(value, int | kind) and not isinstance(value, bool)
            if not number or not lowest <= value <= highest:
                raise ValueError(f"{name}={value!r} must be {rule}")
        if self.seed is not None and not is_nonnegative_int(self.seed, below=2**64):
            raise ValueError(f"seed={self.seed!r} must be an integer from 0 to 2**64 - 1, or None for a random one")
        for name in ("stop_ids", "suppress_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple) or not all(is_nonnegative_int(id, below=2**63) for id in ids):
                raise ValueError(f"{name}={ids!r} must be a tuple of token ids, integers of at least 0")
        for name in ("forced_bos_id", "forced_eos_id"):
            if (id := getattr(self, name)) is not None and not is_nonnegative_int(id, below=2**63):
                raise ValueError(f"{name}={id!r} must be a token id, an integer of at least 0, or None")

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class Token(NamedTuple):
    id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # the most likely (id, logprob), in descending order
    finish: str | None  # with the last token: "stop" or "length"


@dataclass(eq=False)
class Request:
    ids: tuple[int, ...]
    sampling: Sampling
    source: tuple[int, ...] = ()  # ids that an encoder reads
    embeddings: Tensor | None = None  # (len(ids), D) input of the first block in place of the embeddings of the ids
    new: list[Token] = field(default_factory=list)
    finish: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str | None = None

    # Set by the engine
    arrival: int = 0  # order of submission; the latest arrival is preempted first
    row: int | None = None  # in the store, while running
    cached: int = 0  # tokens that the store holds
    isolated: bool = False  # was in a batch that failed; has a batch to itself until its next token
    history: "TokenHistory | None" = None  # only with penalties

    def __post_init__(self) -> None:
        self.tokens = list(self.ids)  # prompt and new tokens
        self.seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed

    @property
    def pending(self) -> int:
        """Tokens that are not cached yet: one in decode, more in prefill."""
        return len(self.tokens) - self.cached

    @property
    def pending_source(self) -> int:
        """Tokens of the source that are not encoded yet: all before the first forward, then none."""
        return 0 if self.cached else len(self.source)

    @property
    def forced_id(self) -> int | None:
        """The next token if the settings force one, else None."""
        last = len(self.new) + 1 == self.sampling.max_new and self.sampling.forced_eos_id is not None
        return self.sampling.forced_eos_id if last else None if self.new else self.sampling.forced_bos_id

    def add(self, token: Token) -> None:
        self.new.append(token)
        self.tokens.append(token.id)
        self.finish = token.finish
        self.isolated = False
        if self.history is not None:
            self.history.add(token.id)


class TokenHistory:
    """The tokens of the prompt and the counts of the new tokens, for penalties."""

    def __init__(self, ids: Sequence[int], vocab: int, device: torch.device):
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[list(ids)] = True
        self.counts = torch.zeros(vocab, dtype=torch.int64, device=device)

    def add(self, id: int) -> None:
        self.counts[id] += 1


def is_nonnegative_int(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
