"""`regard train --from`: all weights or adapters of a run or folder are trained on the user's examples."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.adapt.quantized import QuantizedLinear
from regard.checkpoint import model_folder
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import fingerprint
from regard.cli.sweep import new_sweep
from regard.formats.integers import Integer
from regard.load_model import load
from regard.planning import machine
from regard.training.overrides import parse_overrides
from regard.training.recipe import Recipe
from regard.training.run import Run
from regard.training_run import needed_checkpoints, path_overrides, train
from tests.cli.conftest import regard

SMALL = ("--data.rows=2", "--data.length=48", "--data.held_out=1", "--train.steps=3", "--train.save_every=2")
MODEL = ("--model.width=24", "--tokenizer.documents=50", "--train.steps=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "run"
    assert regard("train", "demo", "--out", path, *MODEL, *SMALL[:3]).exit_code == 0
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"Where is {n}?"}, {"role": "assistant", "content": f"At {n}."}]}
        for n in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "chats.jsonl"


def test_adapters_are_trained_saved_and_loaded_with_their_model(base: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    options = ("--from", base, "--data", chats, "--adapter.rank=2", "--train.lr=0.01", "--train.schedule.warmup=1")
    result = regard("train", *options, "--out", out, *SMALL)
    assert result.exit_code == 0, result.exception
    newest = Run.open(out).latest()
    tensors = load_file(newest / "adapter_model.safetensors")
    assert all(".lora_" in name for name in tensors) and not (newest / "model.safetensors").exists()
    assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if ".lora_B." in name)
    before, tuned = load(base, "cpu"), load(out, "cpu")
    ids = torch.tensor([before.tokenizer.encode("Where is Anna?")])
    assert (tuned.model(ids) - before.model(ids)).abs().max() > 1e-4
    assert isinstance(tuned.chat([{"role": "user", "content": "Where is 3?"}], max_new=3), str)
    assert json.loads((newest / "adapter_config.json").read_text())["base_model_name_or_path"].startswith(str(base))


@pytest.mark.parametrize("name", ["1e3", "true", "2024-01-01", '["x"]'])
def test_a_path_is_no_other_value_of_toml(
    name: str, base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model, of data, and of a reward; a trial of a sweep reads the same paths."""
    monkeypatch.chdir(tmp_path)
    for start, data, linked in ((name, chats, base), (base, name, chats)):
        Path(name).symlink_to(linked)
        sweep = new_sweep("finetune", ["adapter.rank=2"], Path("sweep"), None, 0, "cpu", path_overrides(start, data))
        for command in (("train", "--from", start, "--data", data), sweep.command(sweep.trials[0])):
            shown = regard(*command, "--show")
            assert shown.exit_code == 0, shown.exception
            table = tomllib.loads(shown.stdout)
            assert Path(table["from"]).resolve().is_relative_to(base)
            assert Path(table["data"]["sources"][0]["path"]).resolve() == chats
        Path(name).unlink()
    shown = regard("tune", "ppo", base, "--data", chats, "--reward", name, "--show")
    assert tomllib.loads(shown.stdout)["objective"]["reward"] == name


def test_a_fine_tuned_run_resumes_bit_identically(base: Path, chats: Path, tmp_path: Path) -> None:
    quantized = {"adapter.rank": 2, "adapter.base": {"kind": "integer", "bits": 4}}
    for name, adapter in {"all": {}, "adapter": {"adapter.rank": 2}, "quantized": quantized}.items():
        overrides = {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 4, "train.save_every": 2}
        whole, cut = tmp_path / f"{name}-whole", tmp_path / f"{name}-cut"
        for out in (whole, cut):
            train(start=base, data=chats, out=out, overrides=overrides | adapter, device="cpu")
        last = Path("checkpoints") / "step-000004"
        for file in (cut / last).iterdir():
            file.unlink()
        (cut / last).rmdir()
        assert train(resume=cut, device="cpu").finished
        weights = last / ("adapter_model.safetensors" if adapter else "model.safetensors")
        assert (whole / weights).read_bytes() == (cut / weights).read_bytes()
        layers = [module for module in load(cut, "cpu").model.modules() if isinstance(module, QuantizedLinear)]
        assert {layer.format for layer in layers} == ({Integer(4)} if name == "quantized" else set())


def test_all_weights_start_from_those_of_the_model(base: Path, chats: Path, tmp_path: Path) -> None:
    overrides = {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 1, "train.lr": 1e-9}
    assert train(start=base, data=chats, out=tmp_path / "run", overrides=overrides, device="cpu").finished
    before, after = load(base, "cpu").model.state_dict(), load(tmp_path / "run", "cpu").model.state_dict()
    assert before.keys() == after.keys()
    assert all((before[name] - after[name]).abs().max() < 1e-7 for name in before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model.width=32",), "both `from` and [model]"),
        (("--adapter.rnk=2",), "did you mean 'rank'"),
        (
            ("--objective.kind=classification",),
            "this model is a decoder; set objective.kind to one that trains it (next_token, ",
        ),
        (("--head.kind=classification", "--head.pool=cls"), "the first token of a decoder attends to itself only"),
        (("--data.length=100000",), "longer than model.context"),
    ],
)
def test_wrong_options_are_refused_and_leave_no_directory(
    base: Path, chats: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = regard("train", "--from", base, "--data", chats, "--out", tmp_path / "run", *SMALL, *options)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_model_is_fine_tuned_only_on_given_data(base: Path, tmp_path: Path) -> None:
    result = regard("train", "--from", base, "--out", tmp_path / "run")
    assert "no data to fine-tune" in str(result.exception)
    result = regard("train", "demo", "--adapter.rank=2", "--out", tmp_path / "run")
    assert "a new model has random ones" in str(result.exception)  # which are saved nowhere


def test_an_unknown_model_to_start_from_is_refused(chats: Path, tmp_path: Path) -> None:
    result = regard("train", "--from", "smolm2", "--data", chats, "--out", tmp_path / "run")
    assert "did you mean 'smollm2'" in str(result.exception)


def test_training_continues_from_a_run_with_adapters(base: Path, chats: Path, tmp_path: Path) -> None:
    """The adapter is merged into its model; another run trains all weights, or a new adapter, from there."""
    small = {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 2, "train.schedule.warmup": 1}
    options = {"adapter.rank": 2, "train.lr": 0.05}
    train(start=base, data=chats, out=tmp_path / "first", overrides=small | options, device="cpu")
    train(
        start=tmp_path / "first", data=chats, out=tmp_path / "all", overrides=small | {"train.lr": 1e-9}, device="cpu"
    )
    train(start=tmp_path / "first", data=chats, out=tmp_path / "second", overrides=small | options, device="cpu")
    first, continued, second = (load(tmp_path / name, "cpu").model for name in ("first", "all", "second"))
    ids = torch.tensor([[7, 8, 9, 10]])
    assert (continued(ids) - first(ids)).abs().max() < 1e-4 < (second(ids) - first(ids)).abs().max()


def test_a_finished_run_needs_its_start_only_for_adapters(base: Path, chats: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    small = {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 1}
    train(start=copy, data=chats, out=tmp_path / "all", overrides=small, device="cpu")
    recipe = Recipe.from_dict(Run.open(tmp_path / "all").config)
    assert recipe.start.startswith(str(copy)) and "from = " in recipe.to_toml()
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    shutil.rmtree(copy)
    assert train(resume=tmp_path / "all", device="cpu").finished


def test_the_recipe_sft_runs_on_a_small_model_and_is_graded(base: Path, tmp_path: Path) -> None:
    result = regard("train", "sft", "--from", base, "--out", tmp_path / "sft", *SMALL[:3], "--train.steps=2")
    assert result.exit_code == 0, result.exception
    recipe = Recipe.from_dict(Run.open(tmp_path / "sft").config)
    assert recipe.adapter.rank == 16 and recipe.data.sources[0].task == "record"
    result = regard("eval", tmp_path / "sft", "--count", 2, "--max-new", 4)
    assert "objects with the right keys 0.0%" in result.stdout, result.exception


def other_weights(checkpoint: Path) -> None:
    """Replace the weights by others of the same shapes, with a valid manifest."""
    model = model_folder.load(checkpoint)
    with torch.no_grad():
        model.embedding.weight.mul_(1.1)
    save_file({name: p.detach() for name, p in model.named_parameters()}, checkpoint / "model.safetensors")
    (checkpoint / "manifest.json").unlink()


def test_an_adapter_is_not_used_with_other_weights(base: Path, chats: Path, tmp_path: Path) -> None:
    copy, small = tmp_path / "copy", {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 2}
    shutil.copytree(base, copy)
    train(start=copy, data=chats, out=tmp_path / "run", overrides=small | {"adapter.rank": 2}, device="cpu")
    start = Path(Recipe.from_dict(Run.open(tmp_path / "run").config).start)
    other_weights(start)
    with pytest.raises(CheckpointError, match="are not those that .* was trained from"):
        train(resume=tmp_path / "run", overrides={"train.steps": 3}, extend=True, device="cpu")
    with pytest.raises(CheckpointError, match="their fingerprints differ"):
        load(tmp_path / "run", "cpu")
    with pytest.raises(CheckpointError, match="their fingerprints differ"):
        train(start=tmp_path / "run", data=chats, out=tmp_path / "next", overrides=small, device="cpu")
    assert not (tmp_path / "next").exists()


def test_a_run_without_a_checkpoint_needs_the_same_initial_weights(base: Path, chats: Path, tmp_path: Path) -> None:
    copy, small = tmp_path / "copy", {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 2}
    shutil.copytree(base, copy)
    train(start=copy, data=chats, out=tmp_path / "run", overrides=small, device="cpu")
    other_weights(Path(Recipe.from_dict(Run.open(tmp_path / "run").config).start))
    assert train(resume=tmp_path / "run", device="cpu").finished  # all weights are in the checkpoint
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="their fingerprints differ"):
        train(resume=tmp_path / "run", device="cpu")


@pytest.mark.parametrize("kind", ["dpo", "reinforce"])
def test_a_run_with_a_reference_needs_the_same_initial_weights(kind: str, base: Path, tmp_path: Path) -> None:
    """They are loaded again when it is resumed, although all trained weights are in its checkpoint."""
    copy, task = tmp_path / "copy", "preference" if kind == "dpo" else "question"
    shutil.copytree(base, copy)
    overrides = parse_overrides(SMALL) | {"data.source": "world", "data.task": task, "data.length": 128}
    overrides |= {"objective.kind": kind} | ({} if kind == "dpo" else {"objective.kl": 0.1, "objective.max_new": 4})
    train(start=copy, out=tmp_path / "run", overrides=overrides, device="cpu")
    other_weights(Path(Recipe.from_dict(Run.open(tmp_path / "run").config).start))
    with pytest.raises(CheckpointError, match="their fingerprints differ"):
        train(resume=tmp_path / "run", overrides={"train.steps": 4}, extend=True, device="cpu")


def test_the_fingerprint_depends_on_size_and_content(tmp_path: Path) -> None:
    file, content = tmp_path / "weights", bytearray(range(256)) * 20_000
    prints = set()
    for change in (lambda: None, lambda: content.pop(), lambda: content.append(7), lambda: content.reverse()):
        change()
        file.write_bytes(content)
        prints.add(fingerprint([file]))
    assert len(prints) == 4 and fingerprint([file]) in prints


def test_memory_is_checked_before_a_run_is_resumed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(base, tmp_path / "run")
    monkeypatch.setattr(machine, "machine_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="training this model needs at least"):
        train(resume=tmp_path / "run", overrides={"train.steps": 3}, extend=True, device="cpu")


def test_a_sweep_varies_the_fine_tuning_of_a_model(base: Path, chats: Path, tmp_path: Path) -> None:
    options = parse_overrides(SMALL) | path_overrides(base, chats)
    sweep = new_sweep("finetune", ["adapter.rank=2,4"], tmp_path / "sweep", None, 0, "cpu", options)
    sweep.check()
    assert regard(*sweep.command(sweep.trials[1])).exit_code == 0
    recipe = Recipe.from_dict(Run.open(tmp_path / "sweep" / "trial-002").config)
    assert recipe.adapter.rank == 4 and recipe.start.startswith(str(base)) and recipe.data.sources[0].path == str(chats)
    assert "a model to fine-tune (--from MODEL)" in regard("sweep", "--vary", "adapter.rank=2,4").stderr


def test_the_checkpoint_of_an_adapter_is_kept_when_its_run_goes_on(base: Path, chats: Path, tmp_path: Path) -> None:
    copy, tuned, small = tmp_path / "copy", tmp_path / "run", {"data.rows": 2, "data.length": 48, "data.held_out": 0}
    shutil.copytree(base, copy)
    overrides = small | {"train.steps": 2, "train.lr": 0.05, "adapter.rank": 2}
    train(start=copy, data=chats, out=tuned, overrides=overrides, device="cpu")
    ids, start = torch.tensor([[7, 8, 9, 10]]), Path(Recipe.from_dict(Run.open(tuned).config).start)
    expected = load(tuned, "cpu").model(ids)
    train(resume=copy, overrides={"train.steps": 6, "train.save_every": 1}, extend=True, device="cpu")
    assert [folder.name[-1] for folder in Run.open(copy).checkpoints] == ["6", "5", "2"]
    assert torch.equal(load(tuned, "cpu").model(ids), expected)
    assert train(resume=tuned, overrides={"train.steps": 3}, extend=True, device="cpu").finished
    shutil.rmtree(start)
    for use in (lambda: load(tuned, "cpu"), lambda: train(resume=tuned, device="cpu")):
        with pytest.raises(CheckpointError, match=r"was trained from .*step-000002, which does not exist any more"):
            use()


def test_the_checkpoints_of_a_teacher_and_of_a_reference_are_kept(base: Path, chats: Path, tmp_path: Path) -> None:
    copy, small = tmp_path / "copy", {"data.rows": 2, "data.length": 48, "data.held_out": 0, "train.steps": 1}
    shutil.copytree(base, copy)
    shutil.rmtree(copy / "references", ignore_errors=True)  # of other tests
    train(start=copy, data=chats, out=tmp_path / "plain", overrides=small, device="cpu")
    assert not Run.open(copy).referenced
    taught = small | {"objective.kind": "distillation", "objective.teacher": str(copy)}
    train(start=base, data=chats, out=tmp_path / "student", overrides=taught, device="cpu")
    teacher = Path(Run.open(tmp_path / "student").config["objective"]["teacher"])
    assert Run.open(copy).referenced == {teacher}
    shutil.rmtree(copy / "references")  # as if the start had been killed before
    train(resume=tmp_path / "student", device="cpu")
    assert Run.open(copy).referenced == {teacher}
    judged = {"kind": "grpo", "reward": "/reward/checkpoints/step-000002", "reward_weights": "a fingerprint"}
    for objective, needed in (
        ({"kind": "grpo", "kl": 0.1}, 1),
        ({"kind": "grpo"}, 0),
        (judged, 1),
        ({"kind": "dpo"}, 1),
    ):
        recipe = Recipe.from_dict(Run.open(tmp_path / "plain").config | {"objective": objective})
        assert len(needed_checkpoints(recipe)) == needed


def test_a_start_that_fails_keeps_no_checkpoint(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("regard.training_run.run_training", fail)
    small = {"data.rows": 2, "data.length": 48, "data.held_out": 1, "train.steps": 2, "adapter.rank": 2}
    shutil.copytree(base, tmp_path / "copy")
    referenced = Run.open(tmp_path / "copy").referenced  # by the runs of other tests
    with pytest.raises(RuntimeError):
        train(start=tmp_path / "copy", data=chats, out=tmp_path / "run", overrides=small, device="cpu")
    assert Run.open(tmp_path / "copy").referenced == referenced and not (tmp_path / "run").exists()


def test_a_quantized_base_is_for_one_process(base: Path, chats: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    overrides = {"adapter.rank": 2, "adapter.base.kind": "integer", "data.rows": 2, "data.length": 48}
    with pytest.raises(ValueError, match=r"adapter\.base is for one process"):
        train(start=base, data=chats, out=tmp_path / "run", overrides=overrides, device="cpu")
    assert not (tmp_path / "run").exists()
