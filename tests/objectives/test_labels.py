"""Labels of the data: names and numbers reach the head, wrong ones are refused with the example; other inputs too."""

import json

import numpy as np
import pytest
import torch

from regard.data.sources.base import open_collection
from regard.data.sources.images import Digits, ImageFolder
from regard.models.heads import Classification, Distilled, Pooled
from regard.models.presets import bert, clip, transformer_2017, vit
from regard.objectives.base import Objective
from regard.objectives.classification import SequenceClassification, TokenClassification
from regard.objectives.contrastive import Contrastive
from regard.objectives.defaults import default_objective
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.inputs import truncate
from regard.objectives.scores import Regression, Relevance, reciprocal_ranks
from regard.spec import SpecError
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe
from regard.training.recipe import resolve

TOKENIZER = bpe(["red and blue"], 280)
SMALL = {"vocab": TOKENIZER.vocab_size, "width": 16, "heads": 2, "hidden": 24, "layers": 1, "length": 32}
CLASSIFIER = bert(**SMALL, head=Classification(1))
TAGGER = bert(**SMALL, head=Classification(1, "none"))


def fitted(objective: Objective, examples: list[dict], model=CLASSIFIER) -> Objective:
    return objective.fit(open_collection("examples", examples, 0, hold_out=False), model)


def test_names_of_labels_are_found_and_reach_the_head() -> None:
    texts = [{"text": "red", "label": "warm"}, {"text": "blue", "label": "cold"}]
    objective = fitted(SequenceClassification(), texts)
    assert objective.labels == ("cold", "warm")
    assert objective.head_options == {"labels": 2, "label_names": ["cold", "warm"]}
    assert objective.tokenize(texts[0], TOKENIZER)["label"] == 1
    words = [{"tokens": ["red", "and"], "labels": ["C", "O"]}]
    assert fitted(TokenClassification(), words, TAGGER).labels == ("C", "O")


def test_numbers_of_labels_are_counted_and_names_of_the_head_are_kept() -> None:
    numbers = [{"text": "a", "label": label} for label in (0, 4, 2)]
    assert fitted(SequenceClassification(), numbers).head_options == {"labels": 5}
    model = bert(**SMALL, head=Classification(2, label_names=("yes", "no")))
    assert fitted(SequenceClassification(), [{"text": "a", "label": "no"}], model).labels == ("yes", "no")
    assert fitted(SequenceClassification(), numbers, bert(**SMALL, head=Classification(9))).num_labels == 9


@pytest.mark.parametrize(
    ("objective", "example", "message"),
    [
        (SequenceClassification(labels=("a", "b")), {"text": "x", "label": "c"}, "'c' is not one of a, b.*'text': 'x'"),
        (SequenceClassification(num_labels=3), {"text": "x", "label": 3}, "3 is not a number from 0 to 2.*'text': 'x'"),
        (SequenceClassification(num_labels=3), {"text": "x", "label": -1}, "-1 is not a number from 0 to 2"),
        (SequenceClassification(num_labels=3), {"text": "x", "label": 1.5}, "1.5 is neither a string nor a whole"),
        (SequenceClassification(), {"text": "x"}, "needs examples with label; this one has text"),
        (TokenClassification(num_labels=2), {"tokens": ["x", "y"], "labels": [1]}, "2 tokens have 1 labels"),
        (Regression(), {"text": "x", "label": float("nan")}, "nan is not a finite number"),
        (Relevance(), {"first": "x", "second": "y", "label": 2}, r"2.0 is not in \[0, 1\]"),
        (Regression(), {"text": "x", "label": "high"}, "'high' is not a finite number"),
        (Relevance(), {"first": "x", "second": "y", "label": 1, "group": "q7"}, "'q7' is not a whole number"),
        (TokenClassification(num_labels=2), {"tokens": "xy", "labels": [0, 1]}, "must be a list of strings"),
        (TokenClassification(num_labels=2), {"tokens": ["x", 5], "labels": [0, 1]}, "must be a list of strings"),
        (TokenClassification(num_labels=2), {"tokens": ["x"], "labels": None}, "must be a list of strings"),
        (SentenceEmbeddings(), {"anchor": "x"}, "needs examples with anchor, positive"),
        (SentenceEmbeddings(), {"anchor": "x", "positive": "y", "negatives": "z z"}, "must be a list of strings"),
        (SentenceEmbeddings(), {"anchor": "x", "positive": ""}, "has no tokens"),
    ],
)
def test_wrong_examples_are_refused(objective: Objective, example: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective.tokenize(example, TOKENIZER)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a"] * 3, "all labels are 'a'"),
        ([0, 0], "all labels are 0"),
        ([0, 10**6], "the largest label is 1000000"),
        ([["a"], ["b"]], "neither a string nor a whole number.*'text': '0'"),
        ([0, -1], "-1 is not a number from 0.*'text': '1'"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(SequenceClassification(), [{"text": f"{i}", "label": label} for i, label in enumerate(labels)])


def test_labels_of_held_out_examples_are_known() -> None:
    examples = [{"text": f"{i}", "label": f"{i % 2}"} for i in range(19)] + [{"text": "rare", "label": "rare"}]
    splits = open_collection("examples", examples, 0, hold_out=True, tail=True)
    assert SequenceClassification().fit(splits, CLASSIFIER).labels == ("0", "1", "rare")


def test_numbers_of_csv_are_read_and_negatives_may_be_one_string() -> None:
    assert Regression().tokenize({"text": "red", "label": "0.5"}, TOKENIZER)["label"] == 0.5
    pair = {"anchor": "red", "positive": "blue"}
    one = SentenceEmbeddings().tokenize({**pair, "negative": "and"}, TOKENIZER)
    assert one.keys() == SentenceEmbeddings().tokenize({**pair, "negatives": ["and"]}, TOKENIZER).keys()
    assert "ids_2" in one and "ids_2" not in SentenceEmbeddings().tokenize({**pair, "negatives": None}, TOKENIZER)


def test_models_without_a_fitting_head_are_refused() -> None:
    for objective, model in (
        (SequenceClassification(), TAGGER),
        (TokenClassification(), CLASSIFIER),
        (Regression(), bert(**SMALL, head=Classification(2))),
        (SentenceEmbeddings(), CLASSIFIER),
        (Contrastive(), CLASSIFIER),
        (SequenceClassification(labels=("a", "b", "c")), bert(**SMALL, head=Classification(2))),
        (SequenceClassification(labels=("a", "b")), bert(**SMALL, head=Classification(2, label_names=("b", "a")))),
    ):
        with pytest.raises(SpecError):
            objective.check_model(model)


def test_default_objectives_fit_their_models() -> None:
    expected = {
        SequenceClassification: [CLASSIFIER, vit(8, 4, 16, 2, 24, 1, 3)],
        TokenClassification: [TAGGER],
        SentenceEmbeddings: [bert(**SMALL, head=Pooled())],
        Contrastive: [clip(8, 4, 16, 2, 1, 30, 8, 16, 2, 8)],
    }
    for cls, models in expected.items():
        for model in models:
            assert type(default_objective(model)) is cls
            default_objective(model).check_model(model)
    with pytest.raises(SpecError):
        SequenceClassification().check_model(transformer_2017(30, 16, 2, 24, 1))
    assert Distilled(3).labels == 3


def test_the_longer_sequence_of_a_pair_is_shortened_first() -> None:
    sequences = np.array([-1, 0, 0, -1, 1, 1, 1, 1, 1, -1])
    columns = {"ids": np.arange(10), "sequences": sequences, "label": np.array(1)}
    assert truncate(columns, 8)["ids"].tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert truncate(columns, 6)["ids"].tolist() == [0, 1, 3, 4, 5, 9]
    assert truncate(columns, 5)["ids"].tolist() == [0, 1, 3, 4, 9]
    assert truncate(columns, 10)["ids"].tolist() == list(range(10))
    with pytest.raises(ValueError, match="too short for the special tokens"):
        truncate(columns, 2)


def test_the_texts_of_a_pair_are_separated() -> None:
    example = {"first": "red", "second": "blue", "label": 1}
    first, second = TOKENIZER.encode("red"), TOKENIZER.encode("blue")
    columns = SequenceClassification(num_labels=2).tokenize(example, TOKENIZER)  # without [CLS] and [SEP]
    assert columns["ids"].tolist() == [*first, TOKENIZER.eos, *second]
    assert columns["types"].tolist() == [0] * (len(first) + 1) + [1] * len(second)
    assert columns["sequences"].tolist() == [0] * len(first) + [-1] + [1] * len(second)
    separated = bpe(["red and blue"], 280, ("[CLS]", "[SEP]"))
    assert Regression().tokenize(example, separated)["ids"].tolist() == separated.encode_with_special_tokens(
        "red", "blue"
    )
    without = Tokenizer(TOKENIZER.core, special_tokens_map={"sep_token": "<|user|>"})
    ids = Relevance().tokenize(example, without)["ids"].tolist()
    assert ids == [*first, without.core.token_to_id("<|user|>"), *second]
    with pytest.raises(SpecError, match="neither sep_token nor eos_token"):
        Relevance().tokenize(example, Tokenizer(TOKENIZER.core))


def test_reciprocal_ranks_of_groups() -> None:
    scores = torch.tensor([3.0, 2.0, 1.0, 5.0, 4.0, 0.0])
    relevant = torch.tensor([False, True, True, True, False, False])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    assert reciprocal_ranks(scores, relevant, groups).tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 0.0]


def test_embeddings_of_different_numbers_of_negatives_are_collated() -> None:
    objective, rng = SentenceEmbeddings(), np.random.default_rng(0)
    examples = [
        {"anchor": "red", "positive": "and", "negatives": ["blue", "red and"]},
        {"anchor": "blue", "positive": "red"},
    ]
    items = [objective.sample(objective.tokenize(example, TOKENIZER), TOKENIZER, 4, rng) for example in examples]
    batch = objective.collate(items, TOKENIZER, 4)
    assert batch.tokens.shape[:2] == (2, 4) and batch.valid[1, 2:].sum() == 0 and batch.valid[0].any(-1).all()
    _, count, metrics = objective(bert(**SMALL, head=Pooled()).build(0), batch)
    assert count == 2 and 0 <= metrics["recall@1"] <= 2


def image_folder(tmp_path, size=(6, 4)):
    Image = pytest.importorskip("PIL.Image")
    for n, (label, value) in enumerate([("black", 0), ("white", 255)] * 4):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.new("RGB", size, (value, n, value)).save(tmp_path / label / f"{n}.png")
    return tmp_path


def test_an_image_folder_is_read_with_its_labels(tmp_path) -> None:
    examples = ImageFolder(path=str(image_folder(tmp_path)), size=(8, 8)).open(hold_out=False).train
    assert examples.count == 8
    for index in range(8):
        example = examples.example(index)
        assert example["image"].shape == (3, 8, 8) and example["image"].dtype == np.float32
        assert (example["image"][0] == (1 if example["label"] == "white" else -1)).all()
    gray = ImageFolder(path=str(tmp_path), gray=True, standardize=False).open().train.example(0)["image"]
    assert gray.shape == (1, 32, 32) and 0 <= gray.min() <= gray.max() <= 1
    (tmp_path / "black" / "broken.png").write_text("no image")
    with pytest.raises(ValueError, match="broken.png cannot be read as an image"):
        ImageFolder(path=str(tmp_path)).open()
    with pytest.raises(ValueError, match="has no metadata.jsonl, and no images in subfolders"):
        ImageFolder(path=str(tmp_path / "black")).open()


def test_an_image_folder_is_read_with_its_metadata(tmp_path) -> None:
    lines = [{"file_name": f"white/{n}.png", "text": f"image {n}"} for n in (1, 3, 5, 7)]
    metadata = image_folder(tmp_path) / "metadata.jsonl"
    metadata.write_text("\n".join(map(json.dumps, lines)))
    examples = ImageFolder(path=str(tmp_path), size=(8, 8)).open(hold_out=False).train
    found = {examples.example(n)["text"]: examples.example(n)["image"] for n in range(4)}
    assert found.keys() == {"image 1", "image 3", "image 5", "image 7"}
    assert all((image[0] == 1).all() and image.shape == (3, 8, 8) for image in found.values())
    metadata.write_text('{"file_name": "../other.png", "text": "outside"}')
    with pytest.raises(ValueError, match="must be the name of an image in"):
        ImageFolder(path=str(tmp_path)).open()


def test_an_image_of_16_bits_is_scaled(tmp_path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    file = tmp_path / "deep.png"
    image_module.fromarray(np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)).save(file)
    image = ImageFolder(path=str(tmp_path), size=(8, 8), gray=True, standardize=False).read_image(file)
    np.testing.assert_allclose(image[0].flatten(), np.linspace(0, 1, 64), atol=1 / 255)


def test_a_recipe_for_an_image_folder_gets_its_labels_and_its_size_is_checked(tmp_path) -> None:
    model = vit(8, 4, 16, 2, 24, 1, 1).to_dict()
    model["head"] = {"kind": "classification"}
    tables = {
        "data": {"source": "images", "path": str(image_folder(tmp_path)), "size": [8, 8], "rows": 2},
        "tokenizer": {"by": "byte"},
        "model": model,
        "train": {"steps": 1},
    }
    recipe = resolve(tables).recipe
    assert recipe.model.head == Classification(2, label_names=("black", "white"))
    assert recipe.objective == SequenceClassification(labels=("black", "white"))
    with pytest.raises(SpecError, match=r"have the shape \(3, 8, 16\), and the model takes \(3, 8, 8\)"):
        resolve(tables | {"data": tables["data"] | {"size": [8, 16]}})


def test_digits_are_images_from_minus_one_to_one(monkeypatch) -> None:
    train, held_out = Digits().open()
    assert train.count + held_out.count == 1797
    example = train.example(0)
    assert example["image"].shape == (1, 8, 8) and (example["image"].min(), example["image"].max()) == (-1, 1)
    assert Digits(standardize=False).open().train.example(0)["image"].min() == 0
    monkeypatch.setattr("regard.data.sources.images.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs scikit-learn"):
        Digits().open()
