"""The input of an encoder: it embeds token ids, an image or a signal as one vector per token.

Tokens(t) = E[t] · scale (+ T[type])          T: token types, as in BERT; scale: √D in Vaswani et al.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.spec import Spec, require

TOKEN_REMEDY = "encode with this model's tokenizer, or enlarge the vocabulary"


@dataclass(frozen=True)
class Input(Spec):
    @property
    def length(self) -> int | None:
        """Number of tokens in the output; None: one per token of the input."""
        return None

    def build(self, width: int) -> nn.Module:
        """A module with forward(data, types): the input, and the type of each token or None."""
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
        check_batched(tokens)
        check_ids("token", tokens, self.table.num_embeddings, TOKEN_REMEDY)
        x = self.table(tokens) * self.scale  # (B, L, D)
        if self.types is None:
            if types is not None:
                raise ValueError(
                    "types were given, but this model has no type embeddings; leave them out, or set Tokens.types"
                )
            return x
        types = torch.zeros_like(tokens) if types is None else types
        check_ids("type", types, self.types.num_embeddings, "give each token one of these ids, or enlarge Tokens.types")
        return x + self.types(types)


def check_ids(name: str, ids: Tensor, count: int, remedy: str) -> None:
    """Raise ValueError if an id is not in 0 … count - 1; only on the CPU, where it needs no synchronization."""
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} id {wrong} is outside 0 … {count - 1}; {remedy}")


def whole_layout(tokens: Tensor) -> TokenLayout:
    """The layout of tokens (B, L) without padding."""
    check_batched(tokens)
    return TokenLayout.whole(*tokens.shape, tokens.device)


def check_batched(tokens: Tensor) -> None:
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}, but a model takes (batch, length); "
            "for one sequence use tokens.unsqueeze(0)"
        )
