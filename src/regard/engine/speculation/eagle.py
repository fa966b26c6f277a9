"""EAGLE: a draft layer on the model's own hidden states generates the draft (models/eagle.py).

    f̂_{n-1} = layer(f_{n-2}, t_{n-1})      d_1 ~ U f̂_{n-1}      f̂_n = layer(f̂_{n-1}, d_1)      d_2 ~ U f̂_n      …

A draft of k tokens costs k forwards of one layer and of the model's head. The layer has a cache of its own, with one
entry per token. Its entries of a draft are replaced by those of the accepted tokens, with the hidden states that the
model has computed for them. Other candidates leave the draft with their last token: the layer does not continue them.
Li et al. 2024.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.engine.request import Draft, Request
from regard.engine.scheduler import ScheduledBatch
from regard.engine.speculation.candidate_chains import Candidates, likeliest, other_chains
from regard.engine.speculation.draw_drafts import DrawnToken, as_draft, draw_drafts
from regard.engine.speculation.stream_rows import StreamRow, StreamRows, Streams
from regard.models.decoder import DecoderModule
from regard.models.eagle import EagleLayerModule


class Eagle:
    def __init__(self, layer: EagleLayerModule, chains: int = 1, memory: float | None = None):
        """chains: candidate drafts per greedy request. memory: of its store, as for the engine."""
        self.layer, self.chains, self.memory, self.streams = layer.eval(), chains, memory, Streams()
        self.adopt = self.streams.adopt

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        spec, weight = target.spec, next(target.parameters())
        if self.layer.spec.width != spec.width or spec.table_dim != spec.width:
            raise ValueError(
                f"the draft layer of EAGLE has width={self.layer.spec.width}, and the hidden states of the model "
                f"{spec.table_dim}; use a layer that was trained for this model"
            )
        self.target = target
        self.layer.to(weight.device, weight.dtype)
        self.rows = StreamRows(self.streams, self.layer.spec.memory(), rows, capacity, weight, self.memory)

    def read_stream(self, batch: ScheduledBatch, stream: Tensor) -> None:
        self.streams.record(batch, stream)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        limits = dict(zip(requests, lengths, strict=True))
        rows = self.rows.prepare(requests, lengths)
        drafts: dict[Request, list[DrawnToken]] = {request: [] for request in requests}
        candidates: dict[Request, list[Candidates]] = {request: [] for request in requests}
        for row in rows.values():
            for length in self.rows.chunks(row):
                self.forward([row], [length], [self.features(row, length)])
        sizes = {row: len(row.own.tokens) for row in rows.values()}
        active, features = self.forward_tokens(list(rows.values()))
        for i in range(max(limits.values(), default=0)):
            if not active:
                break
            logits = self.target.logits(features)
            tokens = draw_drafts(logits, [row.target for row in active], i)
            for row, likely in zip(active, likeliest(logits, self.chains) if self.chains > 1 else (), strict=False):
                candidates[row.target].append(likely)
            kept = []
            for b, (row, token) in enumerate(zip(active, tokens, strict=True)):
                if token is not None:
                    drafts[row.target].append(token)
                    row.own.tokens.append(token.id)
                    kept += [b] if i + 1 < limits[row.target] else []
            active = [active[b] for b in kept]
            if active:
                features = self.forward(active, [1] * len(active), [features[b : b + 1] for b in kept])
        for row, size in sizes.items():
            self.rows.truncate(row, size)
        return [self.as_draft(request, tokens, candidates[request]) for request, tokens in drafts.items()]

    def as_draft(self, request: Request, tokens: list[DrawnToken], candidates: list[Candidates]) -> Draft:
        draft = as_draft(tokens)
        if request.sampling.temperature == 0:
            draft.others = other_chains(candidates, self.chains - 1, independent=False)
        return draft

    def forward_tokens(self, rows: list[StreamRow]) -> tuple[list[StreamRow], Tensor]:
        """Compute the pending entries of accepted tokens; returns the predicted hidden states (B, D) after the last."""
        if not rows:
            return rows, torch.empty(0)
        lengths = [row.own.pending for row in rows]
        features = self.forward(rows, lengths, [self.features(row, n) for row, n in zip(rows, lengths, strict=True)])
        for row in rows:
            self.rows.after_reading(row)
        return rows, features

    def features(self, row: StreamRow, count: int) -> Tensor:
        return self.target.final_norm(self.rows.pending_stream(row, count))  # (count, D)

    def forward(self, rows: Sequence[StreamRow], lengths: Sequence[int], features: Sequence[Tensor]) -> Tensor:
        """Entries of several rows -> the hidden states (B, D) that are predicted after the last entry of each."""
        tokens, layout, states, x = self.rows.begin_forward(rows, lengths, features)
        out = self.layer(x, self.target.embed(tokens), layout, states)  # (B, L, D)
        return out[torch.arange(len(rows)), torch.tensor(lengths) - 1]
