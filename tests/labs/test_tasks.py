"""Tasks can be solved from what they tell, and accuracies count what counts."""

import torch
from torch import Tensor, nn

from regard.labs.fit import accuracy, exact, generator
from regard.labs.mamba_language import power
from regard.labs.selective_copying import MEMORISED, SYMBOLS, told_by_age
from regard.labs.tasks import ASK, associative_recall, draw, of_source, selective_copying, while_reading


def test_every_value_asked_for_was_told_after_its_key() -> None:
    batch = associative_recall(generator(0), pairs=5, rows=8, symbols=16)
    for tokens, targets, weights in zip(batch.tokens, batch.targets, batch.weights, strict=True):
        told = dict(zip(tokens[:10:2].tolist(), tokens[1:10:2].tolist(), strict=True))
        asked = weights.nonzero().flatten().tolist()
        assert len(asked) == len(told) == 5
        assert all(told[int(tokens[place])] == int(targets[place]) for place in asked)


def test_a_task_in_both_forms_wants_the_same_said() -> None:
    source = draw(generator(0), 8, 4, 6)
    target = source[:, :2]
    first, beside = of_source(source, target), while_reading(source, target)
    assert torch.equal(first.source, beside.tokens)
    assert torch.equal(first.targets[first.weights > 0], beside.targets[beside.weights > 0])
    assert first.tokens[:, 0].eq(ASK).all() and torch.equal(first.tokens[:, 1:], target[:, :-1])


def test_age_tells_all_without_filler_and_not_much_with_it() -> None:
    told = {
        n: told_by_age(selective_copying(generator(0), MEMORISED, n, 2048, SYMBOLS), n) for n in (MEMORISED, 5, 8, 64)
    }
    assert told[MEMORISED] == 1.0
    assert 1.0 > told[5] > told[8] > told[64] > 0.7


def test_linear_and_quadratic_time_are_powers_1_and_2() -> None:
    assert power([(256, 1000.0), (1024, 900.0), (4096, 1000.0)]) == 1.0
    assert power([(256, 1600.0), (1024, 400.0), (4096, 100.0)]) == 2.0


class Says(nn.Module):
    """Says what it was given, whatever it reads."""

    def __init__(self, said: Tensor):
        super().__init__()
        self.said = said

    def forward(self, *_: Tensor, layout=None) -> Tensor:
        return nn.functional.one_hot(self.said, 10).float()


def test_accuracies_are_of_counted_tokens_and_of_whole_rows() -> None:
    source = torch.tensor([[2, 3, 4], [5, 6, 7]])
    batch = while_reading(source, source[:, :2])  # the first token of each row does not count
    said = Says(torch.tensor([[9, 2, 3], [9, 5, 9]]))
    assert accuracy(said, batch) == 3 / 4
    assert exact(said, batch) == 1 / 2
    assert exact(Says(source[:, :2]), of_source(source, source[:, :2])) == 1.0
