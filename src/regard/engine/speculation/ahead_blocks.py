"""Self-speculation by the blocks `ahead` of a model, which predict later tokens (multi-token prediction).

    y_k = block_k(x_{n-2})       d_k ~ head(norm(y_k))       k = 1 … K: the token k positions after the next

They were trained with the model (models/decoder.py), so there are no other weights. The blocks have a cache of their
own, which holds computed tokens only: nothing in it is ever rejected. Gloeckle et al. 2024.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.engine.request import Draft, Request
from regard.engine.scheduler import ScheduledBatch
from regard.engine.speculation.draw_drafts import draft_chain
from regard.engine.speculation.stream_rows import StreamRow, StreamRows, Streams
from regard.models.decoder import DecoderModule


class AheadBlocks:
    def __init__(self, chains: int = 1, memory: float | None = None):
        """chains: candidate drafts per greedy request. memory: of its store, as for the engine."""
        self.chains, self.memory, self.streams = chains, memory, Streams()
        self.adopt = self.streams.adopt

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        spec, weight = target.spec, next(target.parameters())
        if not spec.ahead:
            raise ValueError(
                "the model has no blocks `ahead`, which predict later tokens; draft with its first layers (self:N), or "
                "train heads for it: regard speculate train"
            )
        memory = tuple(block.memory(spec.width) for block in spec.ahead)
        self.target, self.rows = target, StreamRows(self.streams, memory, rows, capacity, weight, self.memory)

    def read_stream(self, batch: ScheduledBatch, stream: Tensor) -> None:
        self.streams.record(batch, stream)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        limits, drafts = dict(zip(requests, lengths, strict=True)), {request: Draft([]) for request in requests}
        rows = list(self.rows.prepare(requests, lengths).values())
        for row in rows:
            for length in self.rows.chunks(row):
                self.forward([row], [length])
        if rows:
            logits = self.target.logits(self.target.final_norm(self.forward(rows, [row.own.pending for row in rows])))
            targets = [row.target for row in rows]
            lengths = [limits[request] for request in targets]
            drafts |= zip(targets, draft_chain(logits, targets, lengths, self.chains), strict=True)
        return list(drafts.values())

    def forward(self, rows: Sequence[StreamRow], lengths: Sequence[int]) -> Tensor:
        """Pending tokens of several rows -> the outputs (K, B, D) of the blocks after the last token of each."""
        inputs = [self.rows.pending_stream(row, length) for row, length in zip(rows, lengths, strict=True)]
        _, layout, states, x = self.rows.begin_forward(rows, lengths, inputs)
        layout = self.target.position.share_bias(layout)
        last = (torch.arange(len(rows)), torch.tensor(lengths) - 1)
        blocks = zip(self.target.ahead, states, strict=True)
        outputs = [block(x, layout, state)[0][last] for block, state in blocks]
        for row in rows:
            self.rows.after_reading(row)
        return torch.stack(outputs)
