"""`regard import`: a Hugging Face folder or a GGUF file into a folder of ours."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.open_model import DeviceOption

Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"] | None,
    typer.Option(help="What the weights are kept in; by default what is stored, on a CPU at least float32."),
]


def import_(
    folder: Annotated[
        Path, typer.Argument(help="A folder with config.json, *.safetensors and a tokenizer, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(help="Where to write the model; must not exist.")],
    dtype: Dtype = None,
    device: DeviceOption = "cpu",
) -> None:
    """Bring a Hugging Face folder or a GGUF file into a folder of ours.

    \b
    Examples:
      regard import ~/models/my-llama models/my-llama --dtype bfloat16
      regard import ~/models/my-llama.Q4_K_M.gguf models/my-llama
    """
    import torch
    from rich.console import Console

    from regard.checkpoint.model_folder import along_of, load, save
    from regard.cli.bar import bar
    from regard.cli.device import chosen
    from regard.models.decoder import DecoderModule
    from regard.packaged import locate
    from regard.text.tokenizer import Tokenizer
    from regard.text.tokenizer_folder import has_tokenizer

    if out.exists():
        raise ValueError(f"{out} exists; choose a new folder")
    console = Console(stderr=True)
    folder = locate(folder)
    spoken = folder.suffix == ".gguf" or has_tokenizer(folder)
    tokenizer = Tokenizer.load(folder) if spoken else None
    along = along_of(folder)
    with bar(console, f"reading {folder}") as progress:
        model = load(folder, chosen(device), dtype and getattr(torch, dtype), progress=progress)
    with console.status(f"writing {out}"):
        save(model, out, tokenizer, along)
    if tokenizer is None:
        console.print(f"[yellow]{folder} has no tokenizer: the model was imported without a tokenizer[/]")
    count = sum(p.numel() for p in model.parameters())
    speaks = tokenizer is not None and isinstance(model, DecoderModule)
    hint = f"; try: regard generate {out} --prompt …" if speaks else ""
    console.print(f"{count:,} parameters in {out}{hint}", soft_wrap=True)
