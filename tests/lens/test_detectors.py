"""Detectors find heads that were built by hand, and none in random models."""

import math

import pytest
import torch

from regard.kernels.attention.mask import Full
from regard.lens import score_heads
from regard.lens.detectors import KINDS, longest_length
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.input import Tokens
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import NoNorm
from regard.parts.position.learned import Learned

VOCAB, LENGTH = 20, 33
TOKEN, POSITION, PREVIOUS = 0, VOCAB, VOCAB + LENGTH  # offsets in the residual stream: each part is one-hot


@pytest.fixture(scope="module")
def planted() -> DecoderModule:
    """Layer 0: previous token (it copies that token into PREVIOUS), first token, duplicate token. Layer 1: induction
    (tokens match PREVIOUS)."""
    attention = Attention(heads=3, head_dim=LENGTH, scale=1.0)
    block = Block((Sublayer(attention, norm=NoNorm()),))
    spec = Decoder(
        vocab=VOCAB, width=PREVIOUS + VOCAB, layers=(Repeat((block,), 2),), position=Learned(LENGTH), norm=NoNorm()
    )
    model = spec.build(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[:, TOKEN:POSITION] = torch.eye(VOCAB)
        model.position.table.weight[:, POSITION:PREVIOUS] = torch.eye(LENGTH)
        first, second = (block.sublayers[0].body for block in model.stack.blocks)
        projections = first.q_proj.weight, first.k_proj.weight, first.v_proj.weight, first.o_proj.weight.T
        q, k, v, o = (weight.view(3, LENGTH, -1) for weight in projections)
        q[0, :, POSITION:PREVIOUS] = 20 * torch.eye(LENGTH)
        k[0, 1:, POSITION : PREVIOUS - 1] = torch.eye(LENGTH - 1)
        v[0, :VOCAB, TOKEN:POSITION] = torch.eye(VOCAB)
        o[0, :VOCAB, PREVIOUS:] = torch.eye(VOCAB)
        q[1, 0, POSITION:PREVIOUS] = 20
        k[1, 0, POSITION] = 1
        q[2, :VOCAB, TOKEN:POSITION] = 20 * torch.eye(VOCAB)
        k[2, :VOCAB, TOKEN:POSITION] = torch.eye(VOCAB)
        q, k = (weight.view(3, LENGTH, -1) for weight in (second.q_proj.weight, second.k_proj.weight))
        q[1, :VOCAB, TOKEN:POSITION] = 20 * torch.eye(VOCAB)
        k[1, :VOCAB, PREVIOUS:] = torch.eye(VOCAB)
    return model


@pytest.mark.parametrize("kind, head", list(zip(KINDS, [(0, 0), (0, 1), (0, 2), (1, 1)], strict=True)))
def test_planted_heads_are_found(planted: DecoderModule, kind: str, head: tuple[int, int]) -> None:
    scores = score_heads(planted, VOCAB, length=16, start=[0])
    found = scores.find(kind)
    assert [(layer, index) for layer, index, _ in found] == [head]
    assert found[0][2] > (0.49 if kind == "duplicate token" else 0.9)  # a token matches itself too


def test_random_models_have_no_such_heads(make_model) -> None:
    block = Block((Sublayer(Attention(heads=4)), Sublayer(LinearAttention(heads=4))))
    model = Decoder(vocab=100, width=32, layers=(Repeat((block,), 3),)).build(seed=0)
    scores = score_heads(model, 100)
    assert not any(scores.find(kind) for kind in KINDS)
    assert all(len(layers) == 3 and layers[0].shape == (8,) for layers in scores.scores.values())
    assert scores.scores["previous token"][0].mean() == pytest.approx(scores.uniform["previous token"], rel=0.5)


@pytest.mark.ledger("lens.sink.baseline")
@pytest.mark.parametrize("n, mean", [(6, 0.41), (7, 0.37), (64, 0.074), (1024, 0.007)])
def test_uniform_attention_gives_the_first_token_a_harmonic_mean(n: int, mean: float) -> None:
    weights = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    assert weights[:, 0].mean() == pytest.approx(sum(1 / i for i in range(1, n + 1)) / n, rel=1e-5)
    assert weights[:, 0].mean().item() == pytest.approx(mean, abs=0.006)


@pytest.mark.ledger("lens.sink.baseline")
def test_the_baseline_of_the_first_token_is_that_of_late_queries() -> None:
    block = Block((Sublayer(Attention(heads=2)),))
    model = Decoder(vocab=50, width=16, layers=(Repeat((block,), 1),)).build(seed=0)
    with torch.no_grad():
        model.stack.blocks[0].sublayers[0].body.q_proj.weight.zero_()  # uniform attention
    scores = score_heads(model, 50, length=20)
    for kind in KINDS:
        assert torch.allclose(scores.scores[kind][0], torch.tensor(scores.uniform[kind]), rtol=1e-4)
    late = [1 / (i + 1) for i in range(20, 40)]
    assert math.isclose(scores.uniform["first token"], sum(late) / len(late), rel_tol=1e-5)


def test_the_baseline_of_an_encoder_is_attention_to_all_keys() -> None:
    block = Block((Sublayer(Attention(heads=2, mask=Full())),))
    model = Encoder(Tokens(50), width=16, layers=(Repeat((block,), 1),)).build(seed=0)
    with torch.no_grad():
        model.stack.blocks[0].sublayers[0].body.q_proj.weight.zero_()
    scores = score_heads(model, 50, length=20, start=[1])
    for kind in KINDS:
        assert scores.uniform[kind] == pytest.approx(1 / 41)
        assert torch.allclose(scores.scores[kind][0], torch.tensor(1 / 41), rtol=1e-4)


def test_the_longest_length_fits_the_positions_and_the_vocabulary(planted: DecoderModule) -> None:
    length = longest_length(planted, VOCAB, start=[0])
    assert length == 16 and score_heads(planted, VOCAB, length, 1, start=[0])
    with pytest.raises(ValueError, match="learned positions"):
        score_heads(planted, VOCAB, length + 1, 1, start=[0])
    assert longest_length(planted, 5) == 5


def test_bad_arguments_are_refused(planted: DecoderModule) -> None:
    with pytest.raises(ValueError, match=r"give its encoder, model\.source"):
        score_heads(transformer_2017(20, 8, 2, 8, 1).build(), 20, length=4)
    with pytest.raises(ValueError, match="sequences=0 must be at least 1"):
        score_heads(planted, VOCAB, length=4, sequences=0)
    with pytest.raises(ValueError, match="choose fewer"):
        score_heads(planted, 3, length=16)
    with pytest.raises(ValueError, match="kind='sink' is unknown"):
        score_heads(planted, VOCAB, length=4, sequences=1).find("sink")
