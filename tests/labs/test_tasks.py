"""The targets of a task follow from its inputs, and accuracies count the weighted tokens."""

import torch
from torch import Tensor, nn

from regard.labs.fit import accuracy, exact_match, generator
from regard.labs.mamba_language import exponent
from regard.labs.selective_copying import MEMORISED, SYMBOLS, accuracy_by_age
from regard.labs.tasks import (
    QUERY,
    associative_recall,
    decoder_batch,
    draw_symbols,
    encoder_decoder_batch,
    selective_copying,
)


def test_every_queried_value_follows_its_key() -> None:
    batch = associative_recall(generator(0), pairs=5, rows=8, symbols=16)
    for tokens, targets, weights in zip(batch.tokens, batch.targets, batch.weights, strict=True):
        pairs = dict(zip(tokens[:10:2].tolist(), tokens[1:10:2].tolist(), strict=True))
        queries = weights.nonzero().flatten().tolist()
        assert len(queries) == len(pairs) == 5
        assert all(pairs[int(tokens[i])] == int(targets[i]) for i in queries)


def test_encoder_decoder_and_decoder_batches_have_the_same_targets() -> None:
    source = draw_symbols(generator(0), 8, 4, 6)
    target = source[:, :2]
    seq2seq, decoder_only = encoder_decoder_batch(source, target), decoder_batch(source, target)
    assert torch.equal(seq2seq.source, decoder_only.tokens)
    assert torch.equal(seq2seq.targets[seq2seq.weights > 0], decoder_only.targets[decoder_only.weights > 0])
    assert seq2seq.tokens[:, 0].eq(QUERY).all() and torch.equal(seq2seq.tokens[:, 1:], target[:, :-1])


def test_age_determines_the_symbol_without_filler_and_less_so_with_it() -> None:
    batches = {n: selective_copying(generator(0), MEMORISED, n, 2048, SYMBOLS) for n in (MEMORISED, 5, 8, 64)}
    accuracies = {n: accuracy_by_age(batch, n) for n, batch in batches.items()}
    assert accuracies[MEMORISED] == 1.0
    assert 1.0 > accuracies[5] > accuracies[8] > accuracies[64] > 0.7


def test_linear_and_quadratic_time_have_exponents_1_and_2() -> None:
    assert exponent([(256, 1000.0), (1024, 900.0), (4096, 1000.0)]) == 1.0
    assert exponent([(256, 1600.0), (1024, 400.0), (4096, 100.0)]) == 2.0


class Constant(nn.Module):
    """Predicts the same tokens for every input."""

    def __init__(self, predicted: Tensor):
        super().__init__()
        self.predicted = predicted

    def forward(self, *_: Tensor, layout=None) -> Tensor:
        return nn.functional.one_hot(self.predicted, 10).float()


def test_accuracy_counts_weighted_tokens_and_exact_match_whole_rows() -> None:
    source = torch.tensor([[2, 3, 4], [5, 6, 7]])
    batch = decoder_batch(source, source[:, :2])  # the first token of each row has no weight
    model = Constant(torch.tensor([[9, 2, 3], [9, 5, 9]]))
    assert accuracy(model, batch) == 3 / 4
    assert exact_match(model, batch) == 1 / 2
    assert exact_match(Constant(source[:, :2]), encoder_decoder_batch(source, source[:, :2])) == 1.0
