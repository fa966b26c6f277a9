"""One AdamW step of each objective with labels, pairs or images equals that of an independent implementation.

The other implementation is the class of `transformers` with its own loss, or a formula; it reads the same examples with
the tokenizer of `transformers`. Both are in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from regard.checkpoint.model_folder import load
from regard.data.batch import Batch
from regard.families import family
from regard.models.heads import Pooled
from regard.objectives.base import Objective
from regard.objectives.classification import SequenceClassification, TokenClassification
from regard.objectives.contrastive import Contrastive
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.scores import Regression, Relevance
from regard.text.tokenizer import Tokenizer
from regard.training.optimizer import AdamW
from regard.training.step import take_step

WORDS = ["[PAD]", "[CLS]", "[UNK]", "[SEP]", "ana", "##na", "ban", "##a", "sees", "the", "red", "cat", "dog", "runs"]
TEXTS = ["ana sees the red cat", "the dog", "banana runs", "the cat sees ana and banana and the dog and runs"]
LENGTH = 9  # the last text is longer
LR, TOLERANCE = 1e-3, 1e-10
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa",
}  # fmt: skip
BERT = SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 32, "pad_token_id": 0}


def core() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.WordPiece({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 3)]
    )
    return core


OURS = Tokenizer(core(), pad="[PAD]")
THEIRS = PreTrainedTokenizerFast(
    tokenizer_object=core(), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
    model_input_names=["input_ids", "token_type_ids", "attention_mask"],
)  # fmt: skip


def tokenize_theirs(*texts: Sequence, **options: bool) -> dict[str, Tensor]:
    return dict(
        THEIRS(*map(list, texts), truncation=True, max_length=LENGTH, padding=True, return_tensors="pt", **options)
    )


def batch_of(objective: Objective, examples: Sequence[dict]) -> Batch:
    rng = np.random.default_rng(0)
    items = [objective.sample(objective.tokenize(e, OURS), OURS, LENGTH, rng) for e in examples]
    return objective.collate(items, OURS, LENGTH)


def pair_of(theirs: nn.Module, folder: Path, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """The model of `transformers` with larger random weights, and ours with the same weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.double().save_pretrained(folder)
    return load(folder, dtype=torch.float64).train(), theirs.train()


def assert_same_step(
    ours: nn.Module,
    theirs: Any,
    objective: Objective,
    batch: Batch,
    their_loss: Callable[[], Tensor],
    folder: Path,
    tolerance: float = TOLERANCE,
) -> None:
    values = take_step(ours, objective, batch, AdamW(weight_decay=0.0).build(ours, LR))
    before = load_file(folder / "model.safetensors")
    optimizer = torch.optim.AdamW(theirs.parameters(), LR, (0.9, 0.95), 1e-8, weight_decay=0.0)
    loss = their_loss()
    loss.backward()
    optimizer.step()
    assert abs(values["loss"] - float(loss.detach())) < tolerance
    theirs.save_pretrained(folder / "after")  # the names of the file can differ from those of the parameters
    after, kind = load_file(folder / "after" / "model.safetensors"), theirs.config.model_type
    found = dict(family(kind).table(ours.spec).write({n: p.detach() for n, p in ours.named_parameters()}))
    common = after.keys() & found.keys()
    assert len(common) >= len(after) - 1
    assert max(float((found[name] - after[name]).abs().max()) for name in common) < tolerance
    assert sum(not torch.equal(before[name], after[name]) for name in common) > len(common) / 2


def test_sequences_with_named_labels(tmp_path: Path) -> None:
    labels = ["no", "yes", "no", "maybe"]
    objective = SequenceClassification(labels=("maybe", "no", "yes"))
    batch = batch_of(objective, [{"text": t, "label": label} for t, label in zip(TEXTS, labels, strict=True)])
    inputs = tokenize_theirs(TEXTS)
    assert torch.equal(batch.tokens, inputs["input_ids"]) and batch.tokens[3, -1] == 3  # the last token stays [SEP]
    ours, theirs = pair_of(BertForSequenceClassification(BertConfig(**BERT, num_labels=3)), tmp_path)
    ids = torch.tensor([1, 2, 1, 0])
    assert_same_step(ours, theirs, objective, batch, lambda: theirs(**inputs, labels=ids).loss, tmp_path)


def test_pairs_of_sequences(tmp_path: Path) -> None:
    firsts, seconds, labels = TEXTS, TEXTS[::-1], [0, 2, 1, 1]
    examples = [{"first": a, "second": b, "label": n} for a, b, n in zip(firsts, seconds, labels, strict=True)]
    objective = SequenceClassification(num_labels=3)
    batch, inputs = batch_of(objective, examples), tokenize_theirs(firsts, seconds)
    assert torch.equal(batch.tokens, inputs["input_ids"]) and torch.equal(batch.types, inputs["token_type_ids"])
    ours, theirs = pair_of(BertForSequenceClassification(BertConfig(**BERT, num_labels=3)), tmp_path)
    loss = lambda: theirs(**inputs, labels=torch.tensor(labels)).loss  # noqa: E731
    assert_same_step(ours, theirs, objective, batch, loss, tmp_path)


def test_words(tmp_path: Path) -> None:
    """The first token of a word has its label; a cut word and special tokens have none."""
    names, words = ("NAME", "O", "THING"), [text.split() for text in TEXTS]
    kinds = {"ana": "NAME", "banana": "NAME", "cat": "THING", "dog": "THING"}
    examples = [{"tokens": line, "labels": [kinds.get(word, "O") for word in line]} for line in words]
    objective = TokenClassification(labels=names)
    encoded = THEIRS(words, is_split_into_words=True, truncation=True, max_length=LENGTH, padding=True)
    targets = torch.full((len(words), LENGTH), -100)
    for row, line in enumerate(words):
        indices = encoded.word_ids(row)
        for column, index in enumerate(indices):
            if index is not None and index != (indices[column - 1] if column else None):
                targets[row, column] = names.index(kinds.get(line[index], "O"))
    batch, inputs = batch_of(objective, examples), tokenize_theirs(words, is_split_into_words=True)
    assert torch.equal(batch.tokens, inputs["input_ids"])
    assert torch.equal(batch.weights > 0, targets >= 0)
    ours, theirs = pair_of(BertForTokenClassification(BertConfig(**BERT, num_labels=3)), tmp_path)
    assert_same_step(ours, theirs, objective, batch, lambda: theirs(**inputs, labels=targets).loss, tmp_path)


@pytest.mark.parametrize(
    ("objective", "problem"),
    [(Regression(), "regression"), (Relevance(), "multi_label_classification")],
    ids=["regression", "relevance"],
)
def test_scores_of_pairs(tmp_path: Path, objective: Objective, problem: str) -> None:
    labels = [0.0, 1.0, 0.25, 1.0]
    examples = [{"first": a, "second": b, "label": y} for a, b, y in zip(TEXTS, TEXTS[::-1], labels, strict=True)]
    config = BertConfig(**BERT, num_labels=1, problem_type=problem)
    ours, theirs = pair_of(BertForSequenceClassification(config), tmp_path)
    inputs, targets = tokenize_theirs(TEXTS, TEXTS[::-1]), torch.tensor(labels, dtype=torch.float64).unsqueeze(1)
    loss = lambda: theirs(**inputs, labels=targets).loss  # noqa: E731
    assert_same_step(ours, theirs, objective, batch_of(objective, examples), loss, tmp_path)


def test_images(tmp_path: Path) -> None:
    rng, labels = np.random.default_rng(0), [0, 2, 1, 1]
    images = rng.normal(size=(4, 3, 8, 8)).astype(np.float32)
    objective = SequenceClassification(num_labels=3)
    batch = batch_of(objective, [{"image": x, "label": n} for x, n in zip(images, labels, strict=True)])
    ours, theirs = pair_of(
        ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)), tmp_path
    )
    batch, pixels = Batch(**dict(batch) | {"images": batch.images.double()}), torch.from_numpy(images).double()
    loss = lambda: theirs(pixels, labels=torch.tensor(labels)).loss  # noqa: E731
    assert_same_step(ours, theirs, objective, batch, loss, tmp_path)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("negatives", [0, 2])
def test_sentence_embeddings(tmp_path: Path, symmetric: bool, negatives: int) -> None:
    """Against the formula, row by row; in-batch negatives, and hard ones of which the last row has fewer."""
    objective = SentenceEmbeddings(scale=7.0, symmetric=symmetric)
    hard = [[TEXTS[(n + k + 1) % 4] + " dog" for k in range(negatives - (n == 3 and negatives > 0))] for n in range(4)]
    examples = [{"anchor": t, "positive": "red " + t, "negatives": h} for t, h in zip(TEXTS, hard, strict=True)]
    _, theirs = pair_of(BertModel(BertConfig(**BERT), add_pooling_layer=False), tmp_path)
    base = load(tmp_path, dtype=torch.float64)
    ours = replace(base.spec, head=Pooled("mean")).build(0).double()
    ours.load_state_dict({name: t for name, t in base.state_dict().items() if not name.startswith("head.")})

    def embed(text: str) -> Tensor:
        hidden = theirs(**tokenize_theirs([text])).last_hidden_state[0].mean(0)
        return hidden / hidden.norm()

    def loss() -> Tensor:
        anchors, positives = [embed(e["anchor"]) for e in examples], [embed(e["positive"]) for e in examples]
        candidates = positives + [embed(text) for texts in hard for text in texts]
        total = 0.0
        for n, anchor in enumerate(anchors):
            total -= torch.stack([7.0 * anchor @ c for c in candidates]).log_softmax(0)[n] / 4
        if symmetric:
            back = sum(-torch.stack([7.0 * p @ a for a in anchors]).log_softmax(0)[n] for n, p in enumerate(positives))
            total = (total + back / 4) / 2
        return total

    assert_same_step(ours, theirs, objective, batch_of(objective, examples), loss, tmp_path)


def test_contrastive_pairs_of_images_and_texts(tmp_path: Path) -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes = {
        "projection_dim": 8,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 16,
        "eos_token_id": 3,
        "bos_token_id": 1,
    }
    config = CLIPConfig(
        text_config=text | sizes, vision_config=text | {"image_size": 8, "patch_size": 4}, projection_dim=8
    )
    ours, theirs = pair_of(CLIPModel(config), tmp_path)
    images = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    batch = batch_of(Contrastive(), [{"image": x, "text": t} for x, t in zip(images, TEXTS, strict=True)])
    batch = Batch(**dict(batch) | {"images": batch.images.double()})
    inputs = {k: v for k, v in tokenize_theirs(TEXTS).items() if k != "token_type_ids"}
    pixels = torch.from_numpy(images).double()
    loss = lambda: theirs(**inputs, pixel_values=pixels, return_loss=True).loss  # noqa: E731
    assert_same_step(ours, theirs, Contrastive(), batch, loss, tmp_path)
