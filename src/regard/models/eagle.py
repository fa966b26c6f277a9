"""The draft layer of EAGLE: one block on a decoder's hidden states, which predicts the next of them.

    f̂_{i+1} = block(W [e(t_{i+1}); f_i])          logits_{i+2} = U f̂_{i+1}

f_i is the hidden state that the decoder's head U projects, e(t) the embedding of a token, and both are the decoder's
own. The token t_{i+1}, which was sampled from the logits U f_i, tells the layer which of the possible sequences was
chosen. The layer is a Llama block with rotary positions, counted from the first token that it reads. Li et al. 2024.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.kernels.attention.mask import Causal
from regard.layout import TokenLayout
from regard.models.base import Model, Scheme, initialize
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, Stack, States, check_widths, state_declarations
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU, eight_thirds
from regard.parts.position.rope import Rope
from regard.parts.state import Memory
from regard.spec import require

HEAD_DIMS = (64, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class EagleLayer(Model["EagleLayerModule"]):
    width: int  # of the decoder
    layers: tuple[Repeat, ...]

    def check(self) -> None:
        require(self.width > 0, f"eagle: width={self.width} must be positive")
        check_widths(self.layers, self.width)

    @classmethod
    def of(cls, target: Decoder, layers: int = 1) -> "EagleLayer":
        """For a decoder. ValueError if its head has another width than its blocks."""
        width = target.width
        require(
            target.table_dim == width,
            f"eagle: the decoder's head has embedding_dim={target.embedding_dim} and its blocks width={width}, and the "
            "draft layer needs one width for both; use medusa",
        )
        dim = next((dim for dim in HEAD_DIMS if width % dim == 0), None)
        require(
            dim is not None, f"eagle: width={width} is odd, and rotary positions need pairs of channels; use medusa"
        )
        attention = Attention(width // (dim or width), mask=Causal(), position=Rope())
        block = Block((Sublayer(attention), Sublayer(SwiGLU(eight_thirds(width, 64)))))
        return cls(width, (Repeat((block,), layers),))

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        return state_declarations(self.layers, self.width)

    def module(self, scheme: Scheme) -> "EagleLayerModule":
        return EagleLayerModule(self, scheme)


class EagleLayerModule(nn.Module):
    def __init__(self, spec: EagleLayer, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.fuse = nn.Linear(2 * spec.width, spec.width)
        self.stack = Stack(spec.layers, spec.width)
        initialize(self, len(self.stack.blocks), scheme)

    def forward(
        self, features: Tensor, embeddings: Tensor, layout: TokenLayout, states: States | None = None
    ) -> Tensor:
        """Hidden states (B, L, D), and the embeddings of the tokens after them (B, L, D) -> those predicted next"""
        return self.stack(self.fuse(torch.cat([embeddings, features], -1)), layout, states)[0]
