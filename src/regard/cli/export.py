"""`regard export`: write a model as a Hugging Face folder for `transformers` or a GGUF file for llama.cpp."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.open_model import ModelArgument


def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder or FILE.gguf to write; must not exist.")],
    family: Annotated[
        str | None,
        typer.Option(help="The family to write, by its model_type; by default that of the source, else one that fits."),
    ] = None,
    gguf: Annotated[
        Literal["f32", "f16", "q8_0"] | None,
        typer.Option(help="Number format of the matrices in a GGUF file; f16 by default, q8_0: 8.5 bits per weight."),
    ] = None,
) -> None:
    """Write a model as a Hugging Face folder or a GGUF file.

    \b
    Examples:
      regard export runs/mine exported
      regard export runs/mine mine.gguf --gguf q8_0
    """
    from rich.console import Console

    from regard.checkpoint.gguf import export_gguf
    from regard.checkpoint.model_folder import export as write
    from regard.checkpoint.model_folder import load, read_extra_files, read_source_family
    from regard.checkpoint.sentence_transformers import without_sentence_head
    from regard.cli.open_model import loading_bar, model_folder
    from regard.families import detect_family
    from regard.models.base import Model
    from regard.models.decoder import Decoder
    from regard.text.tokenizer import Tokenizer
    from regard.text.tokenizer_folder import has_tokenizer
    from regard.text.write_gguf import gguf_metadata

    if out.exists():
        raise ValueError(f"{out} exists; choose another name")
    if gguf and out.suffix != ".gguf":
        raise ValueError(f"--gguf {gguf} is for GGUF files, and {out} is the name of a folder; name it {out}.gguf")
    console, folder = Console(stderr=True), model_folder(model)
    with loading_bar(console, f"reading {folder}") as progress:
        network = load(folder, checked=folder != model, progress=progress)
    tokenizer = Tokenizer.load(folder) if folder.suffix == ".gguf" or has_tokenizer(folder) else None
    spec = network.spec
    assert isinstance(spec, Model), f"a model has a spec; found {spec!r:.80}"
    family = family or read_source_family(folder) or detect_family(without_sentence_head(spec))
    if out.suffix == ".gguf":
        vocabulary = gguf_metadata(tokenizer, spec.vocab) if tokenizer and isinstance(spec, Decoder) else None
        export_gguf(network, out, family, gguf or "f16", vocabulary)
        reader = "llama.cpp"
    else:
        write(network, out, family, tokenizer, read_extra_files(folder))
        reader = "transformers"
    console.print(f"{out} is a {family} model for {reader}", soft_wrap=True)
