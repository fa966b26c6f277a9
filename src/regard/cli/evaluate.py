"""`regard eval`: a model on held-out examples, by its outputs or by its objective.

Models that generate text are graded by the share of outputs that equal the target of the example, or by a reward. All
others, and examples without targets, by the loss and the metrics of the objective.
"""

import json
import math
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_engine import QuantizeOption, quantize_weights
from regard.cli.open_model import AdapterOption, DataOption, DeviceOption, ModelArgument, split_recipe
from regard.find_model import find_model

if TYPE_CHECKING:
    import torch
    from torch import nn

    from regard.data.sources.base import Example, Examples
    from regard.evals.generation import GradedOutput
    from regard.language_model import LanguageModel
    from regard.objectives.base import Objective
    from regard.training.data_settings import Data

LABELS = {"reward": "mean reward", "exact_match": "exact match", "form": "objects with the right keys"}
SHOWN_OUTPUTS, GENERATED_OUTPUTS = 4, 200
LARGEST_EXPONENT = 700  # of which float64 has the exponential


def evaluate(
    context: typer.Context,
    model: ModelArgument,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="The recipe of the examples; by default that of the run.")
    ] = None,
    data: DataOption = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="The number of examples; 200 if outputs are generated, else all, or as in training."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="Rate the outputs: exact_match, json, module:function, or the folder of a reward model. The examples "
            "need only a prompt."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="The model before training, if the objective compares with it; a run names it."),
    ] = None,
    max_new: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens per example.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Examples that are decoded at once.")] = 32,
    adapter: AdapterOption = None,
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all outputs.")] = False,
) -> None:
    """Evaluate a model on held-out examples: those of its run or of a recipe, or all of a file given by --data.

    If the examples have targets (messages, of which the last is the target, prompt and completion, or source and
    target), a model that generates text answers them greedily, and the outputs that equal their targets are counted.
    If the targets are JSON objects, the outputs that are objects with the same keys are counted too. With --reward, the
    mean reward is printed, for a rule that returns 0 or 1 the share of outputs that follow it.

    Other models and examples are evaluated by the objective of the run or recipe: its loss and metrics, such as the
    accuracy of a classifier; after reinforcement learning by the reward of the run. Each example counts at most once.
    With --tasks the model is evaluated on files of tasks instead: `regard eval tasks --help`.

    \b
    Examples:
      regard eval runs/sft
      regard eval runs/classify
      regard eval runs/reviews --data test.csv
      regard eval smollm2 sft --count 100
      regard eval runs/tuned --data held_out.jsonl
      regard eval runs/tuned --data held_out.jsonl --quantize int8
      regard eval runs/tuned --data prompts.jsonl --reward rewards:short_and_right
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from rich.console import Console
    from rich.progress import Progress

    from regard.data.targets import has_target
    from regard.evals.generation import grade_outputs
    from regard.load_model import load
    from regard.objectives.reinforcement import Reinforcement
    from regard.training.rewards import load_reward

    recipe, overrides = split_recipe(recipe, context.args)
    if recipe is not None and is_task_file(Path(recipe)):
        raise typer.BadParameter(f"{recipe} is a task, not a recipe; use --tasks {recipe}")
    if data is not None and recipe is not None:
        raise typer.BadParameter(f"the examples are those of --data {data}; omit {recipe}")
    tables = recipe_tables(model, recipe, data, overrides) | ({} if start is None else {"from": start})
    llm = load(model, device, adapter=adapter, packed=quantize == "stored")
    if quantize is not None and quantize != "stored":
        quantize_weights(llm.model, quantize)
    settings = read_settings(tables, data, llm)
    examples = settings.open().train if data is not None else settings.open().held_out
    if examples is None:
        raise ValueError(f"{recipe or model} has no held-out examples; give some with --data FILE")
    compute_rewards = None if reward is None else load_reward(reward, device_of(llm), "--reward")
    objective = None if compute_rewards else objective_for(tables, examples, llm)
    if start is not None and (objective is None or not objective.needs_reference):
        raise typer.BadParameter("--from is for objectives that compare with the model before training; omit it")
    answered = generates(llm) and has_target(examples.example(0))
    if isinstance(objective, Reinforcement):
        compute_rewards = load_reward(objective.reward, device_of(llm), weights=objective.reward_weights)
    elif objective is not None and not answered:
        reference = load_reference(tables, objective, device)
        evaluate_objective(llm, objective, examples, settings, count, as_json, reference)
        return
    examples = examples.map(partial(require_prompt, "a generated output" if reward is None else f"--reward {reward}"))
    number = min(count or GENERATED_OUTPUTS, examples.count or count or GENERATED_OUTPUTS)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"generating {number} outputs", total=number)
        outputs = grade_outputs(
            llm.model, llm.tokenizer, examples, number, max_new, rows,
            lambda done: bar.update(task, completed=done), compute_rewards,
        )  # fmt: skip
    print_outputs(outputs, examples.name, as_json)


def is_task_file(path: Path) -> bool:
    """Whether a file has the `kind` of an evaluation task, which no recipe has."""
    from regard.evals.task_file import KINDS

    try:
        return path.suffix == ".toml" and tomllib.loads(path.read_text(encoding="utf-8")).get("kind") in KINDS
    except (OSError, ValueError):
        return False


def require_prompt(needed_by: str, example: "Example") -> "Example":
    if all(example.get(name) is None for name in ("prompt", "messages", "source")):
        raise ValueError(f"{needed_by} needs `prompt`, `messages` or `source`; this example has {', '.join(example)}")
    return example


def recipe_tables(model: Path, recipe: str | None, data: Path | None, overrides: list[str]) -> dict[str, Any]:
    """The tables of the recipe, or of the run; none of a model folder that is evaluated on a file."""
    from regard.training.overrides import override, parse_overrides
    from regard.training.recipe import find_recipe, read_recipe
    from regard.training.run import Run

    values = parse_overrides(overrides)
    if recipe is not None:
        return read_recipe(find_recipe(recipe), values)
    if (model / "checkpoints").is_dir():
        return override(Run.open(model).config, values)
    if data is None:
        raise typer.BadParameter(f"{model} is not a run with a recipe; give a recipe, or examples with --data FILE")
    return override({}, values)


def read_settings(tables: dict[str, Any], data: Path | None, llm: "LanguageModel") -> "Data":
    """The data of the recipe, or the file with its sizes of batches."""
    from regard.spec import parse_spec
    from regard.training.data_settings import Data, read_data_table, with_image_size, without_source
    from regard.training.recipe import context_of

    table = dict(tables.get("data", {}))
    if data is not None:
        limit = context_of(llm.model.spec)
        length = {} if limit is None or "length" in table else {"length": limit}
        table = {**length, **without_source(table), "path": str(data), "held_out": 0}
    table = with_image_size(read_data_table(table), llm.model.spec.to_dict())
    settings = parse_spec(table, "data", Data)
    assert isinstance(settings, Data)
    return settings


def objective_for(tables: dict[str, Any], examples: "Examples", llm: "LanguageModel") -> "Objective | None":
    """The objective of the recipe or run, by default the one for the model; None if it cannot train this model.

    A model that generates no text must have one: ValueError if it has none.
    """
    from dataclasses import replace

    from regard.data.sources.base import Splits
    from regard.objectives.base import Objective, PairError
    from regard.objectives.defaults import check_pair, default_objective
    from regard.objectives.distillation import Distillation
    from regard.objectives.kto import KTO
    from regard.objectives.next_token import NextToken
    from regard.objectives.preference_pairs import PreferencePairs
    from regard.objectives.reinforcement import Reinforcement
    from regard.spec import parse_spec

    spec, table = llm.model.spec, tables.get("objective")
    try:
        if table is not None and "kind" in table:
            objective = parse_spec(table, "objective", Objective)
        else:
            objective = default_objective(spec)
        assert isinstance(objective, Objective)
        check_pair(objective, spec)
    except PairError:
        if not generates(llm):
            raise
        return None
    if "text" in examples.example(0) and isinstance(objective, PreferencePairs | KTO | Reinforcement | Distillation):
        objective = NextToken()  # the perplexity of a text after training on prompts with completions, or by a teacher
    if isinstance(objective, NextToken):
        objective = replace(objective, z_loss=0.0)  # it is no part of the perplexity
    return objective.fit(Splits(examples, None), spec)


def load_reference(tables: dict[str, Any], objective: "Objective", device: str) -> "nn.Module | None":
    """The model that the run started from, if the objective compares with it."""
    from regard.load_model import load

    if not objective.needs_reference:
        return None
    start = tables.get("from", tables.get("start"))
    if start is None:
        raise ValueError(
            f"objective {objective.kind} compares with the model before training, and the recipe does not name it; "
            "give it with --from=MODEL, or use --objective.reference_free=true"
        )
    return load(start, device).model


def device_of(llm: "LanguageModel") -> "torch.device":
    return next(llm.model.parameters()).device


def generates(llm: "LanguageModel") -> bool:
    from regard.engine.inputs import decoder_of

    try:
        decoder_of(llm.model)
    except ValueError:
        return False
    return True


def evaluate_objective(
    llm: "LanguageModel",
    objective: "Objective",
    examples: "Examples",
    settings: "Data",
    count: int | None,
    as_json: bool,
    reference: "nn.Module | None" = None,
) -> None:
    """Print the loss and the metrics of the objective, over one epoch of finite examples at most."""
    from regard.data.batch import Batch
    from regard.data.loader import Loader
    from regard.objectives.next_token import NextToken
    from regard.training.reference import reference_logprobs
    from regard.training.step import evaluate as mean_values

    batches = settings.held_out if examples.count is None else sys.maxsize
    if count is not None:
        batches = -(-count // settings.rows)
    loader = Loader(examples, objective, llm.tokenizer, settings.rows, settings.length, settings.seed)
    rows = size = 0

    def counted() -> "Iterator[Batch]":
        nonlocal rows, size
        for batch in loader.without_repetition(batches):
            batch = batch if count is None else batch.rows(slice(count - rows))
            rows += batch.size
            size += batch.token_count if objective.packed else batch.size
            if reference is not None:
                batch = batch.to(next(reference.parameters()).device)
                batch = Batch(**batch, reference=reference_logprobs(reference, batch))
            yield batch

    values = mean_values(llm.model, objective, counted())
    if not values:
        raise ValueError(f"{examples.name} has too few examples for objective {objective.kind}; give more with --data")
    if isinstance(objective, NextToken):
        # the metrics but for the accuracy are terms of the loss: ahead_1, … of multi-token prediction
        added = sum(value for name, value in values.items() if name not in ("loss", "accuracy"))
        if values["loss"] - added < LARGEST_EXPONENT:
            values["perplexity"] = math.exp(values["loss"] - added)
    if as_json:
        print(json.dumps({"objective": objective.kind, loader.unit: size, **values}))
        return
    print(f"{size:,} {loader.unit} of {examples.name}\nobjective                   {objective.kind}")
    for name, value in values.items():
        print(f"{name:27} {value:.4f}")


def print_outputs(outputs: "list[GradedOutput]", name: str, as_json: bool) -> None:
    rates = {}
    if rewards := [output.reward for output in outputs if output.reward is not None]:
        rates["reward"] = sum(rewards) / len(rewards)
    if all(output.target is not None for output in outputs):
        rates["exact_match"] = sum(output.correct for output in outputs) / len(outputs)
    if all(output.well_formed is not None for output in outputs):
        rates["form"] = sum(bool(output.well_formed) for output in outputs) / len(outputs)
    if as_json:
        print(json.dumps({**rates, "outputs": [vars(output) for output in outputs]}))
        return
    for output in outputs[:SHOWN_OUTPUTS]:
        target = "" if output.target is None else f"target  {output.target}\n"
        print(f"prompt  {output.prompt}\n{target}output  {output.output}\n")
    print(f"{len(outputs)} examples of {name}")
    for key, rate in rates.items():
        print(f"{LABELS[key]:27} " + (f"{rate:.3f}" if key == "reward" else f"{rate:.1%}"))
