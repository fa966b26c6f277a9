"""Packing: every pair of consecutive tokens occurs once, documents stay separate, and padding has no weight."""

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from regard.data.batch import Batch
from regard.data.packing import PADDING_SEGMENT, best_fit, pack, pad_items
from regard.data.spans import Span, tokenize_spans
from regard.objectives.next_token import NextToken
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte

documents = st.lists(st.lists(st.integers(1, 99), min_size=0, max_size=30), min_size=1, max_size=8)


def item(ids):
    ids = np.array(ids)
    return {"tokens": ids[:-1], "targets": ids[1:], "weights": ids[1:] / 100}


@given(ids=st.lists(st.integers(1, 99), max_size=50), length=st.integers(1, 12))
def test_slices_keep_every_pair_once_in_order(ids, length):
    columns = {"ids": np.array(ids, int), "weights": np.array(ids, float)}
    items = NextToken().sample(columns, byte(), length, np.random.default_rng(0))
    pairs = [pair for item in items for pair in zip(item["tokens"], item["targets"], strict=True)]
    assert pairs == list(zip(ids[:-1], ids[1:], strict=True))
    assert all(1 <= len(item["tokens"]) <= length for item in items)
    assert all(item["targets"].tolist() == item["weights"].tolist() for item in items)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_best_fit_takes_the_oldest_and_leaves_none_that_fits(lengths):
    indices = best_fit(lengths, 20)
    free = 20 - sum(lengths[index] for index in indices)
    assert indices[0] == 0
    assert len(set(indices)) == len(indices)
    assert free >= 0
    assert all(lengths[index] > free for index in range(len(lengths)) if index not in indices)


@given(rows=st.lists(documents, min_size=1, max_size=4))
def test_rows_hold_their_documents_and_padding(rows):
    length = 240
    packed = [[item(ids) for ids in row if len(ids) > 1] or [item([1, 2])] for row in rows]
    batch = pack(packed, length, pad=0)
    assert batch.fields == ("tokens", "targets", "weights", "positions", "segments")
    assert all(tensor.shape == (len(rows), length) for tensor in batch.values())
    for row, expected in enumerate(packed):
        for segment, found in enumerate(expected):
            in_segment = batch.segments[row] == segment
            assert batch.tokens[row][in_segment].tolist() == found["tokens"].tolist()
            assert batch.targets[row][in_segment].tolist() == found["targets"].tolist()
            assert batch.positions[row][in_segment].tolist() == list(range(len(found["tokens"])))
            torch.testing.assert_close(batch.weights[row][in_segment], torch.tensor(found["weights"]).float())
        padding = batch.segments[row] == PADDING_SEGMENT
        assert padding.sum() == length - sum(len(found["tokens"]) for found in expected)
        assert not batch.weights[row][padding].any()


def test_tokens_have_the_weight_of_their_span():
    tokenizer = byte()
    columns = tokenize_spans((Span("ab", 0.5), Span("<|end|>", 2.0, special=True), Span("<|", 0.0)), tokenizer)
    assert columns["ids"].tolist() == [*tokenizer.encode("ab"), tokenizer.eos, *tokenizer.encode("<|")]
    assert columns["weights"].tolist() == [0.5, 0.5, 2.0, 0.0, 0.0]


def test_a_special_token_is_one_id_or_an_error():
    word_level = tokenizers.Tokenizer(models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
    tokenizer = Tokenizer(word_level, eos="</s>")
    assert tokenize_spans((Span("a"), Span("<|end|>", special=True)), tokenizer)["ids"].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"the special token <\|user\|>, which is not in this"):
        tokenize_spans((Span("<|user|>", special=True), Span("a")), tokenizer)


def test_items_are_padded_on_the_right():
    padded, valid = pad_items([{"x": np.array([1, 2, 3])}, {"x": np.array([4])}], "x", pad=9)
    assert padded.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert valid.tolist() == [[True] * 3, [True, False, False]]


def test_a_batch_is_immutable():
    batch = Batch(tokens=torch.zeros(2, 3, dtype=torch.long), weights=torch.ones(2, 3))
    assert batch.to("cpu").fields == ("tokens", "weights")
    assert batch.rows(slice(1, 2)).tokens.shape == (1, 3)
    assert "weights" in batch
    with pytest.raises(AttributeError, match="immutable"):
        batch.tokens = batch.weights
    with pytest.raises(AttributeError, match="'labels'; it has tokens, weights"):
        _ = batch.labels
    with pytest.raises(ValueError, match="same number of rows"):
        Batch(tokens=torch.zeros(2, 3), weights=torch.ones(3, 3))
