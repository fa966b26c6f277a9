"""What the heads of a model do, measured on random tokens that are repeated once: t₁ … t_n t₁ … t_n.

    previous token    weight on the token before                                    A[i, i-1]
    first token       weight on the first token, of the later half of the queries   A[i, 0]      (an attention sink)
    duplicate token   weight on the earlier occurrence of the same token            A[i, i-n]
    induction         weight on the token after that occurrence                     A[i, i-n+1]  (Olsson et al. 2022)

Random tokens have no other structure, so a head that follows meaning scores near the uniform baseline. For the first
token that baseline is large in short texts: uniform causal attention has a mean of H_n / n over all n queries; in an
encoder, whose queries attend to all n keys, it is 1 / n for every kind. An implied matrix (linear attention, state
spaces) counts by the size of its entries, relative to the sum of their row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.lens.attention_layers import attention_layers
from regard.lens.inputs import length_limit
from regard.lens.maps import attention_maps, relative_weights
from regard.models.encoder import EncoderModule

KINDS = ("previous token", "first token", "duplicate token", "induction")


class HeadScores(NamedTuple):
    """Mean weights of the heads (H,) of each layer, None for a layer without a map, by kind; and those of uniform
    attention, which is causal in a decoder and to all keys in an encoder."""

    scores: dict[str, list[Tensor | None]]
    uniform: dict[str, float]

    def find(self, kind: str, threshold: float = 0.4) -> list[tuple[int, int, float]]:
        """The heads (layer, head, score) of a kind whose score exceeds the threshold, the largest first."""
        if kind not in self.scores:
            raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(map(repr, self.scores))}")
        heads = [
            (layer, head, score)
            for layer, scores in enumerate(self.scores[kind])
            if scores is not None
            for head, score in enumerate(scores.tolist())
            if score > threshold
        ]
        return sorted(heads, key=lambda found: -found[2])


def score_heads(
    model: nn.Module, vocab: int, length: int = 32, sequences: int = 4, seed: int = 0, start: Sequence[int] = ()
) -> HeadScores:
    """Scores of all heads of a decoder or encoder over sequences of twice `length` random tokens.

    vocab: tokens are drawn below this number. start: ids before them, such as the first token that a tokenizer adds.
    ValueError for an encoder-decoder: score the heads of its encoder, `model.source`.
    """
    if not hasattr(model, "stack"):
        raise ValueError(
            f"score_heads needs a decoder or an encoder, not {type(model).__name__}; of an encoder-decoder give its "
            "encoder, model.source"
        )
    if length < 1 or sequences < 1:
        raise ValueError(f"length={length} and sequences={sequences} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    totals: dict[str, list[Tensor | None]] = {}
    for _ in range(sequences):
        drawn = torch.randperm(vocab, generator=generator)[:length]
        if len(drawn) < length:
            raise ValueError(f"length={length} different tokens are needed, and there are {vocab}; choose fewer")
        ids = torch.cat([torch.tensor(list(start), dtype=torch.long), drawn, drawn])
        maps = weight_maps(model, ids)
        for kind, positions in kind_positions(len(start), length).items():
            scores = [None if weights is None else weights[:, *positions].mean(-1) for weights in maps]
            totals[kind] = [add(a, b) for a, b in zip(totals.get(kind, [None] * len(maps)), scores, strict=True)]
    means = {kind: [None if s is None else s / sequences for s in scores] for kind, scores in totals.items()}
    total, causal = len(start) + 2 * length, is_causal(model)
    uniform = {
        kind: float((1.0 / (queries + 1)).mean()) if causal else 1.0 / total
        for kind, (queries, _) in kind_positions(len(start), length).items()
    }
    return HeadScores(means, uniform)


def longest_length(model: Any, vocab: int, start: Sequence[int] = ()) -> int:
    """The largest `length` with which `score_heads` can score this decoder or encoder."""
    limit = length_limit(model.spec)
    return vocab if limit is None else min(vocab, (limit - len(start)) // 2)


def is_causal(model: nn.Module) -> bool:
    """Whether no query attends to later keys, by the masks of its attention, or by the kind of model if it has none."""
    masks = {mixer.causal for layer in attention_layers(model) for mixer in layer.mixers if mixer.heads}
    return False not in masks if masks - {None} else not isinstance(model, EncoderModule)


def weight_maps(model: nn.Module, ids: Tensor) -> list[Tensor | None]:
    """The maps of all layers; where one has implied matrices, relative weights."""
    return [
        relative_weights(weights) if weights is not None and layer.implied else weights
        for weights, layer in zip(attention_maps(model, ids), attention_layers(model), strict=True)
    ]


def kind_positions(start: int, length: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Queries and keys whose weights make the score of each kind."""
    total = start + 2 * length
    every, second = torch.arange(1, total), torch.arange(start + length, total)
    late = torch.arange(total // 2, total)
    return {
        "previous token": (every, every - 1),
        "first token": (late, torch.zeros_like(late)),
        "duplicate token": (second, second - length),
        "induction": (second, second - length + 1),
    }


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None or b is None else a + b
