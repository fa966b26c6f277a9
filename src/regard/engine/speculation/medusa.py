"""Medusa: heads that were trained on the model's last hidden state propose the draft (models/medusa.py).

    h: the hidden state from which the last token was sampled        d_k ~ head_k(h)

A draft costs one product per head, and no forward of another model. It has at most as many tokens as there are heads.
The heads give several candidates for each token, so drafts can be trees (candidate_chains.py).
Cai et al. 2024.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.engine.request import Draft, Request
from regard.engine.scheduler import ScheduledBatch
from regard.engine.speculation.draw_drafts import draft_chain
from regard.engine.speculation.stream_rows import Streams
from regard.engine.stores.base import SLACK
from regard.models.decoder import DecoderModule
from regard.models.medusa import MedusaHeadsModule
from regard.models.outputs import materialize


class Medusa:
    def __init__(self, heads: MedusaHeadsModule, chains: int = 1):
        """chains: candidate drafts per greedy request."""
        self.heads, self.chains, self.streams = heads.eval(), chains, Streams()
        self.adopt = self.streams.adopt

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        spec, weight = self.heads.spec, next(target.parameters())
        if (spec.vocab, spec.width) != (target.spec.vocab, target.spec.table_dim):
            raise ValueError(
                f"the Medusa heads have vocab={spec.vocab} and width={spec.width}, the model vocab={target.spec.vocab} "
                f"and width={target.spec.table_dim}; use heads that were trained for this model"
            )
        self.target = target
        self.heads.to(weight.device, weight.dtype)

    def read_stream(self, batch: ScheduledBatch, stream: Tensor) -> None:
        self.streams.record(batch, stream, last=SLACK)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        states = {request: x for request in requests if (x := self.streams.last(request)) is not None}
        drafts = {request: Draft([]) for request in requests}
        if states:
            hidden = self.target.final_norm(torch.stack(list(states.values())))  # (B, D)
            logits = torch.stack([materialize(head) for head in self.heads(hidden, self.target)])  # (K, B, V)
            limits = dict(zip(requests, lengths, strict=True))
            lengths = [limits[request] for request in states]
            drafts |= zip(states, draft_chain(logits, list(states), lengths, self.chains), strict=True)
        return list(drafts.values())
