"""The encoder-decoder: an encoder computes hidden states of the source, and a decoder attends to them.

    h = encoder(source)      logits_t = decoder(target up to t, h)          Vaswani et al. 2017; T5, BART

It has three attentions: bidirectional in the encoder, causal in the decoder, and cross-attention from the decoder to
the encoder. The source is a sequence of tokens or an image in patches. Its keys and values are computed once and cached
beside the decoder's own, so that decoding steps do not need the source.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.models.base import Model, Scheme
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder, EncoderModule
from regard.models.outputs import Outputs, materialize
from regard.models.stack import States
from regard.parts.attention_rnn import AttentionRNN
from regard.parts.block import Losses, sum_losses
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.input import Tokens, TokensModule, whole_layout
from regard.parts.scored_attention import ScoredAttention
from regard.parts.state import Memory
from regard.spec import SpecError, require


@dataclass(frozen=True)
class EncoderDecoder(Model["EncoderDecoderModule"]):
    passes_state: ClassVar[bool] = False  # whether the target's recurrences start from the source's final states

    source: Encoder
    target: Decoder
    shared: bool = False  # source and target share one embedding table

    def check(self) -> None:
        require(
            self.source.head is None, f"{self.kind}: the source has a head, whose output is not used; set head=None"
        )
        blocks = [block for run in self.target.layers for block in run.blocks]
        cross_attentions = [
            found for block in blocks for s in block.sublayers if (found := cross_attention_of(s.body)) is not None
        ]
        require(
            len(cross_attentions) > 0 or self.passes_state,
            "encoder_decoder: the target does not attend to the source; add CrossAttention to its blocks",
        )
        for attention in cross_attentions:
            expected = attention.source_width or self.target.width
            require(
                expected == self.source.width,
                f"{self.kind}: {attention.kind} expects a source of width {expected}, but it has width "
                f"{self.source.width}; set source_width={self.source.width}",
            )
        if self.shared:
            source, target = self.source.input, self.target
            if not isinstance(source, Tokens):
                raise SpecError(f"{self.kind}: shared=True, but the source's input is {source.kind}; use Tokens")
            require(
                (source.vocab, self.source.table_dim) == (target.vocab, target.table_dim),
                f"{self.kind}: shared=True needs embedding tables of the same size; the source's is {source.vocab} × "
                f"{self.source.table_dim}, the target's {target.vocab} × {target.table_dim}",
            )

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        return self.target.memory()

    def module(self, scheme: Scheme) -> "EncoderDecoderModule":
        return EncoderDecoderModule(self, scheme)


def cross_attention_of(body: Body) -> CrossAttention | ScoredAttention | None:
    """The attention of a body to the source; None if it has none."""
    body = body.attention if isinstance(body, AttentionRNN) else body
    to_source = isinstance(body, CrossAttention) or isinstance(body, ScoredAttention) and body.source
    return body if to_source else None


class EncoderDecoderModule(nn.Module):
    def __init__(self, spec: EncoderDecoder, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.source = EncoderModule(spec.source, scheme)
        self.target = DecoderModule(spec.target, scheme)
        if spec.shared:
            assert isinstance(self.source.input, TokensModule)
            self.source.input.table.weight = self.target.embedding.weight

    def forward(
        self,
        source: Tensor | None,
        tokens: Tensor,
        source_layout: TokenLayout | None = None,
        layout: TokenLayout | None = None,
        states: States | None = None,
        outputs: bool = False,
    ) -> Tensor | Outputs:
        """tokens (B, L) -> logits (B, L, V)

        The source is needed with a row's first tokens only; with source=None its keys and values come from the states.
        """
        if source is None:
            return self.target(tokens, layout, states, outputs)
        layout = whole_layout(tokens) if layout is None else layout
        layout, states, losses = self.condition(source, source_layout, layout, states)
        out = self.target(tokens, layout, states, outputs=True)
        return out._replace(losses=sum_losses(losses, out.losses)) if outputs else materialize(out.logits)

    def condition(
        self, source: Tensor, source_layout: TokenLayout | None, layout: TokenLayout, states: States | None
    ) -> tuple[TokenLayout, States | None, Losses]:
        """The target's layout and states conditioned on the source, and the auxiliary losses of the encoder."""
        encoded, losses = self.source.encode(source, source_layout)
        return layout.with_source(encoded), states, losses
