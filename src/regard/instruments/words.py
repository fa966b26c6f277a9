"""For instruments that need no trained model: words with vectors that depend on their letters alone, and one head."""

import zlib

import torch
from torch import Tensor, nn

from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Mask
from regard.kernels.attention.reference import attend, attention_scores, attention_weights
from regard.layout import TokenLayout
from regard.models.base import initialize
from regard.parts.body import Body

MAX_WORDS = 12


def split_words(text: str, limit: int = MAX_WORDS) -> list[str]:
    words = text.split()
    if not 1 <= len(words) <= limit:
        raise ValueError(f"the text has {len(words)} words; write 1 to {limit}")
    return words


def word_vectors(words: list[str], width: int) -> Tensor:
    """(1, L, width) from N(0, 1); the same word always has the same vector."""
    generators = [torch.Generator().manual_seed(zlib.crc32(word.encode("utf-8", "replace"))) for word in words]
    return torch.stack([torch.randn(width, generator=generator) for generator in generators]).unsqueeze(0)


def seeded(body: Body, width: int, seed: int) -> nn.Module:
    """The module of a body with weights drawn from the seed; the global generator stays unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = body.build(width).eval()
        initialize(module, depth=1)
        return module


def whole(words: list[str]) -> TokenLayout:
    return TokenLayout.whole(1, len(words))


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def one_head(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, weights, output) of one head from matrices q (L, E), k (S, E), v (S, Ev)."""
    layout = TokenLayout(torch.arange(len(q))[None]).with_keys(torch.arange(len(k))[None])
    options = ScoreOptions(mask, scale)
    q, k, v = (x.double()[None, None] for x in (q, k, v))
    results = (
        attention_scores(q, k, layout, options),
        attention_weights(q, k, layout, options),
        attend(q, k, v, layout, options),
    )
    scores, weights, out = (x[0, 0] for x in results)
    return scores, weights, out
