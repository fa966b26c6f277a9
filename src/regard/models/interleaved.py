"""Images between the tokens of a decoder: projected patches replace the embeddings of marker tokens.

    x_t = W_2 gelu(W_1 patch) where token t is the marker, else E[token_t]          Liu et al. 2023 (LLaVA)

Each image takes as many consecutive markers as it has patches; a prompt may contain several images anywhere. Image
tokens have positions like any token, so that padding, packing, caches and the loss work as they do for text. Decoding
is that of the decoder, because there are no markers after the prompt.
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
from regard.parts.block import Losses, sum_losses
from regard.parts.feedforward import ACTIVATIONS, Activation
from regard.parts.patches import Patches
from regard.parts.state import Memory
from regard.spec import Spec, SpecError, require


@dataclass(frozen=True)
class Projector(Spec):
    """A two-layer MLP from the width of one model to that of another."""

    hidden: int | None = None  # None: the output width
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
    marker: int  # the token that patches replace
    projector: Projector = Projector()
    # Blocks of the vision encoder whose outputs are concatenated: 0 the embeddings, -1 the last; (): the final norm
    features: tuple[int, ...] = ()
    whole: bool = False  # also use [CLS] and registers

    def check(self) -> None:
        if not isinstance(self.vision.input, Patches):
            raise SpecError(f"interleaved: the input of the vision encoder is {self.vision.input.kind}; use Patches")
        require(
            self.vision.head is None,
            "interleaved: the vision encoder has a head, whose output is not used; set head=None",
        )
        require(
            0 <= self.marker < self.decoder.vocab,
            f"interleaved: marker={self.marker} is not in the vocabulary; choose one of 0 to {self.decoder.vocab - 1}",
        )

    @property
    def patches(self) -> int:
        """Tokens per image; without `whole`, [CLS] and registers are left out."""
        assert isinstance(self.vision.input, Patches)
        return self.vision.input.length - (0 if self.whole else self.vision.input.first)

    @property
    def depths(self) -> tuple[int, ...]:
        """The numbers of blocks after which features are taken."""
        blocks = sum(run.times * len(run.blocks) for run in self.vision.layers)
        for depth in self.features:
            require(
                -blocks - 1 <= depth <= blocks,
                f"interleaved: features={self.features} exceeds the {blocks} blocks of the vision encoder; use numbers "
                f"from {-blocks - 1} to {blocks}",
            )
        return tuple(depth % (blocks + 1) for depth in self.features)

    def expand(self, tokens: Sequence[int]) -> list[int]:
        """Replace each marker, one per image, by as many markers as an image has patches."""
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
        """tokens (B, L) and images (n, C, height, width), in the order of their markers -> logits (B, L, V)"""
        layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
        embeddings, losses = self.embed(tokens, images)
        out = self.decoder(tokens, layout, states, outputs, embeddings)
        return out._replace(losses=sum_losses(losses, out.losses)) if outputs else out

    def embed(self, tokens: Tensor, images: Tensor | None) -> tuple[Tensor, Losses]:
        """Embeddings (B, L, D) with projected patches in place of the markers; and the vision encoder's losses."""
        x, marked = self.decoder.embed(tokens), tokens == self.spec.marker
        if images is None:
            self.check_markers(marked, 0)
            return x, {}
        self.check_markers(marked, len(images))
        features, losses = self.image_features(images)
        patches = self.projector(features[:, -self.spec.patches :])  # (n, P, D)
        return x.masked_scatter(marked.unsqueeze(-1), patches.to(x.dtype)), losses

    def image_features(self, images: Tensor) -> tuple[Tensor, Losses]:
        """The vision encoder's hidden states of every image (n, P, F), and its losses."""
        if self.spec.features:
            return self.vision.hidden_states_at(images, self.spec.depths)
        encoded, losses = self.vision.encode(images)
        return encoded.x, losses

    def check_markers(self, marked: Tensor, images: int) -> None:
        """Raise ValueError unless there is one marker per patch; only on the CPU, where it needs no synchronization."""
        if marked.device.type == "cpu" and not torch.compiler.is_compiling():
            markers, patches = int(marked.sum()), self.spec.patches
            if markers != images * patches:
                raise ValueError(
                    f"there are {markers} marker tokens, but {images} images have {patches} patches each; insert the "
                    "markers with `expand`"
                )
