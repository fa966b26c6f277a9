"""What most commands begin with: a model and its tokenizer from a folder, and text out of an engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from regard.engine.engine import Engine
    from regard.engine.request import Sampling, Token
    from regard.models.decoder import Decoder, DecoderModule
    from regard.text.tokenizer import Tokenizer

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, ours or Hugging Face's, or a run.")]
Context = Annotated[
    int | None, typer.Option(min=2, help="Longest text, prompt and answer together; by default the model's own.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU when there is one.")]


def open_model(folder: Path, device: str = "auto") -> "tuple[DecoderModule, Tokenizer]":
    import torch

    from regard.checkpoint.model import load
    from regard.text.tokenizer import Tokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = model_folder(folder)
    return load(found, device, checked=found != folder), Tokenizer.load(found)


def model_folder(path: Path) -> Path:
    """A run stands for its newest whole checkpoint."""
    if not (path / "checkpoints").is_dir():
        return path
    from regard.training.run import Run

    newest = Run.open(path).latest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet; train on with: regard train --resume {path}")
    return newest


def read_spec(name: str, overrides: list[str]) -> "Decoder":
    """The spec in a recipe, in a file of its own, or in a model's folder."""
    from regard.checkpoint.model import understand
    from regard.models.decoder import Decoder
    from regard.spec import read
    from regard.training.recipe import Vocabulary, dotted, find_recipe, override, read_recipe

    if Path(name).is_dir():
        if overrides:
            raise ValueError(f"{name} is a model as it is; {overrides[0]} cannot change it. Override a recipe instead")
        return understand(model_folder(Path(name)))[0]
    path = find_recipe(name)
    if path.suffix == ".json":
        return Decoder.from_dict(override(json.loads(path.read_text(encoding="utf-8")), dotted(overrides)))
    tables = read_recipe(path, dotted(overrides))
    if "model" not in tables:
        return Decoder.from_dict(tables)
    model = tables["model"]
    if "vocab" not in model:
        vocabulary = read(tables.get("tokenizer", {}), "tokenizer", Vocabulary)
        assert isinstance(vocabulary, Vocabulary)
        model = {"vocab": vocabulary.expected, **model}
    return Decoder.from_dict(model)


def speak(
    engine: "Engine",
    tokenizer: "Tokenizer",
    ids: list[int],
    sampling: "Sampling",
    stops: tuple[str, ...] = (),
    continues: bool = False,
) -> "Iterator[tuple[Token, str]]":
    """Each new token with the text that is now certain; ends at a stop string, which is not said.

    `continues`: what comes is one text with the prompt, and no answer to it.
    """
    from regard.text.stream import Detokenizer

    text = Detokenizer(tokenizer, stops, after=ids if continues else ())
    request = engine.submit(ids, sampling)
    try:
        while request.finish is None:
            for owner, token in engine.step():
                if owner is request:
                    piece = text.push(token.id) if token.finish != "stop" else ""
                    yield token, piece + (text.finish() if token.finish and not text.stopped else "")
            if text.stopped:
                return
    finally:
        engine.cancel(request)
    if request.error:
        raise ValueError(request.error)
