"""`regard export`: a model as a Hugging Face folder that `transformers` loads, or a GGUF file that llama.cpp runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.open_model import ModelArgument


def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="Where to write the folder, or a file.gguf; must not exist.")],
    family: Annotated[
        str | None, typer.Option(help="The foreign family to write, by its model_type; by default one that fits.")
    ] = None,
    gguf: Annotated[
        Literal["f32", "f16", "q8_0"] | None,
        typer.Option(help="How a GGUF file keeps its matrices: f16 by default; q8_0: 8.5 bits a weight."),
    ] = None,
) -> None:
    """Write a folder that transformers loads, or a GGUF file.

    \b
    Examples:
      regard export runs/mine exported
      regard export runs/mine mine.gguf --gguf q8_0
    """
    from rich.console import Console

    from regard.checkpoint.gguf import export_gguf
    from regard.checkpoint.model_folder import along_of, load
    from regard.checkpoint.model_folder import export as write
    from regard.cli.bar import bar
    from regard.cli.open_model import model_folder
    from regard.families.common.detect import detect_family
    from regard.models.base import Model
    from regard.models.decoder import Decoder
    from regard.text.gguf import gguf_metadata
    from regard.text.tokenizer import Tokenizer
    from regard.text.tokenizer_folder import has_tokenizer

    if out.exists():
        raise ValueError(f"{out} exists; choose a new name")
    if gguf and out.suffix != ".gguf":
        raise ValueError(f"--gguf {gguf} is for a GGUF file, and {out} would be a folder; name it {out}.gguf")
    console, folder = Console(stderr=True), model_folder(model)
    with bar(console, f"reading {folder}") as progress:
        network = load(folder, checked=folder != model, progress=progress)
    spoken = folder.suffix == ".gguf" or has_tokenizer(folder)
    tokenizer = Tokenizer.load(folder) if spoken else None
    spec = network.spec
    assert isinstance(spec, Model), f"a model keeps its spec; found {spec!r:.80}"
    family = family or detect_family(spec)
    if out.suffix == ".gguf":
        words = gguf_metadata(tokenizer, spec.vocab) if tokenizer and isinstance(spec, Decoder) else None
        export_gguf(network, out, family, gguf or "f16", words)
        reader = "llama.cpp"
    else:
        write(network, out, family, tokenizer, along_of(folder))
        reader = "transformers"
    console.print(f"{out} holds a {family} model; {reader} reads it", soft_wrap=True)
