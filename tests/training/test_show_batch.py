"""A batch is shown with its documents, and marks exactly the tokens that count."""

import numpy as np
import torch

from regard.data.batch import Batch
from regard.data.packing import pack
from regard.text.train import byte
from regard.training.show_batch import describe_batch

TOKENIZER = byte()


def shown(batch: Batch) -> list[str]:
    return [line.plain for line in describe_batch(batch, TOKENIZER, rows=3, colours=False)]


def item(text: str, weights: list[float]) -> dict[str, np.ndarray]:
    ids = np.array(TOKENIZER.encode(text))
    return {"tokens": ids[:-1], "targets": ids[1:], "weights": np.array(weights)}


def test_documents_and_counted_tokens_are_marked() -> None:
    batch = pack([[item("abc", [0, 1]), item("xy", [0.5])], [item("pq", [0])]], length=5)
    assert shown(batch) == [
        "row 0",
        "  document 0, positions 0 to 1: ab⟦c⟧",
        "  document 1, positions 0 to 0: x⟦y⟧",
        "  padding: 2 tokens",
        "row 1",
        "  document 0, positions 0 to 0: pq",
        "  padding: 4 tokens",
        "2 rows, 3 documents, 4 tokens (40% of the batch), 2 count in the loss",
    ]


def test_masked_tokens_are_shown_with_their_targets() -> None:
    a, b, c = TOKENIZER.encode("abc")
    row = {"tokens": np.array([a, c]), "targets": np.array([a, b]), "weights": np.array([0, 1])}
    assert shown(pack([[row]], length=2))[1] == "  document 0, positions 0 to 1: a⟦c→b⟧"


def test_labels_sources_and_images_are_shown() -> None:
    tokens = torch.tensor([TOKENIZER.encode("ab")])
    batch = Batch(tokens=tokens, valid=torch.tensor([[True, False]]), labels=torch.tensor([3]))
    assert shown(batch) == ["row 0", "  tokens: a", "  label: 3", "1 rows"]
    batch = Batch(images=torch.zeros(1, 3, 8, 8), labels=torch.tensor([1]))
    assert shown(batch)[1] == "  image: 3 × 8 × 8"
