"""Masked language modelling: hide some tokens and guess them from both sides. Devlin et al. 2018.

Of the tokens 15 % are chosen. Of these 80 % become [MASK], 10 % a random token, and 10 % stay: [MASK] never occurs in
use, so a model must not learn that only it is to be predicted. The loss is over the chosen ones alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.next_token import LossResult, layout_of, token_loss


@dataclass(frozen=True)
class Masking:
    vocab: int
    mask: int  # the token [MASK]
    specials: tuple[int, ...] = ()  # never chosen: [CLS], [SEP], padding …
    share: float = 0.15
    hidden: float = 0.8  # of the chosen
    random: float = 0.1

    def apply(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A batch of whole texts (tokens, positions, segments; more may be there) with targets and weights for them."""
        tokens, free = batch.tokens, batch.segments >= 0
        free &= ~torch.isin(batch.tokens, torch.tensor(self.specials, dtype=tokens.dtype))
        chosen = free & (draw(tokens, generator) < self.share)
        fate = draw(tokens, generator)
        other = torch.randint(self.vocab, tokens.shape, generator=generator)
        shown = tokens.where(fate >= self.hidden + self.random, other).where(fate >= self.hidden, self.mask)
        changed = {"tokens": shown.where(chosen, tokens), "targets": tokens, "weights": chosen.float()}
        return Batch(**(dict(batch) | changed))


def draw(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator)


def masked(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L); of pairs, types."""
    return token_loss(model(batch.tokens, layout_of(batch), batch.get("types"), outputs=True), batch)
