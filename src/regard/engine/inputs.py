"""The inputs of the engine: the decoder of a model, checked ids of prompts and sources, and padded batches of them."""

import math
import operator
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from regard.engine.request import Sampling
from regard.engine.stores import STORES
from regard.engine.stores.base import OpenStore
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import EncoderModule
from regard.models.encoder_decoder import EncoderDecoderModule
from regard.models.interleaved import InterleavedModule
from regard.parts.frames import Frames
from regard.parts.input import Tokens
from regard.parts.state import PerSource, declarations, exact_cache_limit
from regard.spec import suggest_name

SourceInput = Sequence[int] | Tensor  # ids, or a signal (C, frames)
CAPACITY = 2048  # tokens per request, and per source, if neither the caller nor the model sets a limit


def decoder_of(model: nn.Module) -> DecoderModule:
    """The decoder that generates a model's tokens. ValueError if it has none."""
    match model:
        case DecoderModule():
            return model
        case EncoderDecoderModule(target=target):
            return target
        case InterleavedModule(decoder=decoder):
            return decoder
    spec: Any = model.spec
    raise ValueError(f"this model is of kind {spec.kind} and does not generate text; use one with a decoder")


def context_limit(model: nn.Module) -> int | None:
    """The maximum number of tokens of a sequence, of an encoder-decoder the smaller maximum; None: unlimited."""
    match model:
        case EncoderDecoderModule(spec=spec):
            parts = (spec.source, spec.target)
        case InterleavedModule(spec=spec):
            parts = (spec.decoder,)
        case EncoderModule(spec=spec) | DecoderModule(spec=spec):
            parts = (spec,)
        case _:
            parts = ()
    limits = [part.context or part.position.max_positions for part in parts]
    return min((limit for limit in limits if limit is not None), default=None)


def check_context(context: int, model: nn.Module) -> None:
    """Raise ValueError if the model does not support this context."""
    if context < 1:
        raise ValueError(f"context={context} must be positive")
    limit = context_limit(model)
    if limit is not None and context > limit:
        raise ValueError(f"context={context} exceeds the model's context of {limit} tokens; choose at most {limit}")


def encoder_capacity(model: EncoderDecoderModule | None, requested: int | None) -> int:
    """Tokens per source: as requested, or the encoder's context; 0 for a model without an encoder.

    A signal always has the length of the encoder's context, as in Whisper: padding would change its last tokens.
    """
    if model is None:
        if requested is not None:
            check_size("source_capacity", requested)
        return 0
    encoder = model.spec.source
    limit = encoder.context or encoder.position.max_positions
    if isinstance(encoder.input, Frames):
        if limit is None:
            raise ValueError("engine: the encoder of a signal needs a context, which sets the number of frames")
        return limit
    if not isinstance(encoder.input, Tokens):
        raise ValueError(f"engine: the source is {encoder.input.kind}, not tokens or frames; call the model directly")
    if requested is None:
        return limit or CAPACITY
    check_size("source_capacity", requested)
    if limit is not None and requested > limit:
        raise ValueError(f"engine: source_capacity={requested} must be from 1 to the encoder's context, {limit}")
    return requested


def checked_capacity(spec: Decoder, capacity: int | None) -> int:
    """Tokens per request: as requested, or the most that the model can have. ValueError if they are too many."""
    context, exact = spec.context, exact_cache_limit(spec.memory())
    if capacity is None:
        return min(limit for limit in (context or CAPACITY, exact) if limit is not None)
    check_size("capacity", capacity)
    if context is not None and capacity > context:
        raise ValueError(f"engine: capacity={capacity} exceeds the model's context={context}; choose at most that")
    if exact is not None and capacity > exact:
        raise ValueError(
            f"engine: capacity={capacity}, but this model is cached exactly up to {exact} tokens only, because its "
            f"rotations depend on the length of the sequence; choose a capacity (--context) of at most {exact}"
        )
    return capacity


def check_states(spec: Decoder, has_source: bool) -> None:
    """Raise ValueError if a step could not have all that earlier steps computed, or the source that it reads."""
    for body in (sublayer.body for layer in spec.blocks for sublayer in layer.sublayers):
        declared = declarations(body.memory(spec.width))
        if not has_source and any(isinstance(kind, PerSource) for kind in declared):
            raise ValueError(f"engine: {body.kind} reads a source; give the engine the whole encoder-decoder")
        if body.mixes and declared == (None,):
            raise ValueError(
                f"engine: {body.kind} mixes tokens but declares no state, so a step would miss "
                "the earlier tokens; give it a memory(), or run the model without the engine"
            )


def check_size(name: str, size: int) -> None:
    if not hasattr(size, "__index__") or size < 1:
        raise ValueError(f"engine: {name}={size!r} must be a positive integer")


def checked_store(store: str | OpenStore) -> OpenStore:
    """The constructor of a store, from its name or itself."""
    if isinstance(store, str):
        if store not in STORES:
            raise ValueError(f"there is no store {store!r}; {suggest_name(store, STORES)}")
        return STORES[store]
    if not callable(store):
        raise ValueError(
            f"engine: store is an object of class {type(store).__name__}; give a name, one of {', '.join(STORES)}, "
            "or a constructor, such as Paged or partial(Paged, blocks=64): the engine opens the store itself"
        )
    return store


def checked_ids(name: str, ids: Sequence[int], vocab: int) -> tuple[int, ...]:
    """The ids as a tuple; ValueError if there are none, or one is not in the vocabulary."""
    if len(ids) == 0:
        raise ValueError(f"the {name} is empty; at least one token is needed")
    try:
        ids = tuple(map(operator.index, ids))
    except TypeError as error:
        raise ValueError(f"the {name} must be integers from 0 to {vocab - 1}; {error}") from None
    extreme = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= extreme < vocab:
        raise ValueError(f"the {name} has id {extreme}; the model's ids are 0 to {vocab - 1}; use its own tokenizer")
    return ids


def checked_prompt(
    ids: Sequence[int], spec: Decoder, capacity: int, embeddings: Tensor | None = None
) -> tuple[int, ...]:
    """The ids of a prompt as a tuple; ValueError if they, or its embeddings, do not fit."""
    check_sequence("prompt", ids)
    if len(ids) >= capacity:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but prompt and new tokens must fit into {capacity}; shorten it"
        )
    ids = checked_ids("prompt", ids, spec.vocab)
    if embeddings is not None:
        found = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        if found != (len(ids), spec.width):
            expected = (len(ids), spec.width)
            raise ValueError(f"the embeddings have shape {found}; this prompt needs a tensor of shape {expected}")
    return ids


def check_sampled_ids(sampling: Sampling, vocab: int) -> None:
    """Raise ValueError if the settings name ids that the model does not have."""
    largest = max(sampling.constrained_ids, default=0)
    if largest >= vocab:
        raise ValueError(f"id {largest} cannot be biased, suppressed or forced; the ids are 0 to {vocab - 1}")
    if sampling.grammar is not None and sampling.grammar.vocab != vocab:
        compiled = sampling.grammar.vocab
        raise ValueError(
            f"the grammar is compiled for {compiled} ids, but the model has {vocab}; compile it with vocab={vocab}"
        )


def check_order(priority: int, tenant: str, salt: str) -> None:
    if not isinstance(priority, int):
        raise ValueError(f"priority={priority!r} must be an integer; lower values go first")
    for name, value in (("tenant", tenant), ("salt", salt)):
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} must be a string")


def deadline_of(seconds: float | None) -> float | None:
    """The time by `monotonic` that is this many seconds from now."""
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < float("inf")):
        raise ValueError(f"deadline={seconds!r} must be a positive number of seconds, or None for no limit")
    return None if seconds is None else monotonic() + seconds


def check_sequence(name: str, ids: SourceInput) -> None:
    if not hasattr(ids, "__len__"):
        raise ValueError(f"the {name} is {ids!r}, not a sequence of token ids; give a list of integers")


def checked_source(model: EncoderDecoderModule | None, source: SourceInput | None, capacity: int) -> SourceInput:
    """The ids of the source as a tuple, or its signal; () for a model without an encoder."""
    if model is None:
        if source is not None:
            raise ValueError("a decoder reads no source; leave it out, or put its ids into the prompt")
        return ()
    spec = model.spec.source.input
    if isinstance(spec, Frames):
        shape = (spec.channels, capacity * math.prod(spec.strides))
        if not isinstance(source, Tensor) or source.shape != shape:
            found = f"shape {tuple(source.shape)}" if isinstance(source, Tensor) else f"type {type(source).__name__}"
            raise ValueError(f"the source has {found}; this model reads a signal, a tensor of shape {shape}")
        return source
    if source is None:
        raise ValueError("an encoder-decoder needs the ids of a source: submit(ids, sampling, source)")
    check_sequence("source", source)
    if len(source) > capacity:
        raise ValueError(f"the source has {len(source)} tokens, but at most {capacity} fit; shorten it")
    assert isinstance(spec, Tokens) and not isinstance(source, Tensor)
    return checked_ids("source", source, spec.vocab)


def pad_sources(sources: Sequence[SourceInput], weight: Tensor) -> tuple[Tensor, TokenLayout | None]:
    """Tokens (B, L) and their layout, or signals (B, C, frames), which all have the same length."""
    signals = [source for source in sources if isinstance(source, Tensor)]
    if signals:
        return torch.stack(signals).to(weight), None
    return pad_ids([source for source in sources if not isinstance(source, Tensor)], weight.device)


def pad_ids(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, TokenLayout]:
    """Tokens (B, L) of sequences, padded on the right with the first token of each, and their layout."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in rows], device=device)
    return tokens, TokenLayout.padded([len(row) for row in rows], device)
