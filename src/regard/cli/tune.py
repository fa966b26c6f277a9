"""`regard tune`: fine-tune a model, or align it, by the recipe of a method."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.open_model import DataOption, DeviceOption
from regard.cli.train import start_training
from regard.find_model import find_model

METHODS = {  # recipes
    "sft": "finetune",
    "reward": "reward",
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "simpo": "simpo",
    "grpo": "grpo",
    "rloo": "rloo",
    "ppo": "ppo",
    "distill": "distill",
}


def tune(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="METHOD", help=f"One of {', '.join(METHODS)}.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder, or the name of a model.")],
    data: DataOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's directory; runs/METHOD by default.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="Of grpo, rloo, ppo: exact_match (by default), json, module:function, or the folder of a reward model."
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Train all weights, at a tenth of the learning rate, instead of the recipe's adapter."
        ),
    ] = False,
    device: DeviceOption = "auto",
    show: Annotated[
        bool, typer.Option("--show", help="Print the recipe with all its overrides and defaults, and train nothing.")
    ] = False,
) -> None:
    """Tune a model on examples. Every value of the method's recipe can be overridden by its dotted name.

    \b
    sft      conversations, or prompts with completions; all weights, unless --adapter.rank=16 is given
    reward   a model that scores completions, from preference pairs: prompt, chosen, rejected; all weights, unless
             --adapter.rank=16 is given: then the adapter and the new head, at ten times the learning rate
    dpo      preference pairs, relative to the model before tuning
    simpo    preference pairs, without a reference
    orpo     preference pairs, beside fine-tuning on the chosen completions
    kto      single completions that are good or bad: prompt, completion, label
    grpo     completions that the model samples, rated by a reward: prompt, and what the reward reads
    rloo     the same, each completion compared with the others of its prompt
    ppo      the same, each token compared with the estimate of a value head
    distill  the examples of sft, with the distributions of a teacher

    \b
    Examples:
      regard tune sft smollm2 --data chats.jsonl --out runs/tuned
      regard tune dpo runs/tuned --data pairs.jsonl --objective.beta=0.05
      regard tune dpo runs/demo --full --data.source=world --data.task=preference
      regard tune reward smollm2 --data pairs.jsonl --out runs/reward
      regard tune reward smollm2 --data pairs.jsonl --adapter.rank=16 --out runs/reward
      regard tune grpo runs/tuned --data prompts.jsonl --reward rewards:short_and_right
      regard tune ppo runs/tuned --data prompts.jsonl --reward runs/reward
      regard tune distill runs/mine --objective.teacher=runs/demo --data chats.jsonl --objective.on_policy=0.5
      regard train --resume runs/dpo
    """
    from regard.spec import suggest_name
    from regard.training.overrides import parse_overrides, quoted
    from regard.training.recipe import FULL_RATE, train_all_weights
    from regard.training_run import read_tables

    if method not in METHODS:
        raise typer.BadParameter(f"{method!r} is not a method; {suggest_name(method, list(METHODS))}")
    find_model(Path(model))  # before torch is imported: a mistyped name is refused at once
    overrides = parse_overrides(context.args) | ({} if reward is None else {"objective.reward": quoted(reward)})
    _, tables = read_tables(METHODS[method], overrides, model, data)
    if not {"path", "source", "sources"} & set(tables["data"]):
        raise typer.BadParameter("there are no examples; give a file or folder with --data")
    if full:
        if given := [name for name in overrides if name.partition(".")[0] == "adapter"]:
            raise typer.BadParameter(f"--full trains all weights and no adapter; remove it, or --{given[0]}")
        tables = train_all_weights(tables, keep_rate="train.lr" in overrides)
    elif method == "reward" and "adapter" in tables and "train.lr" not in overrides:  # the recipe's is for all weights
        tables["train"]["lr"] /= FULL_RATE
    start_training(tables, out or Path("runs") / method, device, METHODS[method], show)
