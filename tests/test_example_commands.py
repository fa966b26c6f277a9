"""The commands in the documentation, in `--help` and in the headers of recipes exist, and their recipes are valid."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

import regard
from regard.cli import app
from regard.cli.open_model import split_recipe
from regard.cli.plan import find_spec
from regard.cli.plan_train import device_plan, overview, parse_devices, parse_split, run_settings
from regard.cli.tune import METHODS
from regard.training.overrides import parse_overrides
from regard.training.recipe import RECIPES, draft_recipe
from regard.training.resume_settings import parse_changes
from regard.training.variations import grid, parse_variations, sample
from regard.training_run import read_tables

ROOT = Path(__file__).parents[1]
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
TRAIN = ("train", "lr-find", "data show", "data prepare")
PAGES = [ROOT / "README.md", ROOT / "docs" / "start.md", *sorted((ROOT / "docs").glob("*/*.md"))]


def examples() -> list[str]:
    """Lines of bash blocks, `--help`, scripts of examples/ and headers of recipes, each from `regard` on."""
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    blocks += [command.callback.__doc__.partition("Examples:")[2] for command in COMMANDS.values()]
    headers = [path.read_text("utf-8") for path in sorted(RECIPES.glob("*.toml"))]
    blocks += [script.read_text("utf-8") for script in (ROOT / "examples").glob("*/run.sh")]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line.removeprefix("#") for header in headers for line in header.splitlines() if line.startswith("#   ")]
    found = (re.match(r"\s*(?:torchrun .*-m )?(regard .*)", line) for line in lines)
    return list(dict.fromkeys(re.split(r"\s{3,}|\s+[#>]", match[1])[0] for match in found if match))


def parse(line: str) -> tuple[str, SimpleNamespace]:
    """The name of the command and its options; `overrides` are the dotted ones."""
    arguments = shlex.split(line)[1:]
    group = get_command(app)
    name, _, rest = group.resolve_command(group.make_context("regard", list(arguments)), arguments)  # type: ignore[attr-defined]
    context = COMMANDS[name].make_context(name, rest)
    return name, SimpleNamespace(overrides=context.args, **context.params)


def is_resolved(line: str) -> bool:
    name, options = parse(line)
    is_of_recipe = name == "verify" and (RECIPES / f"{options.model}.toml").is_file()
    return is_of_recipe or name in (*TRAIN, "tune", "sweep", "plan", "plan train")


@pytest.mark.parametrize("line", examples())
def test_commands_and_their_options_exist(line: str) -> None:
    _, options = parse(line)
    if options.overrides:
        parse_overrides(split_recipe(getattr(options, "recipe", "model"), options.overrides)[1])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, demo_run: Path) -> Path:
    """A folder with the runs and recipes that the examples name, and no data: they are not read."""
    folder = tmp_path_factory.mktemp("reader")
    tiny = {"train.steps": 1, "data.rows": 2, "data.held_out": 0, "tokenizer.by": "byte", "model.layers.0.times": 1}
    regard.train("bert", out=folder / "runs" / "bert", overrides=tiny, device="cpu")
    for name in ("mine", "demo", "book"):
        (folder / "runs" / name).symlink_to(demo_run)
    (folder / "prepared").mkdir()
    for copy in ("mine.toml", "prepared/recipe.toml"):
        (folder / copy).write_text((RECIPES / "llama.toml").read_text("utf-8"), "utf-8")
    return folder


@pytest.mark.parametrize("line", [line for line in examples() if is_resolved(line)])
def test_recipes_and_overrides_are_valid(line: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    name, options = parse(re.sub("smollm2|runs/tuned", "runs/mine", line))  # a model that exists everywhere
    if name in ("plan", "verify"):
        find_spec(str(options.model), options.overrides, options.pattern)
    elif name == "plan train":
        sizes = {size: getattr(options, size) for size in ("rows", "length", "steps")}
        settings = run_settings(options.recipe, options.start, options.overrides, sizes)
        count, device = parse_devices(options.gpus)
        if device is None:
            overview(settings, 0.4)
        elif device != "cpu":  # it would be measured
            device_plan(settings, device, parse_split(options.split, count), 0.4)
    elif name == "sweep" and options.resume is None:
        variations = parse_variations(options.vary)
        trials = sample(variations, options.trials, options.seed) if options.trials else grid(variations)
        for values in trials:
            overrides = parse_overrides(options.overrides) | dict(values)
            draft_recipe(read_tables(options.recipe, overrides, options.start, options.data)[1])
    elif name == "tune":
        overrides = parse_overrides(options.overrides)
        draft_recipe(read_tables(METHODS[options.method], overrides, options.model, options.data)[1])
    elif getattr(options, "resume", None) is not None:
        parse_changes(parse_overrides(options.overrides))
    else:
        recipe, overrides = split_recipe(options.recipe, options.overrides)
        tables = read_tables(recipe, parse_overrides(overrides), options.start, options.data)[1]
        if tables.get("from") == "smollm2":  # of the recipe itself
            tables["from"] = "runs/mine"
            tables["data"]["length"] = 64  # of any model
        draft_recipe(tables, getattr(options, "pattern", None))


def test_there_are_examples_of_every_kind() -> None:
    lines = examples()
    assert len(lines) > 80
    for start in ("regard train --from runs/bert", "regard sweep llama", "regard plan train llama --model.width"):
        assert any(line.startswith(start) for line in lines), start
