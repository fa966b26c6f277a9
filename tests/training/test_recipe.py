"""Training settings: the same in Python, JSON and TOML; wrong ones are refused with a hint."""

from pathlib import Path

import pytest

from regard.spec import SpecError
from regard.training.overrides import override
from regard.training.recipe import Training, draft_recipe, find_recipe, read_recipe, resolve
from regard.training.schedule import WarmupStableDecay

SETTINGS = Training(steps=30, lr=1e-2, schedule=WarmupStableDecay(warmup=5), clip=0.0, save_every=0)


def test_settings_round_trip() -> None:
    assert Training.from_json(SETTINGS.to_json()) == SETTINGS
    assert Training.from_toml(SETTINGS.to_toml()) == SETTINGS


def test_settings_are_read_from_toml() -> None:
    text = 'steps = 30\nlr = 1e-2\nclip = 0\nsave_every = 0\n[schedule]\nkind = "wsd"\nwarmup = 5\n'
    assert Training.from_toml(text) == SETTINGS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"steps": 3, "optimizer": {"weight_deca": 0.1}}, "did you mean 'weight_decay'"),
        ({"steps": 3, "schedule": {"kind": "cosin"}}, "did you mean 'cosine'"),
        ({"steps": 3, "schedule": {"kind": "yarn"}}, "choose one of constant, cosine"),
        ({"steps": 3, "optimizer": {"kind": "yarn"}}, "there is no kind 'yarn'; choose one of adafactor, adamw"),
        ({"steps": 3, "nonfinite": "ignore"}, "stop"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": 3, "lr": -1.0}, "lr=-1.0 must be positive"),
        ({"steps": 3, "save_every": -1}, "save_every=-1 must not be negative"),
        ({"steps": 3, "seed": 1 << 80}, "must have at most 63 bits"),
        ({"lr": 1.0}, "needs steps"),
    ],
)
def test_wrong_settings_are_refused(data: dict, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Training.from_dict(data)
    assert message in str(error.value)


def test_a_new_kind_keeps_the_options_that_it_has_too() -> None:
    tables = {
        "train": {"steps": 9, "schedule": {"kind": "wsd", "warmup": 3, "decay": 0.4}, "optimizer": {"beta2": 0.99}}
    }
    changed = override(tables, {"train.schedule.kind": "linear", "train.optimizer.kind": "adafactor"})
    assert changed["train"]["schedule"] == {"kind": "linear", "warmup": 3}
    assert Training.from_dict(changed["train"]).optimizer.kind == "adafactor"
    assert "decay" in tables["train"]["schedule"]
    wrong = override(tables, {"train.schedule.kind": "linear", "train.schedule.decay": 0.3})
    with pytest.raises(SpecError, match="linear has no key 'decay'"):
        Training.from_dict(wrong["train"])
    with pytest.raises(SpecError, match="train.schedule: there is no kind 'lin'; did you mean 'linear'"):
        override(tables, {"train.schedule.kind": "lin"})


@pytest.mark.parametrize("key", ["2", "²", "٠", "-1"])
def test_an_index_of_a_list_is_a_number_below_its_length(key: str) -> None:
    with pytest.raises(SpecError, match=f"'{key}' is not an index of a list of 2; count from 0"):
        override({"data": {"sources": [{"kind": "world"}, {"kind": "text"}]}}, {f"data.sources.{key}.weight": "2"})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"from": 5, "model": {}}, "from=5 is not the path or the name of a model"),
        ({"model": {"kind": [7]}}, "no kind [7]; choose one of autoencoder, decoder, dual_encoder"),
        ({"model": {"kind": "encoder_decoder", "source": 5, "target": 5}}, "source: expected"),
        ({"data": {"seed": -1}}, "seed=-1 must not be negative"),
        ({"tokenizer": {"by": "byte", "path": "folder"}}, "by='byte' does not read path='folder'"),
    ],
)
def test_wrong_tables_are_refused(tables: dict, message: str) -> None:
    with pytest.raises(SpecError) as error:
        resolve(read_recipe(find_recipe("llama")) | tables)
    assert message in str(error.value)


def test_a_recipe_file_is_named_if_it_is_no_utf8(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")  # with a byte order mark
    assert read_recipe(file) == {"train": {"steps": 3}}
    file.write_bytes(b"# caf\xe9")
    with pytest.raises(SpecError, match="recipe.toml is not TOML"):
        read_recipe(file)


def test_options_of_a_source_are_overridden_in_the_list_that_the_resolved_recipe_shows():
    tables = {"data": {"source": "world", "task": "pairs", "rows": 4}}
    assert override(tables, {"data.sources.0.level": "2"})["data"] == {
        "rows": 4,
        "sources": [{"kind": "world", "task": "pairs", "level": 2}],
    }
    changed = override(tables, {"data.sources.0.kind": "images", "data.sources.0.path": "pictures"})
    assert changed["data"] == {"rows": 4, "sources": [{"kind": "images", "path": "pictures"}]}
    assert override({}, {"data.sources.0.level": 2})["data"] == {"sources": [{"kind": "world", "level": 2}]}


@pytest.mark.parametrize(("context", "length"), [(64, 64), (1024, 256)])
def test_the_default_length_is_at_most_the_context(context: int, length: int) -> None:
    tables = read_recipe(find_recipe("llama"), {"model.context": context})
    del tables["data"]["length"]
    assert draft_recipe(tables)[0].data.length == length


def test_a_given_length_is_not_shortened() -> None:
    with pytest.raises(SpecError, match="data.length=128 is longer than model.context=64"):
        draft_recipe(read_recipe(find_recipe("llama"), {"model.context": 64, "data.length": 128}))
