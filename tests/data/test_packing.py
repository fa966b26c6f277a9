"""Packing laws: every pair of neighbours once, nothing across documents, padding silent, little waste."""

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from regard.data.batch import Batch
from regard.data.packing import PADDING, DocumentSlice, choose, collate, cut, tokenize
from regard.data.sources import Span
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte

documents = st.lists(st.lists(st.integers(1, 99), min_size=0, max_size=30), min_size=1, max_size=8)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 99), max_size=50), length=st.integers(1, 12))
def test_cut_keeps_every_pair_once_in_order(ids, length):
    pieces = cut(DocumentSlice(ids, [float(id) for id in ids]), length)
    pairs = [pair for piece in pieces for pair in zip(piece.ids[:-1], piece.ids[1:], strict=True)]
    assert pairs == list(zip(ids[:-1], ids[1:], strict=True))
    assert all(1 <= len(piece) <= length for piece in pieces)
    assert all(list(piece.ids) == list(piece.weights) for piece in pieces)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_choose_fits_takes_the_oldest_and_leaves_nothing_that_fits(lengths):
    chosen = choose(lengths, 20)
    room = 20 - sum(lengths[index] for index in chosen)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    assert room >= 0
    assert all(lengths[index] > room for index in range(len(lengths)) if index not in chosen)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(rows=st.lists(documents, min_size=1, max_size=4))
def test_rows_hold_their_documents_and_nothing_else(rows):
    length = 240
    pieces = [[DocumentSlice(ids, [id / 100 for id in ids]) for ids in row if len(ids) > 1] for row in rows]
    batch = collate(pieces, length, pad=0)
    assert batch.fields == ("tokens", "targets", "weights", "positions", "segments")
    assert all(tensor.shape == (len(rows), length) for tensor in batch.values())
    for row, expected in enumerate(pieces):
        for segment, piece in enumerate(expected):
            here = batch.segments[row] == segment
            assert batch.tokens[row][here].tolist() == list(piece.ids[:-1])
            assert batch.targets[row][here].tolist() == list(piece.ids[1:])
            assert batch.positions[row][here].tolist() == list(range(len(piece)))
            torch.testing.assert_close(batch.weights[row][here], torch.tensor(piece.weights[1:]))
        padding = batch.segments[row] == PADDING
        assert padding.sum() == length - sum(map(len, expected))
        assert not batch.weights[row][padding].any()


def test_a_token_weighs_what_its_span_weighs():
    tokenizer = byte()
    piece = tokenize((Span("ab", 0.5), Span("<|end|>", 2.0, marker=True), Span("<|", 0.0)), tokenizer)
    assert piece.ids == [*tokenizer.encode("ab"), tokenizer.eos, *tokenizer.encode("<|")]
    assert piece.weights == [0.5, 0.5, 2.0, 0.0, 0.0]


def test_a_marker_is_one_token_or_an_error():
    words = tokenizers.Tokenizer(models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
    foreign = Tokenizer(words, eos="</s>")
    assert tokenize((Span("a"), Span("<|end|>", marker=True)), foreign).ids == [1, 2]
    with pytest.raises(ValueError, match="marker <|user|>, which is no token"):
        tokenize((Span("<|user|>", marker=True), Span("a")), foreign)


def test_batch_is_frozen_and_moves_whole():
    batch = Batch(tokens=torch.zeros(2, 3, dtype=torch.long), weights=torch.ones(2, 3))
    assert batch.to("cpu").fields == ("tokens", "weights")
    assert batch.rows(slice(1, 2)).tokens.shape == (1, 3)
    assert "weights" in batch
    with pytest.raises(AttributeError, match="frozen"):
        batch.tokens = batch.weights
    with pytest.raises(AttributeError, match="'labels'; it has tokens, weights"):
        _ = batch.labels
    with pytest.raises(ValueError, match="same number of rows"):
        Batch(tokens=torch.zeros(2, 3), weights=torch.ones(3, 3))
