"""Smaller caches: which keys and values a store keeps, in place of those of all tokens.

    int8, fp8, int4  all tokens in 8 or 4 bits, with a scale per token and head
    int4:64          the same, and the newest 64 tokens as they are
    sinks:4+1020     the first 4 tokens and the newest 1,020: sequences of any length in constant memory
    window:1024      the newest 1,024 tokens
    h2o:512          per head 512 tokens: the newest, and those that queries have attended to most
    snapkv:512       per head 512 tokens of the prompt: its last, and those that these attend to most; all new tokens

A cache changes what layers declare (parts/state.py), so every store can keep it. Recurrent states, the states of a
source and layers with a shorter attention window of their own stay as they are. A cache that a model cannot have is
refused by name.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from regard.engine.inputs import checked_capacity
from regard.engine.memory import bytes_of
from regard.engine.stores.arrays import QuantizedTokens
from regard.engine.stores.base import ModelMemory, OpenStore, Store
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.evicting import EvictedTokens
from regard.engine.stores.eviction_rules import OBSERVED, EvictionRule, HeavyHitters, PromptWindow
from regard.engine.stores.streaming import StreamedTokens
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.models.decoder import Decoder
from regard.parts.state import Declared, Memory, PerToken
from regard.spec import SpecError

ENDLESS = 2**20  # tokens per sequence by default, where memory does not depend on them
STREAMING_CHUNK = 256  # tokens per step: each of them attends to its own copies of the first tokens
EVICTING_CHUNK = 64  # tokens per step: their weights are computed once per block of queries


@dataclass(frozen=True)
class Cache:
    """All keys and values; the base class of smaller caches."""

    max_chunk: ClassVar[int] = 2**31  # tokens of one forward
    compiles: ClassVar[bool] = True  # whether decode steps can be compiled

    def check(self, spec: Decoder) -> None:
        """Raise ValueError if a model cannot have this cache."""

    def capacity(self, spec: Decoder, requested: int | None) -> int:
        """Tokens per sequence."""
        return checked_capacity(spec, requested)

    def store(self, constructor: OpenStore) -> OpenStore:
        return constructor

    def declare(self, memory: ModelMemory) -> ModelMemory:
        """The states of a model with this cache."""
        return memory

    def kept(self, length: int, prompt: int) -> int:
        """Tokens that are kept of a sequence of this length, with a prompt of that length."""
        return length

    def metrics(self, store: Store, sequences: Iterable[tuple[int, int]]) -> dict[str, int]:
        """Of sequences of these lengths, with prompts of those lengths."""
        kept = [(self.kept(length, prompt), length) for length, prompt in sequences]
        return {
            "cache_bytes": bytes_of(store),
            "cached_tokens": sum(tokens for tokens, _ in kept),
            "evicted_tokens": sum(length - tokens for tokens, length in kept),
        }


@dataclass(frozen=True)
class QuantizedCache(Cache):
    """All tokens in a number format; queries read the newest `recent` tokens, their own included, as they are."""

    format: str = "int8"  # one of FORMATS
    recent: int = 0

    def __str__(self) -> str:
        return f"{self.format}:{self.recent}" if self.recent else self.format

    def declare(self, memory: ModelMemory) -> ModelMemory:
        return map_tokens(memory, self.quantize, self)

    def quantize(self, declared: PerToken) -> PerToken:
        if self.recent and declared.rotated is None:
            raise ValueError(
                f"cache {self}: a layer with the arrays {', '.join(declared.arrays)} needs every key once, so newest "
                f"tokens cannot be kept beside their codes; use {self.format}:0"
            )
        number_format = FORMATS[self.format]
        for name, (heads, dim) in declared.arrays.items():
            try:
                number_format.check_shape((heads, dim))
            except SpecError as error:
                raise ValueError(f"cache {self}: {name} has {dim} numbers per head; {error}") from None
        return QuantizedTokens(**fields_of(declared, pages=False), format=number_format, recent=self.recent)


@dataclass(frozen=True)
class Streaming(Cache):
    """The first `sinks` tokens and the newest `window` ones, at positions counted among them (StreamingLLM)."""

    max_chunk = STREAMING_CHUNK

    window: int
    sinks: int = 0

    def __str__(self) -> str:
        return f"sinks:{self.sinks}+{self.window}" if self.sinks else f"window:{self.window}"

    def check(self, spec: Decoder) -> None:
        if self.window < 1 or self.sinks < 0:
            raise ValueError(f"cache {self}: the window must be at least 1 and the sinks at least 0")
        if spec.context is not None and self.sinks + self.window > spec.context:
            raise ValueError(
                f"cache {self}: {self.sinks + self.window} tokens exceed the model's context of {spec.context}; "
                f"choose at most that many"
            )
        if spec.position.absolute:
            raise ValueError(
                f"cache {self}: {spec.position.kind} positions are added to the embeddings, so they cannot be counted "
                "inside the cache; use a model with rotary positions or a bias by distance"
            )

    def capacity(self, spec: Decoder, requested: int | None) -> int:
        return requested or ENDLESS

    def kept(self, length: int, prompt: int) -> int:
        return min(length, self.sinks + self.window)

    def store(self, constructor: OpenStore) -> OpenStore:
        return Contiguous  # a page table would have to list the blocks of all tokens

    def declare(self, memory: ModelMemory) -> ModelMemory:
        return map_tokens(memory, self.stream, self)

    def stream(self, declared: PerToken) -> PerToken:
        if declared.window is not None and declared.first + declared.window <= self.sinks + self.window:
            return declared
        if declared.rotated is None or not declared.relative or declared.max_exact_cache is not None:
            raise ValueError(
                f"cache {self}: a layer with the arrays {', '.join(declared.arrays)} cannot leave out tokens, because "
                "its mask or its rotations depend on the position in the whole sequence; use a cache of all tokens"
            )
        return StreamedTokens(**fields_of(declared, window=self.window, first=self.sinks))


@dataclass(frozen=True)
class EvictingCache(Cache):
    """Per head the tokens that queries attend to most, at their own positions (H2O, SnapKV)."""

    max_chunk = EVICTING_CHUNK
    compiles = False

    kind: str  # one of RULES
    budget: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.budget}"

    @property
    def rule(self) -> EvictionRule:
        return RULES[self.kind](self.budget)

    def check(self, spec: Decoder) -> None:
        if self.budget < SMALLEST:
            raise ValueError(f"cache {self}: {self.budget} tokens are too few; choose at least {SMALLEST}")

    def kept(self, length: int, prompt: int) -> int:
        return self.rule.kept(length, prompt)

    def store(self, constructor: OpenStore) -> OpenStore:
        return Contiguous  # heads keep different tokens, so rows cannot share blocks of them

    def declare(self, memory: ModelMemory) -> ModelMemory:
        return map_tokens(memory, self.evict, self)

    def evict(self, declared: PerToken) -> PerToken:
        if declared.window is not None and declared.first + declared.window <= self.budget:
            return declared
        if not declared.selectable:
            raise ValueError(
                f"cache {self}: a layer with the arrays {', '.join(declared.arrays)} cannot choose keys by their "
                "scores: it needs attention with keys and values per head, the causal mask, and positions in the keys, "
                "not as a bias; use int8, int4, sinks or window"
            )
        return EvictedTokens(**fields_of(declared, pages=False), rule=self.rule)


def fields_of(declared: PerToken, **changes: Any) -> dict[str, Any]:
    """The fields of a declaration, some of them changed."""
    return {field.name: getattr(declared, field.name) for field in fields(PerToken)} | changes


def map_tokens(memory: ModelMemory, change: Callable[[PerToken], PerToken], cache: Cache) -> ModelMemory:
    """The states of a model with other per-token arrays; ValueError if it has none."""
    changed: list[PerToken] = []

    def one(declared: Declared) -> Declared:
        if not isinstance(declared, PerToken):
            return declared
        changed.append(change(declared))
        return changed[-1]

    def body(declared: Memory) -> Memory:
        return tuple(map(one, declared)) if isinstance(declared, tuple) else one(declared)

    result = tuple(tuple(body(declared) for declared in block) for block in memory)
    if not changed:
        raise ValueError(f"cache {cache}: no layer of this model keeps keys and values; leave the cache out")
    return result


FORMATS: dict[str, NumberFormat] = {
    "int8": Integer(8, scale_dtype="bfloat16"),
    "fp8": Float("float8_e4m3fn"),
    "int4": Integer(4, symmetric=False, scale_dtype="bfloat16"),
}
RECENT = {"int4": 64}  # newest tokens that are kept as they are, if the description does not say how many
RULES: dict[str, Callable[[int], HeavyHitters | PromptWindow]] = {
    "h2o": HeavyHitters,
    "snapkv": lambda budget: PromptWindow(budget, min(OBSERVED, budget // 2)),
}
SMALLEST = 4  # tokens of a budget
FORMS = {  # by name, an example
    "int8": "int8", "fp8": "fp8", "int4": "int4:64", "sinks": "sinks:4+1020", "window": "window:1024",
    "h2o": "h2o:512", "snapkv": "snapkv:512",
}  # fmt: skip
HELP = ", ".join(FORMS.values())


def parse_cache(text: str) -> Cache:
    """The cache of a string such as "sinks:4+1020". ValueError if it is none."""
    name, _, rest = text.partition(":")
    if name not in FORMS:
        raise ValueError(f"there is no cache {text!r}; choose one of {HELP}")
    numbers = [int(number) for number in rest.split("+")] if re.fullmatch(r"[0-9]{1,12}(\+[0-9]{1,12})?", rest) else []
    if name in FORMATS and text == name:
        return QuantizedCache(name, RECENT.get(name, 0))
    match name, numbers:
        case (("int8" | "fp8" | "int4"), [recent]):
            return QuantizedCache(name, recent)
        case "sinks", [sinks, window]:
            return Streaming(window=window, sinks=sinks)
        case "window", [window]:
            return Streaming(window=window)
        case (("h2o" | "snapkv"), [budget]):
            return EvictingCache(name, budget)
    raise ValueError(f"cache {text!r} is not of the form {FORMS[name]}")


def store_bytes(spec: Decoder, cache: str | None, rows: int, capacity: int, dtype: torch.dtype, source: int = 0) -> int:
    """Bytes that the contiguous store of an engine with this cache allocates. cache: None: all tokens.

    ValueError if the model cannot have this cache. source: tokens per source of an encoder-decoder.
    """
    chosen = checked_cache(cache, spec)
    states, size = chosen.declare(spec.memory()), chosen.capacity(spec, capacity)
    return bytes_of(Contiguous(states, rows, size, dtype, "meta", source))


def checked_cache(
    cache: str | Cache | None, spec: Decoder, batch_invariant: bool = False, compile: bool = False
) -> Cache:
    """The cache from its description. ValueError if the model, or an engine with these options, cannot have it."""
    if batch_invariant and cache is not None:
        raise ValueError(f"batch_invariant does not support cache={str(cache)!r}, only whole pages; leave one out")
    if cache is not None and not isinstance(cache, str | Cache):
        raise ValueError(f"engine: cache={cache!r} must be a string, such as {HELP}")
    cache = Cache() if cache is None else parse_cache(cache) if isinstance(cache, str) else cache
    if compile and not cache.compiles:
        raise ValueError(f"compile does not support cache={str(cache)!r}, whose steps run eagerly; leave one out")
    cache.check(spec)
    return cache
