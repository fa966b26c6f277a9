"""Batches of pairs in words, and how steps of several tokens use experts."""

import math

import torch

from regard.labs.expert_batches import step_usage
from regard.labs.experts import COUNT, effective
from regard.labs.world_pairs import END, START, concatenated, read_passages, to_ids


def test_a_decoder_predicts_the_target_and_its_end_after_the_source():
    batch = concatenated([([5, 6], [7]), ([8], [9, 5, 6])])
    assert batch.tokens.tolist() == [[5, 6, START, 7, 0], [8, START, 9, 5, 6]]
    assert batch.targets.tolist() == [[6, START, 7, END, 0], [START, 9, 5, 6, END]]
    assert batch.weights.tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, -1], [0, 0, 0, 0, 0]]
    assert concatenated([([5, 6], [7])], weigh_source=True).weights.tolist() == [[1, 1, 1, 1]]


def test_held_out_passages_are_no_training_passages_and_have_known_words_only():
    train, held_out = (read_passages(split, 60) for split in ("train", "held-out"))
    for task, pairs in train.items():
        assert len({" ".join(source) + "=" + " ".join(target) for source, target in pairs}) == len(pairs)
        assert not any(pair in held_out[task] for pair in pairs if task != "continuation")
    encoded, known, vocab = to_ids(train["translation"], held_out["translation"])
    assert len(encoded) == len(train["translation"]) and 0 < len(known) < len(held_out["translation"])
    assert max(word for pair in known for side in pair for word in side) < vocab


def test_a_step_needs_the_experts_of_its_tokens():
    chosen = torch.tensor([[[0, 1]], [[0, 2]], [[3, 4]], [[3, 4]]]).unsqueeze(0)  # one layer, 4 rows of one token
    assert step_usage(chosen, 1) == (2, COUNT / 2)
    assert step_usage(chosen, 2) == (2.5, 2 * COUNT / 4)
    assert step_usage(chosen, 4) == (5, 2 * COUNT / 8)


def test_the_effective_number_of_experts_is_that_of_even_shares():
    even, one = torch.full((COUNT,), 1 / COUNT), torch.eye(COUNT)[0]
    assert math.isclose(effective(torch.stack([even, one])), (COUNT + 1) / 2, rel_tol=1e-6)
