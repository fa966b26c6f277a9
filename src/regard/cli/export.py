"""`regard export`: a model as a Hugging Face folder that `transformers` loads."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.model import ModelFolder


def export(
    model: ModelFolder,
    out: Annotated[Path, typer.Argument(help="Where to write the folder; must not exist.")],
    family: Annotated[str, typer.Option(help="The foreign family to write: llama or gpt2.")] = "llama",
) -> None:
    """Write a folder that transformers loads.

    \b
    Example:
      regard export runs/mine exported --family llama
    """
    from rich.console import Console

    from regard.checkpoint.model import export as write
    from regard.cli.model import open_model

    if out.exists():
        raise ValueError(f"{out} exists; choose a new folder")
    network, tokenizer = open_model(model, "cpu")
    write(network, out, family, tokenizer)
    Console(stderr=True).print(f"{out} holds a {family} model; AutoModelForCausalLM.from_pretrained reads it")
