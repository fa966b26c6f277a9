"""One AdamW step of sentence embeddings and of cross-encoders equals that of sentence-transformers.

Its models read the folder of `transformers`, tokenize the same texts and compute their own losses. Both are in float64.
The library is imported in the tests, because that takes seconds, which collecting the tests need not wait for.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, BertModel

from regard.checkpoint.model_folder import load
from regard.models.heads import Pooled
from regard.objectives.base import Objective
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.scores import Regression, Relevance
from tests.objectives.test_one_step_labels import BERT, LENGTH, TEXTS, THEIRS, assert_same_step, batch_of, pair_of

FIRSTS, SECONDS, HARD, HARDER = TEXTS, ["red " + t for t in TEXTS], [t + " dog" for t in TEXTS[::-1]], TEXTS[1:] + ["a"]


@pytest.mark.parametrize("symmetric", [False, True], ids=["", "symmetric"])
@pytest.mark.parametrize("negatives", [(), (HARD,), (HARD, HARDER)], ids=["in-batch", "1 hard", "2 hard"])
def test_sentence_embeddings(tmp_path: Path, negatives: tuple[list[str], ...], symmetric: bool) -> None:
    """Multiple negatives ranking loss: scaled cosines of means of the last hidden states."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    columns = (FIRSTS, SECONDS, *negatives)
    examples = [{"anchor": a, "positive": p, "negatives": n} for a, p, *n in zip(*columns, strict=True)]
    pair_of(BertModel(BertConfig(**BERT), add_pooling_layer=False), tmp_path)
    base = load(tmp_path, dtype=torch.float64)
    ours = replace(base.spec, head=Pooled("mean")).build(0).double()
    ours.load_state_dict({name: t for name, t in base.state_dict().items() if not name.startswith("head.")})

    THEIRS.save_pretrained(tmp_path)
    theirs = (
        SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"add_pooling_layer": False}).double().train()
    )
    theirs.max_seq_length = LENGTH
    directions = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    ranking = MultipleNegativesRankingLoss(theirs, scale=7.0, **(directions if symmetric else {}))

    def loss() -> Tensor:
        return ranking([theirs.preprocess(texts) for texts in columns], labels=None)

    objective = SentenceEmbeddings(scale=7.0, symmetric=symmetric)
    assert_same_step(ours, theirs[0].model, objective, batch_of(objective, examples), loss, tmp_path)


@pytest.mark.parametrize(
    ("objective", "their_loss", "tolerance"),
    [
        (Relevance(), "BinaryCrossEntropyLoss", 1e-7),  # it converts labels, and thereby its sum, to float32
        (Regression(), "MSELoss", 1e-10),
    ],
    ids=["relevance", "regression"],
)
def test_cross_encoders(tmp_path: Path, objective: Objective, their_loss: str, tolerance: float) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import losses

    labels = [0.0, 1.0, 0.25, 1.0]
    examples = [{"first": a, "second": b, "label": y} for a, b, y in zip(FIRSTS, SECONDS, labels, strict=True)]
    ours, _ = pair_of(BertForSequenceClassification(BertConfig(**BERT, num_labels=1)), tmp_path)
    THEIRS.save_pretrained(tmp_path)
    theirs = CrossEncoder(str(tmp_path), num_labels=1, max_length=LENGTH, device="cpu").double().train()
    scores = getattr(losses, their_loss)(theirs)

    def loss() -> Tensor:
        return scores([FIRSTS, SECONDS], torch.tensor(labels, dtype=torch.float64))

    assert_same_step(ours, theirs[0].model, objective, batch_of(objective, examples), loss, tmp_path, tolerance)
