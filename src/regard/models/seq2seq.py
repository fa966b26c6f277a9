"""Sequence to sequence, before transformers: one recurrence reads the source, another goes on from where it ended.

    s_0 = how the source ended      s_t = f(target_t, s_{t-1})      logits_t = W s_t

Sutskever et al. 2014: all that the target ever learns of the source is one state a layer. With attention it may look
back at every token: before each step (additive, Bahdanau et al. 2014) or after it (dot, general; Luong et al. 2015).
It is an encoder-decoder with recurrent layers, and states that are handed over.
"""

from dataclasses import dataclass
from itertools import chain, repeat
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regard.kernels.recurrent.cells.documents import split_documents
from regard.layout import TokenLayout
from regard.models.base import Scheme
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModule
from regard.models.outputs import Outputs, materialize
from regard.models.stack import Repeat, States, final_states, state_declarations
from regard.parts.attention_rnn import AttentionRNN
from regard.parts.bidirectional import Bidirectional
from regard.parts.block import Block, Losses, Sublayer
from regard.parts.body import Body
from regard.parts.input import Tokens, whole_layout
from regard.parts.norm import NoNorm
from regard.parts.recurrent import LSTM, RecurrentMixer
from regard.parts.scored_attention import ScoredAttention
from regard.parts.state import STATELESS, FinalState, FixedSize, Memory, State, declarations
from regard.spec import require


@dataclass(frozen=True)
class Seq2Seq(EncoderDecoder):
    passes_state: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        gives = [fixed(memory) for memory in chain(*state_declarations(self.source.layers, self.source.width))]
        takes = [fixed(memory) for memory in chain(*self.target.memory())]
        gives, takes = ([memory for memory in side if memory is not None] for side in (gives, takes))
        require(len(gives) > 0, "seq2seq: no layer of the source carries a state; give it RNN, LSTM or GRU layers")
        require(len(takes) > 0, "seq2seq: no layer of the target carries a state; give it RNN, LSTM or GRU layers")
        for taken in takes:
            require(
                all(taken == given for given in gives),
                f"seq2seq: the source ends with {gives[0].arrays}, the target begins with {taken.arrays}; "
                "give both recurrences of one kind and size",
            )

    def module(self, scheme: Scheme) -> "Seq2SeqModule":
        return Seq2SeqModule(self, scheme)


def fixed(memory: Memory) -> FixedSize | None:
    """What is carried along, of all that a body remembers."""
    return next((declared for declared in declarations(memory) if isinstance(declared, FixedSize)), None)


class Seq2SeqModule(EncoderDecoderModule):
    def __init__(self, spec: Seq2Seq, scheme: Scheme = "fan_in"):
        super().__init__(spec, scheme)
        # per sublayer of the target: does it have a recurrent state? Not in forward: torch.compile cannot trace specs.
        self.recurrent = tuple(tuple(fixed(memory) is not None for memory in block) for block in spec.target.memory())

    def forward(
        self,
        source: Tensor | None,
        tokens: Tensor,
        source_layout: TokenLayout | None = None,
        layout: TokenLayout | None = None,
        states: States | None = None,
        outputs: bool = False,
    ) -> Tensor | Outputs:
        layout = whole_layout(tokens) if layout is None else layout
        if source is None:
            refuse_beginnings(layout)
            return self.target(tokens, layout, states, outputs)
        if layout.segments is not None and states is None:
            out = self.of_documents(source, tokens, source_layout, layout)
            return out if outputs else materialize(out.logits)
        if source_layout is not None and source_layout.segments is not None:
            raise ValueError("the source is packed and the target is not; say the target's documents, or unpack both")
        return super().forward(source, tokens, source_layout, layout, states, outputs)

    def condition(
        self, source: Tensor, source_layout: TokenLayout | None, layout: TokenLayout, states: States | None
    ) -> tuple[TokenLayout, States | None, Losses]:
        ends = final_states(self.spec.source.layers)
        read, losses = self.source.read(source, source_layout, states=ends)
        return layout.with_source(read), self.pass_states(ends, states), losses

    def pass_states(self, ends: tuple[tuple[FinalState, ...], ...], states: States | None) -> States:
        """The target's states, which begin as the source's ended, in their order; its last serves all further ones."""
        ended = [end.arrays for end in chain(*ends) if end.arrays]
        given = chain(ended, repeat(ended[-1]))
        own = states or tuple(tuple(STATELESS for _ in block) for block in self.recurrent)
        return tuple(
            tuple(
                InitialState(state, next(given)) if recurrent else state
                for state, recurrent in zip(block, flags, strict=True)
            )
            for block, flags in zip(own, self.recurrent, strict=True)
        )

    def of_documents(
        self, source: Tensor, tokens: Tensor, source_layout: TokenLayout | None, layout: TokenLayout
    ) -> Outputs:
        """Packed rows: each document in a row of its own, and back."""
        rows = torch.arange(len(source), device=source.device)
        if source_layout is not None and source_layout.segments is not None:
            reads, source_layout = split_documents(source_layout)
            source, rows = reads.split(source), reads.rows
        writes, document_layout = split_documents(layout)
        if not torch.equal(rows, writes.rows):
            raise ValueError(
                f"the source has {len(rows)} documents, the target {len(writes.rows)}; give each document of the "
                "target its own of the source, in the same row and order"
            )
        out = self(source, writes.split(tokens), source_layout, document_layout, outputs=True)
        return Outputs(
            writes.merge(materialize(out.logits)),
            tuple(writes.merge(materialize(logits)) for logits in out.ahead_logits),
            out.losses,
        )


def refuse_beginnings(layout: TokenLayout) -> None:
    """A row begins as its source ended, so it cannot begin where there is none."""
    first = layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid  # (B, L)
    if first.any():
        rows = first.any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"rows {rows} begin here, but there is no source to begin from; give it with their first token"
        )


class InitialState:
    """A state that begins not empty but with what is given."""

    def __init__(self, state: State, arrays: dict[str, Tensor]):
        self.state, self.arrays = state, arrays

    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        return self.state.read(layout, **{name: self.arrays[name].to(array) for name, array in empty.items()})

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        self.state.write(layout, **arrays)

    def recall(self, layout: TokenLayout, read) -> tuple:
        return self.state.recall(layout, read)


def seq2seq(
    vocab: int,
    width: int,
    recurrence: RecurrentMixer | None = None,
    attention: Literal["none", "additive", "dot", "general"] = "none",
    layers: int = 1,
    bidirectional: bool = False,
    source_vocab: int | None = None,
    dropout: float = 0.0,
) -> Seq2Seq:
    """Of that many recurrent layers on each side, one on the other, as wide as the vectors of words."""
    recurrence = recurrence or LSTM()

    def layer(body: Body) -> Block:
        return Block((Sublayer(body, NoNorm()),), keep=0.0, dropout=dropout)

    reads, writes = layer(Bidirectional(recurrence) if bidirectional else recurrence), layer(recurrence)
    target = (Repeat((writes,), layers),)
    if attention == "additive":
        first = layer(AttentionRNN(recurrence, ScoredAttention(source=True)))
        target = (Repeat((first,)), *((Repeat((writes,), layers - 1),) if layers > 1 else ()))
    elif attention != "none":
        target = (*target, Repeat((layer(ScoredAttention(score=attention, source=True, combine=True)),)))
    return Seq2Seq(
        Encoder(Tokens(source_vocab or vocab), width, (Repeat((reads,), layers),)),
        Decoder(vocab, width, target, norm=NoNorm(), tied=False),
    )
