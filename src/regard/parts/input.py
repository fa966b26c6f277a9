"""What stands at the foot of an encoder: it turns what the model is given into one vector a token.

    Tokens(t) = E[t] · scale (+ T[type])          BERT's types tell the two texts of a pair apart; 2017 scales by √D

Looking up row t is multiplying the one-hot vector of t with the table, so ids are labels and nothing more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.spec import Spec, require


@dataclass(frozen=True)
class Input(Spec):
    @property
    def length(self) -> int | None:
        """How many tokens it makes; None: as many as it is given."""
        return None

    def build(self, width: int) -> nn.Module:
        """A module of (data, types): what is given, and the type of each token or None."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tokens(Input):
    vocab: int
    types: int = 0
    scale: float = 1.0

    def check(self) -> None:
        require(self.vocab > 0, f"tokens: vocab={self.vocab} must be positive")
        require(self.types >= 0, f"tokens: types={self.types} must not be negative")

    def build(self, width: int) -> nn.Module:
        return TokensModule(width, self)


class TokensModule(nn.Module):
    def __init__(self, width: int, spec: Tokens):
        super().__init__()
        self.table = nn.Embedding(spec.vocab, width)
        self.types = nn.Embedding(spec.types, width) if spec.types else None
        self.scale = spec.scale

    def forward(self, tokens: Tensor, types: Tensor | None = None) -> Tensor:
        check_ids("token", tokens, self.table.num_embeddings)
        x = self.table(tokens) * self.scale  # (B, L, D)
        if self.types is None:
            if types is not None:
                raise ValueError("types were given, but this model knows none; leave them out, or set Tokens.types")
            return x
        types = torch.zeros_like(tokens) if types is None else types
        check_ids("type", types, self.types.num_embeddings)
        return x + self.types(types)


def check_ids(what: str, ids: Tensor, known: int) -> None:
    """Elsewhere the question would wait for the device; its own look-up refuses too, if less clearly."""
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= known:
            raise ValueError(f"{what} {low if low < 0 else high} is none of the {known} known: 0 to {known - 1}")
