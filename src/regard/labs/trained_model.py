"""The trained model for labs that look inside one: SmolLM2.

    model, encode = load_trained(bench)             # encode: a text -> ids
    model, ids = read_stories(bench, 8, 96)         # ids (8, 96) of stories of the small world
    model, ids = read_manual(bench, 8, 96)          # ids (8, 96) of the Python manual: English and code

At the size `quick`, which tests that a lab runs, the model is small and has random weights, and a word is one id.
"""

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from regard.checkpoint import load
from regard.data.sources.files import Pydoc
from regard.data.world import stories
from regard.labs.experiment import Bench
from regard.labs.small_models import small_decoder
from regard.models.decoder import DecoderModule
from regard.text.tokenizer import Tokenizer

TRAINED = "smollm2"
RANDOM_VOCAB = 100  # of the random model
EncodeText = Callable[[str], list[int]]


def load_trained(bench: Bench) -> tuple[DecoderModule, EncodeText]:
    if bench.size == "quick":
        torch.manual_seed(bench.seed)
        return small_decoder("attention", RANDOM_VOCAB, 32).eval(), encode_words
    model = load(TRAINED)
    assert isinstance(model, DecoderModule)
    return model, Tokenizer.load(TRAINED).encode


def encode_words(text: str) -> list[int]:
    return [sum(word.encode()) % RANDOM_VOCAB for word in text.split()]


def read_stories(bench: Bench, rows: int, length: int) -> tuple[DecoderModule, Tensor]:
    """The model, and ids (rows, length) of stories, one per row."""
    model, encode = load_trained(bench)
    found: list[list[int]] = []
    for story in islice(stories(4, "train", bench.seed << 20), 50 * rows):
        ids = encode(story.text)
        if len(ids) >= length:
            found.append(ids[:length])
        if len(found) == rows:
            break
    assert len(found) == rows, f"too few stories have {length} tokens"
    return model, torch.tensor(found)


def read_manual(bench: Bench, rows: int, length: int) -> tuple[DecoderModule, Tensor]:
    """The model, and ids (rows, length) of the Python manual, whose sections are in another order for each seed."""
    model, encode = load_trained(bench)
    sections, _ = Pydoc().open(bench.seed)
    found: list[int] = []
    index = 0
    while len(found) < rows * length:
        found += encode(sections.example(index)["text"])
        index += 1
    return model, torch.tensor(found[: rows * length]).view(rows, length)
