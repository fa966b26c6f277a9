"""Trials of models that are no decoders: encoders of text and of images, encoder-decoders, and what is made of two.

An encoder-decoder's source depends on the text's first token alone: a text has the same source wherever it stands, and
two texts of a batch hardly ever the same one.
"""

import sys
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
from regard.verify.trial import Need, Trial, longest

NO_ENGINE = "the engine runs decoders"
NOT_PACKED = "an image or sound is a row of its own"


class EncoderTrial(Trial):
    lacks: dict[Need, str] = {"memory": "an encoder reads a text whole and remembers nothing", "engine": NO_ENGINE}

    def longest(self) -> int:
        return min(self.spec.position.reach or sys.maxsize, longest(self.spec))

    def memory(self) -> tuple:
        return ()

    def text(self, *shape: int, seed: int = 1) -> Tensor:
        assert isinstance(self.spec.input, Tokens)
        return torch.randint(self.spec.input.vocab, shape, generator=self.generator(seed)).to(self.device)

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """What the head says of each token; where it says one thing of a text, each token's vector, and that."""
        read, _ = self.model.read(tokens, layout)
        x, layout = read.x, read.layout
        said = self.model.head(x, layout)
        if isinstance(said, tuple):  # of every word, and of the whole
            x, said = said
        if said.shape[:-1] == x.shape[:-1]:
            return said
        if layout.segments is None:
            said = said.unsqueeze(1).expand(-1, x.shape[1], -1)
        else:
            said = said[:, layout.segments[0].clamp_max(said.shape[1] - 1)]  # of each token's own document
        return torch.cat([x, said], -1)


class SignalTrial(EncoderTrial):
    """Of images or sounds."""

    lacks: dict[Need, str] = {
        **EncoderTrial.lacks,
        "padding": "images, and sounds of one length, need no padding",
        "packing": NOT_PACKED,
    }

    def longest(self) -> int:
        return sys.maxsize

    def text(self, *shape: int, seed: int = 1) -> Tensor:
        return signals(self.spec, shape[0], self.generator(seed)).to(self.device, self.dtype)


class EncoderDecoderTrial(Trial):
    lacks: dict[Need, str] = {"engine": NO_ENGINE}

    def __init__(self, model: nn.Module, length: int = 24, cuts: tuple[int, ...] | None = None, seed: int = 0):
        super().__init__(model, length, cuts, seed)
        self.firsts: WeakKeyDictionary[Store, dict[int, int]] = WeakKeyDictionary()  # row: its text's first token
        self.source = self.spec.source.input.length or tokens_of(self.spec.source)
        if not isinstance(self.spec.source.input, Tokens):
            self.lacks = {**self.lacks, "packing": NOT_PACKED}

    def longest(self) -> int:
        return longest(self.spec.target)

    def text(self, *shape: int, seed: int = 1) -> Tensor:
        return torch.randint(self.spec.target.vocab, shape, generator=self.generator(seed)).to(self.device)

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
        begins = beginnings(layout)
        source, source_layout = self.sources(tokens[begins].tolist())
        if layout.segments is not None:
            source, source_layout = pack(source, source_layout, layout.segments[begins])
        return self.model(source, tokens, source_layout, layout)

    def read(self, tokens: Tensor, layout: TokenLayout, store: Store, span: int | None = None) -> Tensor:
        """The source goes with a row's first tokens, and again with rows that have theirs if another begins."""
        begins = beginnings(layout)
        rows = list(range(len(tokens))) if layout.rows is None else layout.rows.tolist()
        firsts = self.firsts.setdefault(store, {})
        for row, text, first in zip(rows, tokens, begins, strict=True):
            if first.any():
                firsts[row] = int(text[first][0])
        if not begins.any():
            return self.model(None, tokens, None, layout, store.begin_forward(layout, span))
        source, source_layout = self.sources([firsts.get(row, 0) for row in rows])
        return self.model(source, tokens, source_layout, layout, store.begin_forward(layout, span))

    def sources(self, firsts: list[int]) -> tuple[Tensor, TokenLayout | None]:
        """A source for each text, by its first token: signals, or words padded to one length."""
        kind = self.spec.source.input
        if not isinstance(kind, Tokens):
            drawn = [signals(self.spec.source, 1, self.generator(100 + first)) for first in firsts]
            return torch.cat(drawn).to(self.device, self.dtype), None
        lengths = [max(1, self.source - first % 4) for first in firsts]
        words = [torch.randint(kind.vocab, (self.source,), generator=self.generator(100 + first)) for first in firsts]
        return torch.stack(words).to(self.device), self.padded(lengths, self.source)[0]


class MadeOfTwo(Trial):
    """The whole of what is tried by its halves: only that it is saved and loaded is left to try."""

    lacks: dict[Need, str] = dict.fromkeys(("inputs", "padding", "packing", "memory", "engine"), "tried on each half")

    def longest(self) -> int:
        return sys.maxsize


TRIALS: dict[type, type[Trial]] = {
    Decoder: Trial,
    Encoder: EncoderTrial,
    EncoderDecoder: EncoderDecoderTrial,
    Seq2Seq: EncoderDecoderTrial,
    DualEncoder: MadeOfTwo,
    Interleaved: MadeOfTwo,
}
HALVES = {DualEncoder: ("image", "text"), Interleaved: ("vision", "decoder")}


def trials(model: nn.Module, length: int, cuts: tuple[int, ...] | None = None, seed: int = 0) -> dict[str, Trial]:
    """The trials of a model by what is tried: "" is all of it, another name a half."""
    spec: Any = model.spec
    assert type(spec) in TRIALS, f"nobody knows how to try {type(spec)}; give it a trial in verify/subjects.py"
    kind = TRIALS[type(spec)]
    if isinstance(spec, Encoder) and not isinstance(spec.input, Tokens):
        kind = SignalTrial
    found = {"": kind(model, length, cuts, seed)}
    for half in HALVES.get(type(spec), ()):
        found[half] = trials(getattr(model, half), length, cuts, seed)[""]
    return found


def beginnings(layout: TokenLayout) -> Tensor:
    """(B, L) True where a text begins."""
    return layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid


def pack(source: Tensor, layout: TokenLayout | None, segments: Tensor) -> tuple[Tensor, TokenLayout]:
    """Sources side by side in one row, each of the document of its text."""
    assert layout is not None and layout.valid is not None
    documents = segments.unsqueeze(-1).expand_as(source)
    return source[layout.valid][None], TokenLayout(layout.positions[layout.valid][None], documents[layout.valid][None])


def signals(spec: Encoder, count: int, generator: torch.Generator) -> Tensor:
    """Images or sounds (count, C, …) that the encoder reads."""
    if isinstance(spec.input, Patches):
        shape = (spec.input.channels, *spec.input.image)
    else:
        assert isinstance(spec.input, Frames), f"nobody knows how to draw {spec.input.kind}; say it here"
        shape = (spec.input.channels, tokens_of(spec) * prod(spec.input.strides))
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


def tokens_of(spec: Encoder) -> int:
    """How many tokens a source or a sound of ours has."""
    return min(8, spec.position.reach or 8)
