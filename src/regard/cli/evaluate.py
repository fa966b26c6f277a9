"""`regard eval`: the share of held-out examples whose generated output is exactly the target."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import AdapterOption, DataOption, DeviceOption, ModelArgument, split_recipe
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.data.sources.base import Examples
    from regard.evals.generation import GradedOutput

SHOWN_OUTPUTS = 4


def evaluate(
    context: typer.Context,
    model: ModelArgument,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="The recipe of the examples; by default that of the run.")
    ] = None,
    data: DataOption = None,
    count: Annotated[int, typer.Option(min=1, help="The number of examples.")] = 200,
    max_new: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens per example.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Examples that are decoded at once.")] = 32,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all outputs.")] = False,
) -> None:
    """Generate outputs for held-out examples greedily, and compare them with the targets.

    Examples have messages, of which the last is the target, or prompt and completion, or source and target. Of a file
    given by --data all examples are used; of a recipe, those that are not trained on. If the targets are JSON objects,
    the outputs that are objects with the same keys are counted too.

    \b
    Examples:
      regard eval runs/sft
      regard eval smollm2 sft --count 100
      regard eval runs/tuned --data held_out.jsonl
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from rich.console import Console
    from rich.progress import Progress

    from regard.cli.open_model import open_model
    from regard.evals.generation import grade_outputs

    recipe, overrides = split_recipe(recipe, context.args)
    examples = held_out_examples(model, recipe, data, overrides)
    llm, count = open_model(model, device, adapter=adapter), min(count, examples.count or count)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"generating {count} outputs", total=count)
        outputs = grade_outputs(
            llm.model, llm.tokenizer, examples, count, max_new, rows, lambda done: bar.update(task, completed=done)
        )
    print_outputs(outputs, examples.name, as_json)


def held_out_examples(model: Path, recipe: str | None, data: Path | None, overrides: list[str]) -> "Examples":
    """All examples of `data`, or those that the recipe or the run holds out."""
    from regard.data.sources.files import File
    from regard.spec import parse_spec
    from regard.training.data_settings import Data, read_data_table
    from regard.training.recipe import find_recipe, override, parse_overrides, read_recipe
    from regard.training.run import Run

    if data is not None:
        if recipe is not None:
            raise typer.BadParameter(f"the examples are those of --data {data}; omit {recipe}")
        return File(path=str(data)).open(hold_out=False).train
    if recipe is None and not (model / "checkpoints").is_dir():
        raise typer.BadParameter(f"{model} is not a run with a recipe; give a recipe, or examples with --data FILE")
    values = parse_overrides(overrides)
    tables = override(Run.open(model).config, values) if recipe is None else read_recipe(find_recipe(recipe), values)
    settings = parse_spec(read_data_table(tables.get("data", {})), "data", Data)
    assert isinstance(settings, Data)
    examples = settings.open().held_out
    if examples is None:
        raise ValueError(f"{recipe or model} has no held-out examples; give some with --data FILE")
    return examples


def print_outputs(outputs: "list[GradedOutput]", name: str, as_json: bool) -> None:
    correct = sum(output.correct for output in outputs)
    well_formed = sum(bool(output.well_formed) for output in outputs)
    has_form = all(output.well_formed is not None for output in outputs)
    if as_json:
        rates = {"exact_match": correct / len(outputs)} | ({"form": well_formed / len(outputs)} if has_form else {})
        print(json.dumps({**rates, "outputs": [vars(output) for output in outputs]}))
        return
    for output in outputs[:SHOWN_OUTPUTS]:
        print(f"prompt  {output.prompt}\ntarget  {output.target}\noutput  {output.output}\n")
    print(f"{len(outputs)} examples of {name}")
    print(f"exact match                 {correct / len(outputs):.1%}")
    if has_form:
        print(f"objects with the right keys {well_formed / len(outputs):.1%}")
