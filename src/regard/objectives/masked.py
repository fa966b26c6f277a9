"""Masked language modelling: predict masked tokens from both sides. Devlin et al. 2018 (BERT).

15 % of the tokens are chosen. Of these 80 % are replaced by [MASK], 10 % by a random token, and 10 % are kept, because
[MASK] does not occur after pretraining. The loss is over the chosen tokens only.
"""

from dataclasses import dataclass

import torch
from torch import nn

from regard.data.batch import Batch
from regard.objectives.base import LossResult, layout_of, token_loss


@dataclass(frozen=True)
class Masking:
    vocab: int
    mask: int  # the token [MASK]
    specials: tuple[int, ...] = ()  # never chosen: [CLS], [SEP], padding …
    share: float = 0.15  # fraction of the tokens that are chosen
    hidden: float = 0.8  # fraction of the chosen tokens that become [MASK]
    random: float = 0.1  # fraction of the chosen tokens that become a random token

    def apply(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Mask a batch of unmasked tokens (with positions and segments), and add its targets and weights."""
        tokens, candidates = batch.tokens, batch.segments >= 0
        candidates &= ~torch.isin(batch.tokens, torch.tensor(self.specials, dtype=tokens.dtype))
        chosen = candidates & (torch.rand(tokens.shape, generator=generator) < self.share)
        u = torch.rand(tokens.shape, generator=generator)
        random = torch.randint(self.vocab, tokens.shape, generator=generator)
        masked = tokens.where(u >= self.hidden + self.random, random).where(u >= self.hidden, self.mask)
        changed = {"tokens": masked.where(chosen, tokens), "targets": tokens, "weights": chosen.float()}
        return Batch(**(dict(batch) | changed))


def masked(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L); for pairs of sequences also types."""
    return token_loss(model(batch.tokens, layout_of(batch), batch.get("types"), outputs=True), batch)
