"""`regard import`: convert a Hugging Face folder or a GGUF file to a regard model folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.open_model import DeviceOption

Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"] | None,
    typer.Option(help="Dtype of the weights; by default the stored one, on a CPU at least float32."),
]


def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A folder with config.json and *.safetensors, or a GGUF file."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    dtype: Dtype = None,
    device: DeviceOption = "cpu",
) -> None:
    """Convert a Hugging Face folder or a GGUF file.

    The result is a regard model folder, which every command reads.

    \b
    Examples:
      regard import ~/models/my-llama models/my-llama --dtype bfloat16
      regard import ~/models/my-llama.Q4_K_M.gguf models/my-llama
    """
    from rich.console import Console

    from regard.checkpoint.atomic_folder import check_new
    from regard.checkpoint.model_folder import load, read_extra_files, read_source_family, save
    from regard.cli.open_model import loading_bar
    from regard.compat import resolve_device, resolve_dtype
    from regard.find_model import find_model
    from regard.models.decoder import DecoderModule
    from regard.models.encoder_decoder import EncoderDecoderModule
    from regard.models.interleaved import InterleavedModule
    from regard.text.tokenizer import Tokenizer
    from regard.text.tokenizer_folder import has_tokenizer

    check_new(out)
    console = Console(stderr=True)
    folder = find_model(folder)
    tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) else None
    extra_files = read_extra_files(folder)
    with loading_bar(console, f"reading {folder}") as progress:
        model = load(folder, resolve_device(device), resolve_dtype(dtype), progress=progress)
    with console.status(f"writing {out}"):
        save(model, out, tokenizer, extra_files, read_source_family(folder))
    if tokenizer is None:
        console.print(f"[yellow]imported without a tokenizer, because {folder} has none[/]")
    count = sum(p.numel() for p in model.parameters())
    generates = tokenizer is not None and isinstance(model, DecoderModule | EncoderDecoderModule | InterleavedModule)
    hint = f"; try: regard generate {out} --prompt …" if generates else ""
    console.print(f"{count:,} parameters in {out}{hint}", soft_wrap=True)
