"""A request: a prompt (ids), its sampling settings, and the tokens generated so far.

A request for an encoder-decoder has a source too, ids or a signal; its prompt is the start of the target. A prompt may
have embeddings that replace those of its ids, for example those of image patches.

Log-probabilities are those of the model's distribution, before penalties, temperature and filters.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from regard.adapt.lora_weights import LoraWeights
from regard.engine.grammar import Grammar, Matcher

RULES = {  # setting: (type, lowest, highest, rule); NaN is in no range
    "max_new": (int, 1, 2**31, "a positive integer"),
    "min_new": (int, 0, 2**31, "an integer of at least 0"),
    "temperature": (float, 0, 1e9, "at least 0 and finite; 0 always takes the most likely token"),
    "top_k": (int, 0, 2**31, "an integer of at least 0; 0 keeps all tokens"),
    "top_p": (float, 1e-9, 1, "above 0 and at most 1; 1 keeps all tokens"),
    "min_p": (float, 0, 1, "from 0 to 1; 0 keeps all tokens"),
    "typical_p": (float, 1e-9, 1, "above 0 and at most 1; 1 keeps all tokens"),
    "repetition_penalty": (float, 0.01, 100, "from 0.01 to 100; 1 changes nothing"),
    "presence_penalty": (float, -2, 2, "from -2 to 2; 0 changes nothing"),
    "frequency_penalty": (float, -2, 2, "from -2 to 2; 0 changes nothing"),
    "top_logprobs": (int, 0, 2**31, "an integer of at least 0"),
}
UNREAD = -1  # in place of the id of a token that the host has not read
# (T,) prompt and new tokens, (V,) logits -> (V,) logits. The arguments are copies and may be changed.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
TokenSequences = tuple[tuple[int, ...], ...]
PrefixKeys = tuple[int | bytes, ...]  # what identifies each token of a prompt: its id, or a digest of its embedding


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
    seed: int | None = None  # None, or -1 as in vLLM and llama.cpp: a random one for each request
    stop_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()  # never generated
    forced_bos_id: int | None = None  # always the first new token
    forced_eos_id: int | None = None  # always the last of max_new tokens, unless the sequence stops earlier
    top_logprobs: int = 0  # how many of the most likely tokens are returned with each token
    prompt_logprobs: int | None = None  # as top_logprobs, for the tokens of the prompt; None: no log-probabilities
    typical_p: float = 1.0
    min_new: int = 0  # the request does not stop before it has this many new tokens
    ignore_eos: bool = False  # no stop ids: stop_ids becomes empty
    stop_sequences: TokenSequences = ()  # the request ends with the last token of one
    bad_words: TokenSequences = ()  # sequences of tokens that are never completed, also if they begin in the prompt
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to logits; -inf: never generated
    processors: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None  # the output matches it, unless it ends by its length

    def __post_init__(self) -> None:
        for name, (kind, lowest, highest, rule) in RULES.items():
            value = getattr(self, name)
            number = isinstance(value, int | kind) and not isinstance(value, bool)
            if not number or not lowest <= value <= highest:
                raise ValueError(f"{name}={value!r} must be {rule}")
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**64):
            raise ValueError(
                f"seed={self.seed!r} must be an integer from -2**63 to 2**64 - 1; None or -1 for a random one"
            )
        if self.prompt_logprobs is not None and not is_nonnegative_int(self.prompt_logprobs, below=2**31):
            raise ValueError(f"prompt_logprobs={self.prompt_logprobs!r} must be an integer of at least 0, or None")
        for name in ("stop_ids", "suppress_ids"):
            if not is_ids(ids := getattr(self, name)):
                raise ValueError(f"{name}={ids!r} must be a tuple of token ids, integers of at least 0")
        for name in ("forced_bos_id", "forced_eos_id"):
            if (id := getattr(self, name)) is not None and not is_id(id):
                raise ValueError(f"{name}={id!r} must be a token id, an integer of at least 0, or None")
        for name in ("stop_sequences", "bad_words"):
            sequences = getattr(self, name)
            if not isinstance(sequences, tuple) or not all(ids and is_ids(ids) for ids in sequences):
                raise ValueError(f"{name}={sequences!r} must be a tuple of tuples of token ids, none of them empty")
        self.check_bias()
        if not isinstance(self.processors, tuple) or not all(map(callable, self.processors)):
            raise ValueError(f"processors={self.processors!r} must be a tuple of functions of (tokens, logits)")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        if self.min_new > self.max_new:
            raise ValueError(f"min_new={self.min_new} must be at most max_new={self.max_new}")
        if self.grammar is not None:
            self.check_grammar()
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change theirs later
        if self.ignore_eos:
            object.__setattr__(self, "stop_ids", ())

    def check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or not all(map(is_id, self.logit_bias)):
            raise ValueError(f"logit_bias={self.logit_bias!r} must be a dict of token ids, integers of at least 0")
        for id, bias in self.logit_bias.items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not number or not (-1e30 <= bias <= 1e30 or bias == -math.inf):
                raise ValueError(f"logit_bias={{{id}: {bias!r}}} must be finite numbers, or -inf to exclude a token")

    def check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar={self.grammar!r} must be a Grammar; compile it with a GrammarCompiler")
        if not self.stop_ids or self.ignore_eos:
            raise ValueError("a grammar needs stop_ids, with which its output ends; give them, and no ignore_eos")
        for name in ("min_new", "forced_bos_id", "forced_eos_id"):
            if getattr(self, name) != getattr(Sampling, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} cannot be combined with a grammar; leave one of them out"
                )

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def filters(self) -> tuple[float, float, float, float]:
        """Temperature, top-k, top-p and log min-p."""
        return self.temperature, self.top_k, self.top_p, math.log(self.min_p) if self.min_p else -math.inf

    @cached_property
    def plain(self) -> bool:
        """Whether new tokens depend only on temperature, top-k, top-p, min-p, penalties and stop ids."""
        return not (
            self.suppress_ids or self.stop_sequences or self.bad_words or self.logit_bias or self.processors
            or self.min_new or self.top_logprobs or self.typical_p < 1 or self.grammar is not None
            or self.forced_bos_id is not None or self.forced_eos_id is not None
        )  # fmt: skip

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the choice of a token depends on earlier new tokens, which the host must have read then."""
        return bool(
            self.penalizes or self.bad_words or self.processors or self.min_new or self.grammar is not None
            or self.forced_bos_id is not None or self.forced_eos_id is not None
        )  # fmt: skip

    @property
    def constrained_ids(self) -> tuple[int, ...]:
        """The ids that are biased, suppressed or forced. They must be ids of the model."""
        forced = tuple(id for id in (self.forced_bos_id, self.forced_eos_id) if id is not None)
        return (*self.suppress_ids, *forced, *self.logit_bias, *(id for ids in self.bad_words for id in ids))


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `Engine.submit`. All but the adapter do not change the tokens of a request."""

    adapter: str | None  # the name of a loaded adapter; None: the model without adapters
    salt: str  # the request shares cached prefixes only with requests of the same salt
    priority: int  # lower values first
    tenant: str  # tenants with waiting requests are served equally
    deadline: float | None  # seconds from now, after which the request ends with finish="timeout", waiting or running


class PromptEmbeddings(NamedTuple):
    """The embeddings of a prompt, prepared by `Engine.prompt_embeddings`. On the host: many prompts may be queued."""

    values: Tensor  # (len(ids), D)
    keys: PrefixKeys


class Token(NamedTuple):
    id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # the most likely (id, logprob), in descending order
    finish: str | None  # with the last token: "stop" or "length"
    rank: int | None = None  # 1 is the most likely token of the vocabulary; with top_logprobs
    entropy: float | None = None  # of the distribution of the token over the vocabulary, in nats; with top_logprobs


@dataclass(eq=False)
class Draft:
    """Tokens that a drafter proposes as the next ones of a request. A token that is accepted leaves the draft."""

    ids: list[int]
    probabilities: Tensor | None = None  # (len(ids), V) that the ids were drawn from; None: they were not drawn
    others: list[list[int]] = field(default_factory=list)  # more candidates, the best first; of greedy requests only

    def pop(self) -> None:
        del self.ids[0]
        self.probabilities = None if self.probabilities is None else self.probabilities[1:]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter that an engine has loaded."""

    name: str
    weights: LoraWeights
    version: int  # differs for all adapters that the engine has loaded, also for those of one name


@dataclass(eq=False)
class Request:
    ids: tuple[int, ...]
    sampling: Sampling
    source: Sequence[int] | Tensor = ()  # ids that an encoder reads, or a signal (C, frames)
    embeddings: Tensor | None = None  # (len(ids), D) input of the first block in place of the embeddings of the ids
    prompt_keys: PrefixKeys = ()  # by which cached prefixes are found; (): the ids
    salt: str = ""  # cached prefixes are shared only between requests of the same salt
    priority: int = 0  # lower values first
    tenant: str = ""  # requests of different tenants are served equally
    deadline: float | None = None  # in seconds of time.monotonic
    adapter: Adapter | None = None  # None: the model without adapters
    new: list[Token] = field(default_factory=list)
    prompt_logprobs: list[Token] = field(default_factory=list)  # of ids[1:], if Sampling asks for them
    finish: str | None = None  # "stop", "length", "cancelled", "timeout" or "error"
    error: str | None = None

    # Set by the engine
    arrival: int = 0  # order of submission; the latest arrival is preempted first
    row: int | None = None  # in the store, while running
    cached: int = 0  # tokens that the store holds
    reused: int = 0  # tokens of the prompt that the store held already when the request was admitted
    unread: int = 0  # new tokens that are computed, but not read from the device yet; they are not in `tokens`
    limit: int = 0  # new tokens at most, by max_new and the capacity of the engine
    preempted: bool = False  # has lost its row, and waits for another
    isolated: bool = False  # was in a batch that failed; has a batch to itself, without a draft, until its next token
    leader: "Request | None" = None  # has the same prompt; this request waits until that has computed it
    history: "TokenHistory | None" = None  # only with penalties
    matcher: Matcher | None = None  # only with a grammar
    draft: Draft | None = None  # the tokens after `tokens`, in the step that verifies them

    def __post_init__(self) -> None:
        self.tokens = list(self.ids)  # prompt and new tokens
        seed = derived_seed(self.sampling.seed, 0)
        self.seed = secrets.randbits(64) if seed is None else seed

    @property
    def output_ids(self) -> list[int]:
        """The new ids, without the stop id."""
        return [token.id for token in self.new if token.finish != "stop"]

    @property
    def length(self) -> int:
        """Tokens of the prompt and new tokens, also those that are not read yet."""
        return len(self.tokens) + self.unread

    @property
    def prefix(self) -> Sequence[int | bytes]:
        """What identifies the prompt and new tokens in the store."""
        return [*self.prompt_keys, *self.tokens[len(self.ids) :]] if self.prompt_keys else self.tokens

    @property
    def pending(self) -> int:
        """Tokens that are not cached yet: one in decode, more in prefill."""
        return len(self.tokens) + self.unread - self.cached  # of all properties the one that is used most

    @property
    def full(self) -> bool:
        """Whether the request has all its new tokens, the last of which are not read yet."""
        return self.unread > 0 and len(self.new) + self.unread >= self.limit

    def pending_ids(self, count: int) -> list[int]:
        """The first pending tokens; UNREAD for one that is not read yet, which can only be the last. Then the draft."""
        ids = self.tokens[self.cached : self.cached + count]
        if self.draft is not None:
            return ids + self.draft.ids[: count - len(ids)]
        return ids + [UNREAD] * (count - len(ids))

    @property
    def source_length(self) -> int:
        """Tokens of the source, for a signal its frames."""
        return self.source.shape[-1] if isinstance(self.source, Tensor) else len(self.source)

    @property
    def pending_source(self) -> int:
        """Tokens of the source that are not encoded yet: all before the first forward, then none."""
        return 0 if self.cached else self.source_length

    @property
    def held(self) -> bool:
        """Whether the request waits for the prompt of its leader."""
        return self.leader is not None and self.leader.finish is None and not self.leader.new

    @property
    def forced_id(self) -> int | None:
        """The next token if the settings force one, else None."""
        last = len(self.new) + 1 == self.sampling.max_new and self.sampling.forced_eos_id is not None
        return self.sampling.forced_eos_id if last else None if self.new else self.sampling.forced_bos_id

    @property
    def banned_ids(self) -> set[int]:
        """Ids that cannot be the next token: those suppressed, those that complete a bad word, or stop too early."""
        settings = self.sampling
        banned = {*settings.suppress_ids, *completions(settings.bad_words, self.tokens)}
        if len(self.new) < settings.min_new:
            banned |= {*settings.stop_ids, *completions(settings.stop_sequences, self.tokens[len(self.ids) :])}
        return banned

    def stops(self, id: int) -> bool:
        """Whether the request ends with this token as the next one, because of a stop id or sequence."""
        settings = self.sampling
        if not settings.stop_sequences:
            return id in settings.stop_ids
        return id in settings.stop_ids or id in completions(settings.stop_sequences, self.tokens[len(self.ids) :])

    def finish_reason(self, id: int) -> str | None:
        """Why the request finishes with this token as the next one; None if it continues."""
        if self.stops(id):
            return "stop"
        return "length" if len(self.new) + 1 >= self.limit else None

    def add(self, token: Token) -> None:
        self.new.append(token)
        self.tokens.append(token.id)
        self.finish = token.finish
        self.isolated = False
        if self.history is not None:
            self.history.add(token.id)
        if self.matcher is not None:
            self.matcher.accept(token.id)


class TokenHistory:
    """The tokens of the prompt and the counts of the new tokens, for penalties."""

    def __init__(self, ids: Sequence[int], vocab: int, device: torch.device):
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[list(ids)] = True
        self.counts = torch.zeros(vocab, dtype=torch.int64, device=device)

    def add(self, id: int) -> None:
        self.counts[id] += 1


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index` of a request with this seed, from 0 to 2**64 - 1; None: a random one."""
    return None if seed is None or seed == -1 else (seed + index) % 2**64


def completions(sequences: TokenSequences, tokens: Sequence[int]) -> list[int]:
    """The last id of each sequence whose other ids are the last of `tokens`."""
    return [ids[-1] for ids in sequences if len(ids) == 1 or tuple(tokens[1 - len(ids) :]) == ids[:-1]]


def is_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(map(is_id, value))


def is_id(value: object) -> bool:
    return is_nonnegative_int(value, below=2**63)


def is_nonnegative_int(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
