"""`regard speculate train`: train a drafter for the speculative decoding of a model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.open_model import DeviceOption, ModelArgument
from regard.find_model import find_model


def train(
    context: typer.Context,
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    method: Annotated[
        Literal["medusa", "eagle"],
        typer.Option(help="medusa: heads on the last hidden state; eagle: a layer that drafts token by token."),
    ] = "medusa",
    data: Annotated[
        Path | None,
        typer.Option(help="A file or folder with examples: text, .jsonl (text, messages …). None by default."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=15, help="Of medusa: heads, which is tokens per draft.")] = 4,
    shared: Annotated[
        bool, typer.Option("--shared", help="Of medusa: use the model's output layer, instead of one for each head.")
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Train a drafter, which proposes tokens that the model verifies several at a time. The model is not changed.

    The examples are those of `regard train --from MODEL`, best of the kind of text that the model will generate. Every
    value of the recipe `finetune` can be overridden by its dotted name, such as --train.steps (1000 by default),
    --train.lr (0.001) and --data.rows (sequences per step). The same command resumes an interrupted training. At the
    end the share of accepted tokens is measured on held-out examples.

    \b
    Examples:
      regard speculate train runs/demo drafts/demo --data.source=world
      regard speculate train smollm2 drafts/smollm2 --shared --data corpus.txt --train.steps=2000
      regard speculate train runs/mine drafts/eagle --method eagle --data corpus.txt --data.rows=8
      regard generate runs/demo --prompt "Anna is in the barn." --speculate medusa:drafts/demo --stats
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    if method == "eagle" and (shared or heads != 4):
        raise ValueError("--heads and --shared are options of --method medusa; leave them out")
    from regard.draft_training import train_drafter
    from regard.training.overrides import parse_overrides

    overrides = parse_overrides(context.args)
    if data is None and not any(name in ("data.path", "data.source", "data.sources") for name in overrides):
        raise ValueError("there are no examples; give a file or folder with --data, or --data.source=world")
    statistics = train_drafter(model, out, method, overrides, data, heads, shared, device)
    if statistics is None:
        raise typer.Exit(130)
    shares = ", ".join(f"{share:.0%}" for share in statistics.acceptance)
    print(f"accepted on held-out text: {shares}, by position in the draft")
    print(f"{statistics.tokens_per_draft:.2f} tokens per forward with a draft")
    print(f"written: {out}; try: regard generate {model} --prompt … --speculate {method}:{out}")
