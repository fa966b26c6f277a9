"""Trials of models other than decoders: encoders, encoder-decoders, models with two encoders, images between tokens.

The source of an encoder-decoder, and the image of an interleaved model, are functions of the first token of a sequence:
a sequence has the same source in every row and batch, and two sequences of a batch hardly ever have the same one.
"""

import sys
from functools import cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.engine.stores.base import Store
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.interleaved import Interleaved
from regard.models.seq2seq import Seq2Seq
from regard.parts.frames import Frames
from regard.parts.input import Tokens
from regard.parts.patches import Patches
from regard.verification.length import MAX_LENGTH
from regard.verification.trial import Need, Trial, max_length

NO_ENGINE = "an encoder does not generate"
SIGNAL_SOURCE = "the engine accepts only sources of token ids"
NOT_PACKED = "an image or an audio clip takes a whole row"


class EncoderTrial(Trial):
    lacks: dict[Need, str] = {"memory": "an encoder processes whole sequences and has no cache", "engine": NO_ENGINE}

    def max_length(self) -> int:
        return min(self.spec.position.max_positions or sys.maxsize, max_length(self.spec))

    def memory(self) -> tuple:
        return ()

    def inputs(self, *shape: int, seed: int = 1) -> Tensor:
        assert isinstance(self.spec.input, Tokens)
        return self.random_tokens(self.spec.input.vocab, shape, seed)

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """The head's output per token. An output per sequence is concatenated to the hidden state of each token."""
        source, _ = self.model.encode(tokens, layout)
        x, layout = source.x, source.layout
        output = self.model.head(x, layout)
        if isinstance(output, tuple):  # per token, and per sequence
            x, output = output
        if output.shape[:-1] == x.shape[:-1]:
            return output
        if layout.segments is None:
            output = output.unsqueeze(1).expand(-1, x.shape[1], -1)
        else:
            output = output[:, layout.segments[0].clamp_max(output.shape[1] - 1)]  # of each token's document
        return torch.cat([x, output], -1)


class SignalTrial(EncoderTrial):
    """An encoder of images or audio."""

    lacks: dict[Need, str] = {
        **EncoderTrial.lacks,
        "padding": "images, and audio of one length, need no padding",
        "packing": NOT_PACKED,
    }

    def max_length(self) -> int:
        return sys.maxsize

    def inputs(self, *shape: int, seed: int = 1) -> Tensor:
        return random_signals(self.spec, shape[0], self.generator(seed)).to(self.device, self.dtype)


class FirstTokenTrial(Trial):
    """A trial whose sequences have a further input that is a function of their first token."""

    def __init__(self, model: nn.Module, length: int = 24, cuts: tuple[int, ...] | None = None, seed: int = 0):
        super().__init__(model, length, cuts, seed)
        self.first_ids: WeakKeyDictionary[Store, dict[int, int]] = WeakKeyDictionary()  # per row of a store

    def first_tokens(self, tokens: Tensor, layout: TokenLayout, store: Store) -> list[int]:
        """The first token of the sequence in each row, from this forward or from an earlier one."""
        rows = list(range(len(tokens))) if layout.rows is None else layout.rows.tolist()
        first_ids = self.first_ids.setdefault(store, {})
        for row, ids, first in zip(rows, tokens, starts(layout), strict=True):
            if first.any():
                first_ids[row] = int(ids[first][0])
        return [first_ids.get(row, 0) for row in rows]


class EncoderDecoderTrial(FirstTokenTrial):
    def __init__(self, model: nn.Module, length: int = 24, cuts: tuple[int, ...] | None = None, seed: int = 0):
        super().__init__(model, length, cuts, seed)
        self.source_length = self.spec.source.input.length or random_source_length(self.spec.source)
        if not isinstance(self.spec.source.input, Tokens):
            self.lacks = {"packing": NOT_PACKED, "engine": SIGNAL_SOURCE}

    def max_length(self) -> int:
        return max_length(self.spec.target)

    def inputs(self, *shape: int, seed: int = 1) -> Tensor:
        return self.random_tokens(self.spec.target.vocab, shape, seed)

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
        first = starts(layout)
        source, source_layout = self.sources(tokens[first].tolist())
        if layout.segments is not None:
            source, source_layout = pack(source, source_layout, layout.segments[first])
        return self.model(source, tokens, source_layout, layout)

    def cached_forward(self, tokens: Tensor, layout: TokenLayout, store: Store, span: int | None = None) -> Tensor:
        """Logits as in `Trial`. If any row starts its sequence, all rows of the batch are given their source."""
        first_ids = self.first_tokens(tokens, layout, store)
        if not starts(layout).any():
            return self.model(None, tokens, None, layout, store.begin_forward(layout, span))
        source, source_layout = self.sources(first_ids)
        return self.model(source, tokens, source_layout, layout, store.begin_forward(layout, span))

    def source_of(self, ids: list[int]) -> list[int]:
        source, layout = self.sources(ids[:1])
        return source[0].tolist() if layout is None or layout.valid is None else source[layout.valid].tolist()

    def sources(self, first_ids: list[int]) -> tuple[Tensor, TokenLayout | None]:
        """One source per first token: signals, or tokens padded to one length."""
        source_input = self.spec.source.input
        if not isinstance(source_input, Tokens):
            drawn = [random_signals(self.spec.source, 1, self.generator(100 + first)) for first in first_ids]
            return torch.cat(drawn).to(self.device, self.dtype), None
        vocab, length = source_input.vocab, self.source_length
        lengths = [max(1, length - first % 4) for first in first_ids]
        ids = [torch.randint(vocab, (length,), generator=self.generator(100 + first)) for first in first_ids]
        return torch.stack(ids).to(self.device), self.padded(lengths, length)[0]


class InterleavedTrial(FirstTokenTrial):
    """A decoder with an image in every sequence of full length; the image's markers follow the first token.

    Laws also cut sequences inside an image, but the model requires whole images. For such chunks the decoder is called
    directly with the embeddings of the patches; all other forwards call the model.
    """

    lacks: dict[Need, str] = {"engine": "tested on its decoder"}

    def __init__(self, model: nn.Module, length: int = 24, cuts: tuple[int, ...] | None = None, seed: int = 0):
        spec: Any = model.spec
        needed = 2 * spec.patches + 4  # a sequence has its image in its first half
        super().__init__(model, max(length, needed), cuts, seed)
        self.embedded = cache(self.patch_embeddings)
        if needed > self.limit or needed > max(length, MAX_LENGTH):
            reason = (
                f"an image takes {spec.patches} tokens, so sequences of {needed} are needed; "
                f"at most {min(self.limit, max(length, MAX_LENGTH))} are tested (--length)"
            )
            self.lacks = {**self.lacks, **dict.fromkeys(("inputs", "padding", "packing", "memory"), reason)}

    def max_length(self) -> int:
        return max_length(self.spec.decoder)

    def with_model(self, model: nn.Module) -> "InterleavedTrial":
        other = super().with_model(model)
        other.embedded = cache(other.patch_embeddings)
        return other

    def inputs(self, *shape: int, seed: int = 1) -> Tensor:
        """Tokens (…, L). Sequences of the trial's length or more have one image, whose markers start at position 1."""
        marker, vocab = self.spec.marker, self.spec.decoder.vocab
        tokens = self.random_tokens(vocab - 1, shape, seed)
        tokens += tokens >= marker
        if shape[-1] >= self.length:
            tokens[..., 1 : 1 + self.spec.patches] = marker
        return tokens

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
        first = starts(layout)
        slots = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        latest = slots.where(first, -1).cummax(1).values.clamp_min(0)  # (B, L) where each token's sequence starts
        return self.forward(tokens, layout, None, tokens.gather(1, latest))

    def cached_forward(self, tokens: Tensor, layout: TokenLayout, store: Store, span: int | None = None) -> Tensor:
        first_ids = torch.tensor(self.first_tokens(tokens, layout, store), device=self.device)
        states = store.begin_forward(layout, span)
        return self.forward(tokens, layout, states, first_ids.unsqueeze(-1).expand_as(tokens))

    def forward(self, tokens: Tensor, layout: TokenLayout, states: Any, first_ids: Tensor) -> Tensor:
        """`first_ids` (B, L): the first token of each token's sequence."""
        marked, patches = tokens == self.spec.marker, self.spec.patches
        start = marked & (layout.positions == 1)
        whole_images = marked.sum() == start.sum() * patches and (layout.positions[marked] <= patches).all()
        if whole_images:
            images = torch.cat([self.image(first) for first in first_ids[start].tolist()]) if start.any() else None
            return self.model(tokens, layout, states, images)
        x = self.model.decoder.embed(tokens)
        for row, slot in marked.nonzero().tolist():
            position = int(layout.positions[row, slot])
            x[row, slot] = self.embedded(int(first_ids[row, slot]))[(position - 1) % patches]
        return self.model.decoder(tokens, layout, states, embeddings=x)

    def image(self, first: int) -> Tensor:
        return random_signals(self.spec.vision, 1, self.generator(100 + first)).to(self.device, self.dtype)

    def patch_embeddings(self, first: int) -> Tensor:
        """(P, D) the embeddings that replace the markers."""
        markers = torch.full((1, self.spec.patches), self.spec.marker, device=self.device)
        return self.model.embed(markers, self.image(first))[0][0]


class DualEncoderTrial(Trial):
    """Two encoders, each with a separate trial; on the whole model only saving and loading is tested."""

    lacks: dict[Need, str] = dict.fromkeys(
        ("inputs", "padding", "packing", "memory", "engine"), "tested on each of the two encoders"
    )

    def max_length(self) -> int:
        return sys.maxsize


TRIALS: dict[type, type[Trial]] = {
    Decoder: Trial,
    Encoder: EncoderTrial,
    EncoderDecoder: EncoderDecoderTrial,
    Seq2Seq: EncoderDecoderTrial,
    DualEncoder: DualEncoderTrial,
    Interleaved: InterleavedTrial,
}
PARTS = {DualEncoder: ("image", "text"), Interleaved: ("vision", "decoder")}


def trials(model: nn.Module, length: int, cuts: tuple[int, ...] | None = None, seed: int = 0) -> dict[str, Trial]:
    """The trials of a model and of its parts: "" is the whole model, another key the name of a part."""
    spec: Any = model.spec
    assert type(spec) in TRIALS, f"{type(spec)} has no trial; add one to TRIALS in verification/trials.py"
    kind = TRIALS[type(spec)]
    if isinstance(spec, Encoder) and not isinstance(spec.input, Tokens):
        kind = SignalTrial
    by_part = {"": kind(model, length, cuts, seed)}
    for part in PARTS.get(type(spec), ()):
        by_part[part] = trials(getattr(model, part), length, cuts, seed)[""]
    return by_part


def starts(layout: TokenLayout) -> Tensor:
    """(B, L) True at the first token of each sequence."""
    return layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid


def pack(source: Tensor, layout: TokenLayout | None, segments: Tensor) -> tuple[Tensor, TokenLayout]:
    """All sources in one row, each with the segment of its target."""
    assert layout is not None and layout.valid is not None
    documents = segments.unsqueeze(-1).expand_as(source)
    return source[layout.valid][None], TokenLayout(layout.positions[layout.valid][None], documents[layout.valid][None])


def random_signals(spec: Encoder, count: int, generator: torch.Generator) -> Tensor:
    """Random images or audio (count, C, …) of the encoder's input size."""
    if isinstance(spec.input, Patches):
        shape = (spec.input.channels, *spec.input.image)
    else:
        assert isinstance(spec.input, Frames), f"{spec.input.kind} has no random input; add it here"
        shape = (spec.input.channels, random_source_length(spec) * prod(spec.input.strides))
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


def random_source_length(spec: Encoder) -> int:
    """The number of tokens of a random source, or of random audio."""
    return min(8, spec.position.max_positions or 8)
