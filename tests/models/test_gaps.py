"""Padding inside a document: recurrences skip it and keep their state."""

import pytest
import torch

from regard.layout import TokenLayout
from tests.laws import MODELS, build, error, random_ids

RECURRENT = [
    name for name in MODELS
    if name.startswith(("linear", "performer", "retention", "gated", "rwkv", "mamba", "s4", "rnn", "lstm", "short"))
]  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
def test_documents_continue_after_padding(name):
    model = build(MODELS[name])
    first, second = random_ids(5, seed=1), random_ids(4, seed=2)
    tokens = torch.cat(
        [first[:2], random_ids(1), first[2:], random_ids(1), second[:1], random_ids(2), second[1:]]
    ).unsqueeze(0)
    segments = torch.tensor([[7, 7, -1, 7, 7, 7, -1, 3, -1, -1, 3, 3, 3]])
    positions = torch.tensor([[0, 1, 0, 2, 3, 4, 0, 0, 0, 0, 1, 2, 3]])
    packed = model(tokens, TokenLayout(positions, segments, valid=segments >= 0))[0]
    for document, segment in ((first, 7), (second, 3)):
        assert error(packed[segments[0] == segment], model(document.unsqueeze(0))[0]) < 1e-9


@pytest.mark.parametrize("name", RECURRENT)
def test_an_empty_batch_has_empty_logits(name):
    tokens = torch.zeros(0, 3, dtype=torch.int64)
    assert build(MODELS[name])(tokens).shape == (0, 3, MODELS[name].vocab)
