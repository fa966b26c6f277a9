"""Hybrids: recurrent and attention layers in one model, with two kinds of state in one store."""

from dataclasses import replace

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.mask import Causal
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.pattern import tile
from regard.parts.experts import Experts
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.state import FixedSize, PerToken
from tests.laws import GQA, VOCAB, WIDTH, block, build, random_ids

PATTERN = "2*mamba(4), full + experts(3, 2), mamba2(4, head_dim=8)"
HYBRID = Decoder(VOCAB, WIDTH, tile(block(GQA), PATTERN, 4))


@pytest.mark.ledger("ssm.hybrid")
def test_a_pattern_selects_the_layers_with_attention() -> None:
    mixers = [b.sublayers[0].body for b in HYBRID.blocks]
    assert mixers == [Mamba(4), Mamba(4), replace(GQA, mask=Causal()), Mamba2(4, head_dim=8)]
    assert [isinstance(b.sublayers[1].body, Experts) for b in HYBRID.blocks] == [False, False, True, False]


@pytest.mark.ledger("ssm.hybrid")
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_one_store_keeps_both_kinds_of_state(kind: str) -> None:
    """The store holds keys and values, and states of fixed size; chunked = whole."""
    memory = HYBRID.memory()
    assert [type(block[0]) for block in memory] == [FixedSize, FixedSize, PerToken, FixedSize]
    if kind == "contiguous":
        store = Contiguous(memory, 1, 32, torch.float64)
    else:
        store = Paged(memory, 1, 32, torch.float64, block=4, blocks=8)
    store.reserve(0, 20)
    model, tokens = build(HYBRID), random_ids(1, 20)
    bounds = [0, 7, 8, 9, 20]
    chunks = [
        model(
            tokens[:, start:stop],
            layout := TokenLayout(torch.arange(start, stop).unsqueeze(0)),
            store.begin_forward(layout),
        )
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    assert (torch.cat(chunks, 1) - model(tokens)).abs().max() < 1e-9


@pytest.mark.ledger("ssm.hybrid")
def test_generation_equals_the_argmax_of_whole_forwards() -> None:
    model, tokens = build(HYBRID), random_ids(9).tolist()
    for token in Engine(model, rows=2, capacity=64, store="paged").generate(tokens, Sampling(max_new=8, temperature=0)):
        assert token.id == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token.id)
