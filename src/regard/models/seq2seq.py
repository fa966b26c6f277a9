"""Recurrent sequence to sequence: the target's recurrence starts from the final state of the source's.

    s_0 = final state of the source      s_t = f(target_t, s_{t-1})      logits_t = W s_t

In Sutskever et al. 2014 the target depends on the source only through one state per layer. With attention it attends to
all source tokens: before each step (additive, Bahdanau et al. 2014) or after it (dot, general; Luong et al. 2015). The
model is an encoder-decoder with recurrent layers.
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
        declared = state_declarations(self.source.layers, self.source.width), self.target.memory()
        source, target = ([s for s in map(recurrent_state, chain(*side)) if s is not None] for side in declared)
        for side, states in (("source", source), ("target", target)):
            require(len(states) > 0, f"seq2seq: no layer of the {side} is recurrent; use RNN, LSTM or GRU layers")
        for initial in target:
            require(
                all(initial == final for final in source),
                f"seq2seq: the source's state is {source[0].arrays}, the target's {initial.arrays}; use recurrences of "
                "the same kind and size",
            )

    def module(self, scheme: Scheme) -> "Seq2SeqModule":
        return Seq2SeqModule(self, scheme)


def recurrent_state(memory: Memory) -> FixedSize | None:
    """The recurrent state among the declared states of a body."""
    return next((declared for declared in declarations(memory) if isinstance(declared, FixedSize)), None)


class Seq2SeqModule(EncoderDecoderModule):
    def __init__(self, spec: Seq2Seq, scheme: Scheme = "fan_in"):
        super().__init__(spec, scheme)
        # Whether each sublayer of the target is recurrent. Computed here because torch.compile cannot trace specs.
        self.recurrent = tuple(
            tuple(recurrent_state(memory) is not None for memory in block) for block in spec.target.memory()
        )

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
            check_no_first_tokens(layout)
            return self.target(tokens, layout, states, outputs)
        if layout.segments is not None and states is None:
            out = self.forward_documents(source, tokens, source_layout, layout)
            return out if outputs else materialize(out.logits)
        if source_layout is not None and source_layout.segments is not None:
            raise ValueError("the source is packed and the target is not; set the target's segments, or unpack both")
        return super().forward(source, tokens, source_layout, layout, states, outputs)

    def condition(
        self, source: Tensor, source_layout: TokenLayout | None, layout: TokenLayout, states: States | None
    ) -> tuple[TokenLayout, States | None, Losses]:
        final = final_states(self.spec.source.layers)
        encoded, losses = self.source.encode(source, source_layout, states=final)
        return layout.with_source(encoded), self.initial_states(final, states), losses

    def initial_states(self, final: tuple[tuple[FinalState, ...], ...], states: States | None) -> States:
        """The target's states, initialized in order with the source's final states; further layers get the last one."""
        arrays = [state.arrays for state in chain(*final) if state.arrays]
        initial = chain(arrays, repeat(arrays[-1]))
        states = states or tuple(tuple(STATELESS for _ in block) for block in self.recurrent)
        return tuple(
            tuple(
                InitialState(state, next(initial)) if recurrent else state
                for state, recurrent in zip(block, flags, strict=True)
            )
            for block, flags in zip(states, self.recurrent, strict=True)
        )

    def forward_documents(
        self, source: Tensor, tokens: Tensor, source_layout: TokenLayout | None, layout: TokenLayout
    ) -> Outputs:
        """Packed rows: each document is computed in its own row."""
        rows = torch.arange(len(source), device=source.device)
        if source_layout is not None and source_layout.segments is not None:
            sources, source_layout = split_documents(source_layout)
            source, rows = sources.split(source), sources.rows
        targets, document_layout = split_documents(layout)
        if not torch.equal(rows, targets.rows):
            raise ValueError(
                f"the source has {len(rows)} documents, the target {len(targets.rows)}; pack one source document per "
                "target document, in the same row and order"
            )
        out = self(source, targets.split(tokens), source_layout, document_layout, outputs=True)
        return Outputs(
            targets.merge(materialize(out.logits)),
            tuple(targets.merge(materialize(logits)) for logits in out.ahead_logits),
            out.losses,
        )


def check_no_first_tokens(layout: TokenLayout) -> None:
    """Raise ValueError if a row starts without a source, whose final state would be its initial state."""
    first = layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid  # (B, L)
    if first.any():
        rows = first.any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"rows {rows} start here, but there is no source for their initial state; pass it with their first token"
        )


class InitialState:
    """A state that starts from the given arrays instead of zeros."""

    def __init__(self, state: State, arrays: dict[str, Tensor]):
        self.state, self.arrays = state, arrays

    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        return self.state.read(layout, **{name: self.arrays[name].to(array) for name, array in empty.items()})

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        self.state.write(layout, **arrays)

    def read_source(self, layout: TokenLayout, compute) -> tuple:
        return self.state.read_source(layout, compute)


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
    """A model with `layers` recurrent layers per side, of the width of the embeddings."""
    recurrence = recurrence or LSTM()

    def layer(body: Body) -> Block:
        return Block((Sublayer(body, NoNorm()),), keep=0.0, dropout=dropout)

    source_layer, target_layer = layer(Bidirectional(recurrence) if bidirectional else recurrence), layer(recurrence)
    target = (Repeat((target_layer,), layers),)
    if attention == "additive":
        first = layer(AttentionRNN(recurrence, ScoredAttention(source=True)))
        target = (Repeat((first,)), *((Repeat((target_layer,), layers - 1),) if layers > 1 else ()))
    elif attention != "none":
        target = (*target, Repeat((layer(ScoredAttention(score=attention, source=True, combine=True)),)))
    return Seq2Seq(
        Encoder(Tokens(source_vocab or vocab), width, (Repeat((source_layer,), layers),)),
        Decoder(vocab, width, target, norm=NoNorm(), tied=False),
    )
