"""A folder of images: trained on without further options, classified, and exported with its image processor."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as package
from regard.data.sources.images import ImageFolder
from tests.cli.conftest import regard

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")

SMALL = (
    "--model.width=16", "--model.layers.0.times=1", "--model.layers.0.blocks.0.sublayers.0.body.heads=2",
    "--model.layers.0.blocks.0.sublayers.1.body.hidden=16", "--data.rows=8", "--train.steps=1", "--device", "cpu",
)  # fmt: skip


def write_images(folder: Path) -> Path:
    """Images of two labels, also with transparent pixels, gray, and of other sizes."""
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for n in range(20):
            shape, mode = [((12, 9, 3), "RGB"), ((8, 8), "L"), ((20, 16, 4), "RGBA")][n % 3]
            pixels = generator.integers(0, 255, shape, dtype=np.uint8)
            Image.fromarray(pixels, mode).save(folder / label / f"{n}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder / "pictures")
    options = ("--model.input.channels=3", "--out", folder / "run")
    result = regard("train", "vit", "--data", folder / "pictures", *SMALL, *options)
    assert result.exit_code == 0, result.exception or result.stderr
    return folder / "run"


def test_images_are_resized_for_the_model(run: Path) -> None:
    (source,) = json.loads((run / "config.json").read_text())["data"]["sources"]
    assert source["kind"] == "images" and source["size"] == [8, 8] and not source["gray"]


@pytest.mark.parametrize("override", ["--data", "--data.path", "--data.sources.0.path"])
def test_a_gray_model_gets_gray_images(tmp_path: Path, override: str) -> None:
    write_images(tmp_path / "pictures")
    kind = ("--data.sources.0.kind=images",) if "sources" in override else ()
    result = regard("train", "vit", override, tmp_path / "pictures", *kind, *SMALL, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.exception or result.stderr
    (source,) = json.loads((tmp_path / "run" / "config.json").read_text())["data"]["sources"]
    assert source["kind"] == "images" and source["size"] == [8, 8] and source["gray"]
    found = package.load(tmp_path / "run", device="cpu").classify(str(tmp_path / "pictures" / "cat" / "0.png"))
    assert found.label in ("cat", "dog")


def test_predictions_read_images_as_training_does(run: Path) -> None:
    pictures = run.parent / "pictures"
    files = sorted(pictures.rglob("*.png"))
    llm = package.load(run, device="cpu")
    trained_on = ImageFolder(path=str(pictures), size=(8, 8)).read()
    pixels = torch.stack([torch.from_numpy(example["image"]) for example in trained_on])
    assert torch.equal(llm.image_processor.read(files), pixels)
    expected = llm.model(pixels).softmax(-1)
    found = llm.classify([str(file) for file in files])
    assert [row.probability for row in found] == pytest.approx(expected.amax(-1).tolist(), abs=1e-6)
    result = regard("predict", run, "--data", pictures, "--json", "--device", "cpu")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["label"] for row in rows] == [row.label for row in found]
    assert [row["input"] for row in rows] == [str(file) for file in files]
    scores = json.loads(regard("eval", run, "--data", pictures, "--json", "--device", "cpu").stdout)
    labels = [file.parent.name for file in files]
    accuracy = sum(row.label == label for row, label in zip(found, labels, strict=True)) / len(labels)
    assert scores["examples"] == 40 and scores["accuracy"] == pytest.approx(accuracy)


def test_an_exported_model_has_its_image_processor_and_no_tokenizer(run: Path) -> None:
    out = run.parent / "exported"
    result = regard("export", run, out)
    assert result.exit_code == 0, result.exception
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "manifest.json", "model.safetensors", "preprocessor_config.json"}
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    model = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    files = [str(run.parent / "pictures" / "cat" / f"{n}.png") for n in (0, 1)]
    ours, imported = package.load(run, device="cpu"), package.load(out, device="cpu")
    pixels = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, ours.image_processor.read(files), atol=1e-6, rtol=0)
    classify = transformers.pipeline("image-classification", model=model, image_processor=processor)
    for file in files:
        theirs = {row["label"]: row["score"] for row in classify(file)}
        assert ours.classify(file).probabilities == pytest.approx(theirs, abs=1e-5)
        assert imported.classify(file).probabilities == pytest.approx(theirs, abs=1e-5)


def test_a_folder_without_known_files_and_a_wrong_label_are_reported_briefly(tmp_path: Path, run: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.xyz").write_text("a")
    refused = regard("train", "vit", "--data", tmp_path / "other", "--out", tmp_path / "run")
    assert "no images in subfolders (LABEL/FILE.png)" in str(refused.exception)
    write_images(tmp_path / "pictures")
    (tmp_path / "pictures" / "cat").rename(tmp_path / "pictures" / "cow")
    message = str(regard("eval", run, "--data", tmp_path / "pictures").exception)
    assert "the label 'cow' is not one of cat, dog" in message and "array of shape (3, 8, 8)" in message
    assert len(message) < 400
