"""Words and vectors for instruments that need no trained model: the vector of a word depends on its letters alone."""

import zlib

import torch
from torch import Tensor, nn

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
