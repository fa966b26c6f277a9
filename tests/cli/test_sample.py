"""`regard sample`: pictures of every kind, unusual examples first, and clear refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.checkpoint import save
from regard.evals.samples import anomaly_scores, covered_modes, near_distance, recognized, share_near, unexplained
from regard.models.generative.autoencoder import Autoencoder
from regard.models.generative.base import MLP
from regard.report import sample_plots
from tests.cli.conftest import regard as command
from tests.training.tiny import SPEC, TOKENIZER

plt = pytest.importorskip("matplotlib.pyplot")
SETTINGS: dict[str, Any] = {
    "data": {"source": "points", "rows": 32, "held_out": 2},
    "tokenizer": {"by": "byte"},
    "train": {"steps": 4, "schedule": {"kind": "constant", "warmup": 1}},
}
SMALL = {"hidden": [8]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    images = [[[(number * (x + y) % 5) / 4 for x in range(4)] for y in range(4)] for number in range(1, 25)]
    lines = [f'{{"image": [{image}], "label": {number % 3}}}' for number, image in enumerate(images)]
    (folder / "images.jsonl").write_text("\n".join(lines))
    picture = {"data": {"path": str(folder / "images.jsonl"), "rows": 4, "held_out": 1}}
    for name, model, tables in (
        ("points", {"kind": "gan", "shape": [2], "generator": SMALL, "discriminator": SMALL}, {}),
        ("vae", {"kind": "vae", "shape": [1, 4, 4], "latent": 2, "encoder": SMALL, "decoder": SMALL}, picture),
        ("autoencoder", {"kind": "autoencoder", "shape": [1, 4, 4], "latent": 2, "encoder": SMALL}, picture),
        ("codes", {"kind": "autoencoder", "shape": [1, 4, 4], "latent": 3, "encoder": SMALL}, picture),
        ("values", {"kind": "vae", "shape": [2], "latent": 3}, {}),
    ):
        regard.train(SETTINGS | tables | {"model": model}, out=folder / name, device="cpu")
    return folder


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("points", ()),
        ("points", ("--interpolate",)),
        ("vae", ("--count", 5)),
        ("vae", ("--interpolate", "--count", 3)),
        ("vae", ("--map",)),
        ("autoencoder", ("--map",)),
        ("vae", ("--anomalies", "--count", 2)),
    ],
)
def test_a_picture_is_written(run: str, options: tuple, runs: Path, tmp_path: Path) -> None:
    result = command("sample", runs / run, *options, "--out", tmp_path / "a.png", "--device", "cpu")
    assert result.exit_code == 0, result.exception or result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and str(tmp_path / "a.png") in result.output


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("autoencoder", (), "is an autoencoder: it has no distribution of codes to draw from"),
        ("autoencoder", ("--interpolate",), "train a vae or a gan, or give --map or --anomalies"),
        ("codes", (), "train a vae or a gan, or give --anomalies"),
        ("vae", ("--seed", "9" * 20), "Invalid value for '--seed'"),
        ("points", ("--anomalies",), "a gan has no encoder, so it reconstructs nothing"),
        ("values", ("--map",), "has codes of 3 numbers for examples of the shape (2,)"),
        ("vae", ("--map", "--anomalies"), "are three pictures; give one of them"),
        ("vae", ("--data", "pictures"), "--data has the examples of --map and --anomalies; add one of them"),
        ("vae", ("--out", "a.jpg"), "is not a .png file"),
        ("vae/ema", (), "vae/ema"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run: str, options: tuple, message: str, runs: Path) -> None:
    result = command("sample", runs / run, *options, "--device", "cpu")
    text = f"{result.exception} {' '.join(result.output.replace('│', ' ').split())}"
    assert result.exit_code != 0 and message in text, text


def test_the_images_of_a_map_do_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_plots, "pyplot", lambda: plt)
    monkeypatch.setattr(plt, "close", lambda figure: None)
    sample_plots.latent_map(torch.ones(3, 3, 1, 2, 2), 1.0, tmp_path / "map.png", None, None)
    (axes,) = plt.gcf().axes
    for lines in axes.collections:
        assert len(lines.get_segments()) == 4
    pixels = plt.imread(tmp_path / "map.png")[..., 0]
    column = pixels[:, np.flatnonzero((pixels < 0.1).mean(0) > 0.5)[5]]  # through black images
    assert (np.diff((column < 0.1).astype(int)) == 1).sum() >= 3


def test_a_model_of_text_is_refused(tmp_path: Path) -> None:
    save(SPEC.build(0), tmp_path / "decoder", TOKENIZER)
    result = command("sample", tmp_path / "decoder", "--device", "cpu")
    assert "is a decoder, and sample draws from a vae or a gan" in str(result.exception)


@pytest.mark.ledger("ae.uses")
def test_examples_of_another_kind_have_the_largest_errors() -> None:
    """A linear autoencoder of a line: points beside the line cannot be reconstructed."""
    model = Autoencoder((2,), 1, encoder=MLP(()), decoder=MLP(())).build(0)
    with torch.no_grad():
        model.encoder.out.weight.copy_(torch.tensor([[0.6, 0.8]]))
        model.decoder.out.weight.copy_(torch.tensor([[0.6], [0.8]]))
    usual = torch.linspace(-1, 1, 5).unsqueeze(1) * torch.tensor([[0.6, 0.8]])
    scores = anomaly_scores(model, torch.cat([usual, torch.tensor([[0.8, -0.6]])]))
    assert scores[:5].max() < 1e-12 and abs(scores[5] - 1) < 1e-6


def test_recognition_and_coverage_are_counted() -> None:
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [0, 8.0, 0], [0.1, 0, 0]])
    found = recognized(torch.nn.Identity(), logits)
    assert found.share == 0.75 and found.labels == {0: 1, 1: 2}
    centers = torch.tensor([[0.0, 0], [5, 0], [0, 5]])
    points = torch.tensor(np.repeat([[0.1, 0], [5, 0.1], [3, 3]], [30, 1, 9], 0)).float()
    assert covered_modes(points, centers) == (1, 31 / 40)
    assert covered_modes(points, centers[:2]).modes == 1


def test_near_is_the_distance_within_which_most_real_examples_have_a_known_one() -> None:
    known = torch.tensor([[0.0, 0], [3, 0], [0, 4]])
    assert abs(near_distance(known) - 3.9) < 1e-6  # of 3, 3 and 4
    others = torch.tensor([[0.5, 0], [3, 1]])
    assert abs(near_distance(known, others) - 0.975) < 1e-6  # of 0.5 and 1
    samples = torch.tensor([[0.0, 0.9], [-3, 0], [9, 9], [3, -0.5]])
    assert share_near(samples, known) == 0.75 and share_near(samples, known, others) == 0.5
    assert unexplained(known, known) == 0 and unexplained(known.mean(0).expand_as(known), known) == 1
