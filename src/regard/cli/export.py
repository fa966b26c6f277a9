"""`regard export`: a model as a Hugging Face folder that `transformers` loads, or a GGUF file that llama.cpp runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.model import ModelFolder


def export(
    model: ModelFolder,
    out: Annotated[Path, typer.Argument(help="Where to write the folder, or a file.gguf; must not exist.")],
    family: Annotated[str, typer.Option(help="The foreign family to write, by its model_type.")] = "llama",
    gguf: Annotated[
        Literal["f32", "f16", "q8_0"], typer.Option(help="How a GGUF file keeps its matrices; q8_0: 8.5 bits a weight.")
    ] = "f16",
) -> None:
    """Write a folder that transformers loads, or a GGUF file.

    \b
    Examples:
      regard export runs/mine exported --family llama
      regard export runs/mine mine.gguf --gguf q8_0
    """
    from rich.console import Console

    from regard.checkpoint.gguf import export_gguf
    from regard.checkpoint.model import export as write
    from regard.cli.model import open_model
    from regard.text.gguf import metadata

    if out.exists():
        raise ValueError(f"{out} exists; choose a new name")
    network, tokenizer = open_model(model, "cpu")
    if out.suffix == ".gguf":
        export_gguf(network, out, family, gguf, metadata(tokenizer, network.spec.vocab))
        reader = "llama.cpp"
    else:
        write(network, out, family, tokenizer)
        reader = "AutoModelForCausalLM.from_pretrained"
    Console(stderr=True).print(f"{out} holds a {family} model; {reader} reads it")
