"""The held-out examples of a run: each is evaluated once, and few of them are reported."""

import torch

from regard.data.batch import Batch
from regard.objectives.classification import SequenceClassification
from regard.objectives.next_token import NextToken
from regard.training.parallel.mesh import Processes
from regard.training_run import describe_held_out


def describe(objective, *rows: int, length: int = 3) -> str:
    batches = [Batch(tokens=torch.zeros(n, length, dtype=torch.long)) for n in rows]
    return describe_held_out(batches, objective, Processes())


def test_few_held_out_examples_are_reported() -> None:
    labels = SequenceClassification(num_labels=2)
    assert describe(labels, 4).startswith("held out: 4 examples; scores of fewer than 32 examples vary much by chance")
    assert describe(labels, 1).startswith("held out: 1 example;")
    assert describe(labels, 16, 16) == "held out: 32 examples"
    assert describe(labels).endswith("there is no evaluation")
    assert describe(NextToken(), 1, length=999).startswith("held out: 999 tokens; scores of fewer than 1,000 tokens")
    assert describe(NextToken(), 10, length=400) == "held out: 4,000 tokens"
