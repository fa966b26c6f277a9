"""`regard predict` and `regard eval` for models with labels: texts, pairs, words, numbers and images."""

import csv
import json
from pathlib import Path

import pytest
import torch

import regard as package
from regard.objectives.inputs import encode_input
from tests.cli.conftest import regard

SMALL = (
    "--model.width=16", "--model.layers.0.times=1", "--tokenizer.by=byte", "--data.rows=8", "--data.length=48",
    "--train.evaluate_every=0", "--device", "cpu",
)  # fmt: skip
REVIEWS = [
    ("a good film", "good"),
    ("a bad film", "bad"),
    ("good and long", "good"),
    ("bad and short, a long text", "bad"),
]


def train(*arguments: object) -> None:
    result = regard("train", *arguments)
    assert result.exit_code == 0, result.exception or result.stderr


def lines(*arguments: object) -> list[dict]:
    result = regard(*arguments, "--json", "--device", "cpu")
    assert result.exit_code == 0, result.exception or result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict")
    with (path / "reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((f"{text} {n}", label) for n in range(20) for text, label in REVIEWS)
    options = ("--train.steps=40", "--train.lr=1e-2", "--out", path / "reviews")
    train("classify", "--data", path / "reviews.csv", *SMALL, *options)
    return path


def test_the_labels_of_texts_are_predicted(folder: Path) -> None:
    texts = [text for text, _ in REVIEWS]
    found = lines("predict", folder / "reviews", *texts)
    assert [row["label"] for row in found] == [label for _, label in REVIEWS]
    assert [row["input"] for row in found] == texts
    assert all(row["probability"] == max(row["probabilities"].values()) for row in found)
    assert all(sorted(row["probabilities"]) == ["bad", "good"] for row in found)
    table = regard("predict", folder / "reviews", texts[0], "--device", "cpu").stdout
    assert table.startswith("good ") and table.endswith("%  a good film\n")
    (folder / "new.jsonl").write_text("\n".join(json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)))
    rows = lines("predict", folder / "reviews", "--data", folder / "new.jsonl")
    assert [row["input"]["id"] for row in rows] == [0, 1, 2, 3]
    assert [row["label"] for row in rows] == [row["label"] for row in found]


def test_a_batch_has_the_probabilities_of_single_inputs_and_of_the_logits(folder: Path) -> None:
    llm = package.load(folder / "reviews", device="cpu", dtype=torch.float64)
    texts = [f"{text} {'x' * n}" for n, (text, _) in enumerate(REVIEWS * 10)]
    inputs = [text if n % 3 else (text, "a pair") for n, text in enumerate(texts)]
    together, alone = llm.classify(inputs), [llm.classify(value) for value in inputs]
    for left, right in zip(together, alone, strict=True):
        assert left.label == right.label and left.probability == pytest.approx(right.probability, abs=1e-10)
    ids = torch.tensor([llm.tokenizer.encode_with_special_tokens(texts[1])])
    probabilities = llm.model(ids).softmax(-1)[0].tolist()
    assert list(together[1].probabilities.values()) == pytest.approx(probabilities, abs=1e-10)
    pair = encode_input({"first": texts[0], "second": "a pair"}, llm.tokenizer)
    ids, types = (torch.from_numpy(pair[name])[None] for name in ("ids", "types"))
    expected = llm.model(ids, None, types).softmax(-1)[0].tolist()
    assert list(together[0].probabilities.values()) == pytest.approx(expected, abs=1e-10)
    assert llm.classify([]) == []


def test_a_classifier_is_evaluated_on_its_held_out_examples_and_on_a_file(folder: Path) -> None:
    own = json.loads(regard("eval", folder / "reviews", "--device", "cpu", "--json").stdout)
    assert own["objective"] == "classification" and own["accuracy"] == 1 and own["loss"] < 0.1
    record = [json.loads(line) for line in (folder / "reviews" / "metrics.jsonl").read_text().splitlines()][-1]
    assert own["loss"] == pytest.approx(record["held_out_loss"], rel=1e-5)
    every = json.loads(regard("eval", folder / "reviews", "--data", folder / "reviews.csv", "--json").stdout)
    assert every["examples"] == 80 and every["accuracy"] == 1
    some = regard("eval", folder / "reviews", "--data", folder / "reviews.csv", "--count", 10).stdout
    assert some.startswith("10 examples of ") and "\naccuracy                    1.0000\n" in some
    (folder / "other.jsonl").write_text('{"text": "a film", "label": "fair"}\n{"text": "b", "label": "good"}')
    refused = regard("eval", folder / "reviews", "--data", folder / "other.jsonl")
    assert "other.jsonl, line 1: the label 'fair' is not one of bad, good" in str(refused.exception)


def test_embeddings_are_evaluated_by_recall(tmp_path: Path) -> None:
    train("embeddings", *SMALL, "--train.steps=1", "--data.held_out=2", "--out", tmp_path / "emb")
    found = json.loads(regard("eval", tmp_path / "emb", "--json", "--device", "cpu").stdout)
    assert found["examples"] == 16 and 0 <= found["recall@1"] <= 1
    refused = regard("predict", tmp_path / "emb", "a text")
    assert "with a pooled head, which has no labels" in str(refused.exception)


def test_numbers_and_words_are_predicted(tmp_path: Path) -> None:
    rows = [{"text": "x" * n, "label": n / 10} for n in range(1, 40)]
    (tmp_path / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = (*SMALL, "--train.steps=2")
    train(
        "classify",
        "--data",
        tmp_path / "numbers.jsonl",
        "--objective.kind=regression",
        *options,
        "--out",
        tmp_path / "n",
    )
    found = lines("predict", tmp_path / "n", "xxx", "xx")
    assert all(list(row) == ["input", "value"] for row in found)
    assert "absolute_error" in regard("eval", tmp_path / "n", "--device", "cpu").stdout
    rows = [{"tokens": ["to", "Anna", str(n)], "labels": ["O", "NAME", "O"]} for n in range(40)]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options += ("--objective.kind=token_classification", "--model.head.pool=none")
    train("classify", "--data", tmp_path / "words.jsonl", *options, "--out", tmp_path / "w")
    (found,) = lines("predict", tmp_path / "w", "Anna met Emil")
    assert [word["word"] for word in found["words"]] == ["Anna", "met", "Emil"]
    assert {word["label"] for word in found["words"]} <= {"O", "NAME"}


def test_wrong_uses_are_refused(folder: Path) -> None:
    assert "give texts or image files" in regard("predict", folder / "reviews").stderr
    assert "even number of texts" in regard("predict", folder / "reviews", "--pair", "a", "b", "c").stderr
    assert "expected a string or a tuple" in str(
        pytest.raises(ValueError, package.load(folder / "reviews").classify, 3)
    )
