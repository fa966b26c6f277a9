"""`regard train`: recipes, overrides, wrong values, resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.cli import is_expected
from regard.cli.tune import METHODS
from regard.data.sources.base import first_epoch
from regard.data.sources.files import Pydoc
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import NextToken
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.tokenizer import Tokenizer
from regard.training.data_settings import Data, Vocabulary
from regard.training.recipe import RECIPES, Recipe, Training
from regard.training.run import Run
from regard.training_run import train
from tests.cli.conftest import regard

LITTLE_DATA = ("--data.rows=2", "--data.length=64", "--data.held_out=1", "--tokenizer.documents=50")
SMALL = (*LITTLE_DATA, "--model.width=24")
START_FROM_A_MODEL = {"finetune", "sft", "reranker", "reader", *METHODS.values()}  # test_tune.py, test_index.py


@pytest.mark.parametrize("recipe", sorted({path.stem for path in RECIPES.glob("*.toml")} - START_FROM_A_MODEL))
def test_every_recipe_trains_a_few_steps(recipe: str, tmp_path: Path) -> None:
    result = regard("train", recipe, "--out", tmp_path / "run", "--train.steps=2", *LITTLE_DATA)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('--train.freeze=["embeding*"]', "freeze: 'embeding*' matches no parameter"),
        ('--train.lr_scales=[{parameters = "xyz*", scale = 2.0}]', "lr_scales: 'xyz*' matches no parameter"),
        ('--train.freeze=["*"]', "no trainable parameter"),
    ],
)
def test_a_wrong_pattern_leaves_no_run(override: str, message: str, tmp_path: Path) -> None:
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, "--train.steps=1", override)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_overrides_reach_the_saved_config(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = regard(
        "train", "demo", "--out", out, *SMALL, "--train.steps", "1", "--train.lr=5e-4", "--model.layers.0.times=1"
    )
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())
    assert (
        config["train"]["lr"] == 5e-4 and config["model"]["layers"][0]["times"] == 1 and config["model"]["width"] == 24
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--train.lrr=1", "did you mean 'lr'"),
        ("--model.widht=8", "did you mean 'width'"),
        ("--datta.rows=1", "did you mean 'data'"),
        ("--model.layers.7.times=1", "not an index of a list"),
        ("--train.steps=many", "expected int"),
        ("--train.schedule.kind=cosin", "did you mean 'cosine'"),
        ("--model.width=33", "divisible"),
        ("--data.length=513", "longer than model.context=512"),
        ("--model=demo", "model"),
        ("--pattern=windw(8)", "did you mean 'window'"),
    ],
)
def test_wrong_values_are_refused_before_the_tokenizer_is_trained(
    option: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "build", lambda *_: pytest.fail("the tokenizer was trained first"))
    result = regard("train", "demo", "--out", tmp_path / "run", option)
    assert isinstance(result.exception, ValueError) and message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_exactly_one_of_recipe_and_run_is_required(tmp_path: Path) -> None:
    assert regard("train").exit_code == 2
    assert regard("train", "demo", "--resume", tmp_path).exit_code == 2
    assert regard("train", "--resume", tmp_path, "--out", tmp_path).exit_code == 2
    refused = regard("train", "--resume", tmp_path, "--pattern", "full")
    assert refused.exit_code == 2 and "recipe; omit --pattern" in " ".join(refused.output.split())
    assert regard("train", "demo", "--extend").exit_code == 2
    assert "no recipe" in str(regard("train", "dmo").exception) and "demo" in str(regard("train", "dmo").exception)


def test_an_occupied_directory_is_refused_before_the_tokenizer_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.create(tmp_path, {})
    monkeypatch.setattr(Vocabulary, "build", lambda *_: pytest.fail("the tokenizer was trained first"))
    assert "already holds a run" in str(regard("train", "demo", "--out", tmp_path).exception)
    with pytest.raises(ValueError, match="already holds a run"):
        train("demo", out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": ["train.steps=2"]}, "is not a mapping of dotted names"),
        ({"overrides": {5: 2}}, "is not a mapping of dotted names"),
        ({"start": nn.Linear(2, 2)}, "start must be a path, not of type Linear; save the model"),
        ({"data": []}, "data must be a path, not of type list; write the examples"),
        ({"data": (example for example in ())}, "data must be a path, not of type generator"),
        ({"out": 5}, "out must be a path, not of type int"),
        ({"resume": 5}, "resume must be a path, not of type int"),
        ({"recipe": ""}, "there is no recipe"),
        ({"device": None}, "there is no device 'None'"),
        ({"extend": True}, "extend=True is for a resumed run"),
        ({"out": __file__}, "is a file; choose another directory"),
    ],
)
def test_wrong_arguments_in_python_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    small = {"train.steps": 1, "data.rows": 2, "data.length": 16, "tokenizer.by": "byte"}
    given = {"recipe": "demo", "out": tmp_path / "run", "overrides": small, "device": "cpu"}
    with pytest.raises((TypeError, ValueError), match=message):
        train(**(given | arguments))
    assert not (tmp_path / "run").exists()


def test_a_device_of_torch_is_accepted(tmp_path: Path) -> None:
    small = {"train.steps": 1, "data.rows": 2, "data.length": 16, "data.held_out": 0, "tokenizer.by": "byte"}
    assert train("demo", tmp_path / "run", small, device=torch.device("cpu")).finished


def test_a_run_without_a_checkpoint_is_no_model_to_start_from(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", {})
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        train(start=tmp_path / "run", data=__file__, out=tmp_path / "tuned")


def test_a_recipe_written_from_a_spec_is_trained(tmp_path: Path) -> None:
    block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))))
    spec = Decoder(vocab=512, width=16, layers=(Repeat((block,), 2),))
    with pytest.raises(TypeError, match=r"not a recipe's name or TOML file.*regard\.Recipe\(spec"):
        train(spec, out=tmp_path / "run")
    recipe = Recipe(spec, Training(steps=2), Data(rows=2, length=32), Vocabulary(documents=50))
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    for name, given in (("file", tmp_path / "mine.toml"), ("object", recipe), ("tables", recipe.to_dict())):
        assert train(given, out=tmp_path / name, device="cpu").finished
        saved = Recipe.from_dict(Run.open(tmp_path / name).config)
        assert replace(saved, objective=None) == recipe and saved.objective == NextToken()


def test_a_file_is_trained_on_by_its_path_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path replaces the data of the recipe, and the run can be resumed from another directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("".join(f"line {n} of my text\n" for n in range(200)))
    for number, option in enumerate((("--data", "my.txt"), ("--data.path=my.txt",), ("--data.path", "my.txt"))):
        small = (*LITTLE_DATA, "--model.width=24", "--model.layers.0.times=1", "--train.steps=1")
        result = regard("train", "llama", *option, "--out", f"run{number}", *small)
        assert result.exit_code == 0, result.exception
        saved = Recipe.from_dict(Run.open(tmp_path / f"run{number}").config)
        assert [source.path for source in saved.data.sources] == [str(tmp_path / "my.txt")]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "already finished" in regard("train", "--resume", tmp_path / "run0").output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data.source=pydoc", "--data.path=my.txt"), "pydoc has no option 'path'"),
        (("--data.source=pydoc", "--data.level=2"), "pydoc has no option 'level'"),
        (("--data.lvel=2",), "did you mean 'level'"),
        (("--data.source=wrld",), "did you mean 'world'"),
        (("--data.path=none.txt",), "none.txt is not a file or folder"),
    ],
)
def test_wrong_sources_are_refused_and_leave_no_directory(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, *options)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, (), "no token to train on"),
        ({"txt": "a misspelt field"}, (), "an example needs `text`"),
        ({"text": "two rows"}, ("--train.accumulate=3",), "train.accumulate=3 does not divide the 2 rows"),
        ({"text": "on a CPU"}, ("--train.precision=bfloat16",), "needs a CUDA device"),
    ],
)
def test_an_error_before_the_first_step_leaves_no_run(
    line: dict, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text(f"{json.dumps(line)}\n" * 20)
    arguments = ("train", "demo", "--out", out, *SMALL, "--tokenizer.by=byte", "--train.steps=1", "--data", data)
    assert message in str(regard(*arguments, *options).exception)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("of the user")
    assert message in str(regard(*arguments, *options).exception)
    assert [file.name for file in out.iterdir()] == ["notes.txt"]


def test_a_folder_that_no_run_wrote_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "run" / "tokenizer" / "mine.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, "--tokenizer.by=byte", "--train.steps=1")
    assert "belongs to no run" in str(result.exception) and mine.exists()


def test_a_run_in_the_folder_of_its_data_is_refused(tmp_path: Path) -> None:
    """Its samples.txt and its metrics.jsonl would be data when it is resumed."""
    (tmp_path / "a.txt").write_text("many short lines\n" * 100)
    arguments = (*SMALL, "--tokenizer.by=byte", "--train.steps=1", "--data", tmp_path)
    result = regard("train", "demo", "--out", tmp_path / "runs" / "demo", *arguments)
    assert "is inside of its data" in str(result.exception) and not (tmp_path / "runs").exists()


def test_a_very_short_text_is_trained_on_without_evaluation(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a single line\n")
    options = ("--data", tmp_path / "short.txt", "--tokenizer.by=byte", "--train.steps=1")
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, *options)
    assert result.exit_code == 0, result.exception
    assert "too few examples to hold some out" in result.output
    (tmp_path / "more.txt").write_text("many short lines\n" * 100)
    options = ("--data", tmp_path / "more.txt", "--data.held_out=0", "--tokenizer.by=byte", "--train.steps=1")
    result = regard("train", "demo", "--out", tmp_path / "all", *SMALL, *options)
    assert result.exit_code == 0 and "too few" not in result.output


def test_options_of_an_objective_need_no_kind_and_a_long_length_warm_up_is_noted(tmp_path: Path) -> None:
    options = ("--tokenizer.by=byte", "--train.steps=1", "--objective.z_loss=0.01", "--train.length_warmup=9")
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, *options)
    assert result.exit_code == 0, result.exception
    assert json.loads((tmp_path / "run" / "config.json").read_text())["objective"]["z_loss"] == 0.01
    assert "so rows never have all of their 64 tokens" in result.output


def test_a_checkpoint_is_not_resumed_as_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    result = regard("train", "--resume", folder)
    assert f"is a checkpoint; give the directory of its run: {tmp_path / 'run'}" in str(result.exception)


def test_a_start_is_summarized_and_the_whole_recipe_shown_on_request(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = regard("train", "demo", *SMALL, "--out", out, "--show")
    assert shown.exit_code == 0 and not out.exists()
    header = (RECIPES / "demo.toml").read_text().partition("\n\n")[0]
    assert shown.output.startswith(f"{header}\n\n") and "width = 24" in shown.output
    assert "clip = 1.0\n" in shown.output and "z_loss = 0.0\n" in shown.output  # defaults
    recipe = Recipe.from_toml(shown.output)
    result = regard("train", "demo", *SMALL, "--out", out, "--train.steps=1")
    assert result.exit_code == 0, result.exception
    assert f"{out}: decoder, objective next_token, data world" in result.output
    assert f"recipe: {out / 'config.json'}" in result.output and "[train]" not in result.output
    config = json.loads((out / "config.json").read_text())
    assert Recipe.from_dict({**config, "train": recipe.train.to_dict()}) == recipe
    assert regard("train", "--resume", out, "--show").exit_code == 2


def test_overrides_may_precede_the_recipe(tmp_path: Path) -> None:
    result = regard("train", *SMALL, "--train.steps", "1", "demo", "--out", tmp_path / "run", "--train.compile=False")
    assert result.exit_code == 0, result.exception
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["steps"] == 1


def test_a_warm_up_longer_than_the_run_is_noted(tmp_path: Path) -> None:
    notes = "the warm-up of 9 steps is longer than the run of 1"
    for warmup, noted in ((9, True), (1, False)):
        arguments = (*SMALL, "--train.steps=1", f"--train.schedule.warmup={warmup}")
        result = regard("train", "demo", "--out", tmp_path / f"{warmup}", *arguments)
        assert result.exit_code == 0 and (notes in result.output) == noted


def test_an_interrupted_start_leaves_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Tokenizer, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "save", interrupt)
    assert regard("train", "demo", "--out", tmp_path / "run", *SMALL).exit_code == 130
    assert not (tmp_path / "run" / "config.json").exists()
    monkeypatch.undo()
    assert regard("train", "demo", "--out", tmp_path / "run", *SMALL, "--train.steps=1").exit_code == 0


def test_a_run_with_a_short_context_writes_samples(tmp_path: Path) -> None:
    short = ("--data.length=16", "--model.context=16", "--train.steps=1")
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, *short)
    assert result.exit_code == 0, result.exception
    assert "step 1" in (tmp_path / "run" / "samples.txt").read_text()


def test_a_character_vocabulary_covers_all_splits() -> None:
    splits = Data(sources=(Pydoc(),)).open()
    tokenizer = Vocabulary(by="character", documents=1).build(splits)
    for split in splits:
        for example in first_epoch(split, 0):
            tokenizer.encode(example["text"])


def test_a_resumed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    """A run without its last checkpoint is resumed; its weights and losses equal those of an uninterrupted run."""
    whole, resumed = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, resumed):
        assert regard("train", "demo", "--out", out, *SMALL, "--train.steps=4", "--train.save_every=2").exit_code == 0
    for path in sorted((resumed / "checkpoints" / "step-000004").rglob("*"), reverse=True):
        path.unlink()
    (resumed / "checkpoints" / "step-000004").rmdir()
    assert regard("train", "--resume", resumed).exit_code == 0
    again = regard("train", "--resume", resumed)
    assert again.exit_code == 0 and "already finished at step 4" in again.output
    last_weights = Path("checkpoints") / "step-000004" / "model.safetensors"
    assert (whole / last_weights).read_bytes() == (resumed / last_weights).read_bytes()
    losses = [
        [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, resumed)
    ]
    assert losses[0] == losses[1]


def test_settings_are_overridden_on_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert regard("train", "demo", "--out", out, *SMALL, "--train.steps=2").exit_code == 0
    refused = regard("train", "--resume", out, "--model.width=32")
    assert "model.width cannot be changed when a run is resumed, only train.steps" in str(refused.exception)
    refused = regard("train", "--resume", out, "--train.schedule.warmup=0")
    assert "cannot be changed" in str(refused.exception)
    jump = (*("--train.steps", "4"), "--train.lr=1e-4")
    assert regard("train", "--resume", out, *jump).exit_code == 0  # inside the warm-up there is no jump
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    assert train(resume=out, overrides={"train.steps": 5}, device="cpu").step == 5


def test_an_override_that_cannot_be_trained_is_not_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert regard("train", "demo", "--out", out, *SMALL, "--tokenizer.by=byte", "--train.steps=1").exit_code == 0
    result = regard("train", "--resume", out, "--train.accumulate=3", "--train.steps=2", "--extend")
    assert "train.accumulate=3 does not divide the 2 rows" in str(result.exception)
    assert not (out / "changes.jsonl").exists()


def test_a_finished_run_refuses_a_setting_that_would_change_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert regard("train", "demo", "--out", out, *SMALL, "--tokenizer.by=byte", "--train.steps=1").exit_code == 0
    result = regard("train", "--resume", out, "--train.lr=1e-4")
    assert "is finished at step 1, so train.lr would change nothing; to train longer, add" in str(result.exception)
    assert not (out / "changes.jsonl").exists()
    assert regard("train", "--resume", out).exit_code == 0


def test_a_nan_stops_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = NextToken.__call__

    def nan(self, model, batch):
        loss, count, metrics = compute(self, model, batch)
        return loss * float("nan"), count, metrics

    monkeypatch.setattr(NextToken, "__call__", nan)
    result = regard("train", "demo", "--out", tmp_path / "run", *SMALL, "--train.steps=2")
    assert is_expected(result.exception) and "step 1, batch 1 of the loader: the loss" in str(result.exception)
