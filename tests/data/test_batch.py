"""A batch of named tensors."""

import torch

from regard.data.batch import Batch


def test_a_batch_counts_valid_tokens_all_tokens_or_rows() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert Batch(tokens=tokens, segments=torch.tensor([[0, 0, -1], [0, 1, 1]])).token_count == 5
    assert Batch(tokens=tokens, labels=torch.zeros(2)).token_count == 6
    assert Batch(images=torch.zeros(4, 3, 8, 8), labels=torch.zeros(4)).token_count == 4
