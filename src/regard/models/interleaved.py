"""Images among the words of a decoder: patches, projected, take the places that a marker token keeps for them.

    x_t = W_2 gelu(W_1 patch) where token t is the marker, else E[token_t]          Liu et al. 2023 (LLaVA)

An image before the text is a prompt that begins with as many markers as the image has patches; several images, or
images between words, are no other case. Image tokens have positions like any token, so that padding, packing, caches
and the loss work as they do for text. After the prompt there are no markers left, and decoding is the decoder's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.models.base import Model, Scheme, initialize
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder, EncoderModule
from regard.models.outputs import Outputs
from regard.models.stack import States
from regard.parts.block import Losses, add
from regard.parts.feedforward import ACTIVATIONS, Activation
from regard.parts.patches import Patches
from regard.parts.state import Memory
from regard.spec import Spec, SpecError, require


@dataclass(frozen=True)
class Projector(Spec):
    """From the width of one model into that of another."""

    hidden: int | None = None  # None: as wide as what it writes
    activation: Activation = "gelu"
    bias: bool = True

    def check(self) -> None:
        require(self.hidden is None or self.hidden > 0, f"projector: hidden={self.hidden} must be positive")

    def build(self, width: int, out: int) -> nn.Module:
        return ProjectorModule(width, out, self)


class ProjectorModule(nn.Module):
    def __init__(self, width: int, out: int, spec: Projector):
        super().__init__()
        hidden = spec.hidden or out
        self.up = nn.Linear(width, hidden, bias=spec.bias)
        self.down = nn.Linear(hidden, out, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True)
class Interleaved(Model["InterleavedModule"]):
    vision: Encoder
    decoder: Decoder
    marker: int  # the token whose places images take
    projector: Projector = Projector()
    features: tuple[int, ...] = ()  # where the vision is read, side by side: 0 its foot, -1 its top; none: its norm
    whole: bool = False  # [CLS] and registers take places too

    def check(self) -> None:
        if not isinstance(self.vision.input, Patches):
            raise SpecError("interleaved: the vision encoder reads no images; give it Patches")
        require(self.vision.head is None, "interleaved: the vision encoder's head is read by nobody; leave it out")
        require(
            0 <= self.marker < self.decoder.vocab,
            f"interleaved: marker={self.marker} is no token; choose one of 0 to {self.decoder.vocab - 1}",
        )

    @property
    def patches(self) -> int:
        """How many places an image takes; unless it is wanted whole, [CLS] and registers stay behind."""
        assert isinstance(self.vision.input, Patches)
        return self.vision.input.length - (0 if self.whole else self.vision.input.first)

    @property
    def depths(self) -> tuple[int, ...]:
        """Behind how many blocks its features are read."""
        blocks = sum(run.times * len(run.blocks) for run in self.vision.layers)
        for depth in self.features:
            require(
                -blocks - 1 <= depth <= blocks,
                f"interleaved: features={self.features} asks for more than the {blocks} blocks of the vision encoder",
            )
        return tuple(depth % (blocks + 1) for depth in self.features)

    def expand(self, tokens: Sequence[int]) -> list[int]:
        """A text with one marker an image -> with as many as the image has patches."""
        return [t for token in tokens for t in [token] * (self.patches if token == self.marker else 1)]

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        return self.decoder.memory()

    def module(self, scheme: Scheme) -> "InterleavedModule":
        return InterleavedModule(self, scheme)


class InterleavedModule(nn.Module):
    def __init__(self, spec: Interleaved, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.vision = EncoderModule(spec.vision, scheme)
        self.projector = spec.projector.build(max(1, len(spec.features)) * spec.vision.width, spec.decoder.width)
        initialize(self.projector, 1, scheme)
        self.decoder = DecoderModule(spec.decoder, scheme)

    def forward(
        self,
        tokens: Tensor,
        layout: TokenLayout | None = None,
        states: States | None = None,
        images: Tensor | None = None,
        outputs: bool = False,
    ) -> Tensor | Outputs:
        """tokens (B, L) and images (n, C, height, width), in the order of their places -> logits (B, L, V)"""
        layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
        embeddings, losses = self.embed(tokens, images)
        out = self.decoder(tokens, layout, states, outputs, embeddings)
        return out._replace(losses=add(losses, out.losses)) if outputs else out

    def embed(self, tokens: Tensor, images: Tensor | None) -> tuple[Tensor, Losses]:
        """Embeddings (B, L, D) with projected patches in place of the markers; and the vision encoder's losses."""
        x, marked = self.decoder.embed(tokens), tokens == self.spec.marker
        if images is None:
            self.refuse_other(marked, 0)
            return x, {}
        self.refuse_other(marked, len(images))
        seen, losses = self.look(images)
        patches = self.projector(seen[:, -self.spec.patches :])  # (n, P, D)
        return x.masked_scatter(marked.unsqueeze(-1), patches.to(x.dtype)), losses

    def look(self, images: Tensor) -> tuple[Tensor, Losses]:
        """What the vision encoder says of each image's tokens."""
        if self.spec.features:
            return self.vision.between(images, self.spec.depths)
        read, losses = self.vision.read(images)
        return read.x, losses

    def refuse_other(self, marked: Tensor, images: int) -> None:
        """Raise where these images do not fill these places; asked only where the answer is at hand."""
        if marked.device.type == "cpu" and not torch.compiler.is_compiling():
            places, patches = int(marked.sum()), self.spec.patches
            if places != images * patches:
                raise ValueError(
                    f"the tokens keep {places} places, {images} images take {patches} each; `expand` puts the markers"
                )
