"""The encoder-decoder: one stack reads the source whole, another writes the target and looks at it by cross-attention.

    h = encoder(source)      logits_t = decoder(target up to t, h)          Vaswani et al. 2017; T5, BART

It has three attentions: the encoder's (both ways), the decoder's own (causal), and across. The source may be text, or
an image in patches. Its keys and values are computed once and remembered beside the decoder's own, so that a step needs
the source no more.
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
from regard.parts.block import Losses, add
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.input import Tokens, TokensModule, whole_layout
from regard.parts.scored_attention import ScoredAttention
from regard.parts.state import Memory
from regard.spec import SpecError, require


@dataclass(frozen=True)
class EncoderDecoder(Model["EncoderDecoderModule"]):
    passes_state: ClassVar[bool] = False  # do the target's recurrences begin as the source's ended?

    source: Encoder
    target: Decoder
    shared: bool = False  # one table of embeddings for both

    def check(self) -> None:
        require(self.source.head is None, f"{self.kind}: the source's head is read by nobody; leave it out")
        blocks = [block for run in self.target.layers for block in run.blocks]
        across = [reader for block in blocks for s in block.sublayers if (reader := reader_of(s.body)) is not None]
        require(
            len(across) > 0 or self.passes_state,
            "encoder_decoder: the target never looks at the source; give its blocks CrossAttention",
        )
        for reader in across:
            reads = reader.source_width or self.target.width
            require(
                reads == self.source.width,
                f"{self.kind}: {reader.kind} reads vectors of {reads}, the source is {self.source.width} wide; "
                f"set source_width={self.source.width}",
            )
        if self.shared:
            source, target = self.source.input, self.target
            if not isinstance(source, Tokens):
                raise SpecError(f"{self.kind}: shared=True needs Tokens on both sides")
            require(
                (source.vocab, self.source.table_dim) == (target.vocab, target.table_dim),
                f"{self.kind}: shared=True needs tables of one size; the source's is {source.vocab} × "
                f"{self.source.table_dim}, the target's {target.vocab} × {target.table_dim}",
            )

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        return self.target.memory()

    def module(self, scheme: Scheme) -> "EncoderDecoderModule":
        return EncoderDecoderModule(self, scheme)


def reader_of(body: Body) -> CrossAttention | ScoredAttention | None:
    """The attention with which a body reads the source; None: it reads none."""
    body = body.attention if isinstance(body, AttentionRNN) else body
    reads = isinstance(body, CrossAttention) or isinstance(body, ScoredAttention) and body.source
    return body if reads else None


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
        """tokens (B, L) -> logits (B, L, V). The source goes with a row's first tokens; then its state remembers it."""
        if source is None:
            return self.target(tokens, layout, states, outputs)
        layout = whole_layout(tokens) if layout is None else layout
        layout, states, losses = self.condition(source, source_layout, layout, states)
        out = self.target(tokens, layout, states, outputs=True)
        return out._replace(losses=add(losses, out.losses)) if outputs else materialize(out.logits)

    def condition(
        self, source: Tensor, source_layout: TokenLayout | None, layout: TokenLayout, states: States | None
    ) -> tuple[TokenLayout, States | None, Losses]:
        """The target's layout and states conditioned on the source, and the auxiliary losses of the encoder."""
        read, losses = self.source.read(source, source_layout)
        return layout.with_source(read), states, losses
