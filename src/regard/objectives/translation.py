"""Write the target of a source: next-token prediction by a decoder that reads another sequence.

    loss = Σ_t -log p(target_t | target before t, source)          Sutskever et al. 2014

In training the decoder is given the true target, shifted right by one and begun with a start token, whatever it would
have said itself (teacher forcing), so that one pass predicts every token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.classification import padded
from regard.objectives.next_token import LossResult, layout_of, token_loss


def translation(model: nn.Module, batch: Batch) -> LossResult:
    """Needs source and source_valid (B, S), and what next_token needs."""
    out = model(batch.source, batch.tokens, padded(batch.get("source_valid")), layout_of(batch), outputs=True)
    return token_loss(out, batch)


def pairs(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], start: int, end: int) -> Batch:
    """A batch of texts and what they become: read from `start` on, to be written up to `end`."""
    written = [[*target, end] for target in targets]
    source, source_valid = pad(sources)
    tokens, valid = pad([[start, *target] for target in targets])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(
        source=source,
        source_valid=source_valid,
        tokens=tokens,
        targets=pad(written)[0],
        weights=valid.float(),
        positions=positions.where(valid, 0),
        segments=valid.long() - 1,
    )


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of one length, and which of their tokens are there."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return tokens, torch.arange(longest) < lengths.unsqueeze(-1)
