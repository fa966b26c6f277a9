"""`regard import`: a Hugging Face folder or a GGUF file into a folder of ours."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    folder: Annotated[
        Path, typer.Argument(help="A folder with config.json, *.safetensors and tokenizer.json, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(help="Where to write the model; must not exist.")],
) -> None:
    """Bring a Hugging Face folder or a GGUF file into a folder of ours.

    \b
    Examples:
      regard import ~/models/my-llama models/my-llama
      regard import ~/models/my-llama.Q4_K_M.gguf models/my-llama
    """
    from rich.console import Console

    from regard.checkpoint.model import load, save
    from regard.packaged import locate
    from regard.text.tokenizer import Tokenizer

    if out.exists():
        raise ValueError(f"{out} exists; choose a new folder")
    console = Console(stderr=True)
    folder = locate(folder)
    spoken = folder.suffix == ".gguf" or (folder / "tokenizer.json").is_file()
    with console.status(f"reading {folder}"):
        model = load(folder)
        tokenizer = Tokenizer.load(folder) if spoken else None
        save(model, out, tokenizer)
    if tokenizer is None:
        console.print(f"[yellow]{folder} has no tokenizer.json: the model was imported without a tokenizer[/]")
    count = sum(p.numel() for p in model.parameters())
    console.print(f"{count:,} parameters in {out}; try: regard generate {out} --prompt …")
