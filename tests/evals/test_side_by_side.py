"""Two models on the same text: losses and agreement against one forward over each row."""

import math

import pytest
import torch

from regard.evals.side_by_side import ComparedModel, fixed_rows, read_both, same_tokens
from regard.models.decoder import DecoderModule
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope
from regard.text.train import bpe, byte
from tests.laws import block, decoder
from tests.laws import build as build_randomized

TEXT = "Anna is in the barn. Ben is in the kitchen, and Clara?\n" * 3
BYTES = byte()


def build(seed: int, vocab: int = BYTES.vocab_size) -> DecoderModule:
    from dataclasses import replace

    from regard.verification.trial import randomize_weights

    model = build_randomized(replace(decoder(block(Attention(4, 2, position=Rope()))), vocab=vocab))
    randomize_weights(model, seed=seed)
    return model


@pytest.mark.parametrize("length", [7, 64, 1000])
def test_losses_and_agreement_equal_those_of_whole_rows(length: int) -> None:
    first, second = build(1), build(2)
    rows = fixed_rows(BYTES, TEXT, length)
    seen: list[int] = []
    pair = ComparedModel(first, BYTES), ComparedModel(second, BYTES)
    *losses, agreement = read_both(*pair, (rows, rows), seen.append)
    assert agreement is not None and seen[-1] == 2 * len(rows)
    ids, nats, equal, kl, tokens = BYTES.encode(TEXT), [0.0, 0.0], 0, 0.0, 0
    for start in range(0, len(ids), length):
        row = torch.tensor([ids[start : start + length]])
        p, q = (model(row[:, :-1])[0].log_softmax(-1) for model in (first, second))
        for i, token in enumerate(row[0, 1:].tolist()):
            nats = [nats[0] - p[i, token].item(), nats[1] - q[i, token].item()]
            equal += int(p[i].argmax() == q[i].argmax())
            kl += sum(math.exp(a) * (a - b) for a, b in zip(p[i].tolist(), q[i].tolist(), strict=True))
            tokens += 1
    assert [loss.nats for loss in losses] == pytest.approx(nats, rel=1e-9)
    assert all(loss.tokens == loss.bytes == tokens for loss in losses)  # a token is a byte
    assert losses[0].perplexity == pytest.approx(math.exp(nats[0] / tokens))
    assert agreement.share == equal / tokens and agreement.divergence == pytest.approx(kl / tokens, rel=1e-9)


def test_a_model_agrees_with_itself_and_a_smaller_cache_nearly() -> None:
    model, rows = build(1), fixed_rows(BYTES, TEXT, 90)
    plain = ComparedModel(model, BYTES)
    *_, itself = read_both(plain, plain, (rows, rows))
    assert itself is not None and (itself.share, itself.divergence) == (1.0, 0.0)
    for cache, least, most in (("int8", 1e-12, 0.1), ("h2o:8", 1e-3, 10.0), ("snapkv:8", 1e-3, 10.0)):
        *losses, found = read_both(plain, ComparedModel(model, BYTES, cache), (rows, rows))
        assert found is not None and least < found.divergence < most, cache
        assert losses[0].tokens == losses[1].tokens


def test_models_with_other_tokenizers_are_compared_per_byte() -> None:
    pairs = bpe([TEXT], 300)
    first, second = ComparedModel(build(1), BYTES), ComparedModel(build(2, pairs.vocab_size), pairs)
    rows = fixed_rows(BYTES, TEXT, 40), fixed_rows(pairs, TEXT, 40)
    one, other, agreement = read_both(first, second, rows)
    assert agreement is None and not same_tokens(BYTES, pairs)
    assert other.tokens < one.tokens and other.bytes > other.tokens
    assert other.perplexity_per_byte == pytest.approx(math.exp(other.nats / other.bytes))


def test_bytes_are_those_of_the_predicted_tokens() -> None:
    text = TEXT.replace("Anna", "Ännchen")
    rows = fixed_rows(bpe([text], 300), text, 50)
    assert len(rows) == 1 and rows[0].first == 1
    first = bpe([text], 300).decode(rows[0].ids[:1])
    assert rows[0].bytes == len(text.encode()) - len(first.encode())  # the first token is not predicted
    assert sum(row.bytes for row in fixed_rows(BYTES, TEXT, 50)) == len(TEXT) - 4
    assert fixed_rows(BYTES, "a", 50) == []
