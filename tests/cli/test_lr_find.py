"""`regard lr-find`: a table, a plot and a suggestion; nothing is written but the plot."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import regard
from tests.cli.test_pairs import write_recipe

SMALL = ("--data.rows=2", "--data.length=32", "--data.held_out=1", "--tokenizer.by=byte", "--model.width=24")


def test_a_rate_is_suggested_for_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = regard("lr-find", "demo", *SMALL, "--steps", 12, "--lowest", 1e-4, "--plot", "rates.png")
    assert result.exit_code == 0, result.output
    assert "smoothed loss" in result.output and "Suggested: --train.lr=" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["rates.png"]


def test_a_sweep_computes_its_own_reference_also_for_more_steps_than_the_recipe_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in the default directory of the recipe, which starts from other weights, is neither read nor changed."""
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe("decoder, attention", "dpo", tmp_path)
    assert regard("train", recipe).exit_code == 0
    table = tmp_path / "runs" / "recipe" / "reference.safetensors"
    before, other = table.read_bytes(), ("--train.seed=1", "--steps", 12)
    result = regard("lr-find", recipe, *other)
    assert result.exit_code == 0 and table.read_bytes() == before, result.exception
    table.parent.rename(tmp_path / "elsewhere")
    assert regard("lr-find", recipe, *other).output == result.output


@pytest.mark.parametrize(("kind", "options"), [("grpo", ()), ("distillation", ("on_policy=0.5", "weight=1"))])
def test_objectives_that_sample_are_refused(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The batches would come from the unchanged model."""
    recipe = write_recipe("decoder, attention", kind, tmp_path)
    data = {"prompt": "Cat?", "completion": " yes", "letters": "cat"}
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(data)] * 8), encoding="utf-8")
    result = regard("lr-find", recipe, *(f"--objective.{option}" for option in options))
    assert result.exit_code != 0 and "samples its batches from the model" in result.output, result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a recipe"),
        (("demo", "--steps", 3), "steps=3 is too few"),
        (("demo", "--lowest", 2), "0 < lowest < highest"),
        (("demo", "--train.lrr=1"), "did you mean 'lr'"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple, message: str) -> None:
    options = SMALL if "demo" in arguments else ()
    result = regard("lr-find", *arguments, *options)
    assert result.exit_code != 0 and message in result.output + str(result.exception)
