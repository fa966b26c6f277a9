"""What most commands begin with: a model and its tokenizer from a folder, and text out of an engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.packaged import locate

if TYPE_CHECKING:
    from regard.models.base import Model
    from regard.models.decoder import Decoder, DecoderModule
    from regard.text.tokenizer import Tokenizer

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run, a model folder (ours or Hugging Face's), a GGUF file, or a name that `regard models` lists.",
    ),
]
Context = Annotated[
    int | None, typer.Option(min=2, help="Longest text, prompt and answer together; by default the model's own.")
]
Pattern = Annotated[
    str | None, typer.Option(help='Layers in one line, in place of the recipe\'s: "3*window(256), full(no_position)".')
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU when there is one.")]


def open_model(folder: Path, device: str = "auto") -> "tuple[DecoderModule, Tokenizer]":
    from regard.checkpoint.model_folder import load
    from regard.cli.device import chosen
    from regard.models.decoder import DecoderModule
    from regard.text.tokenizer import Tokenizer

    found = model_folder(folder)
    model = load(found, chosen(device), checked=found != folder)
    if not isinstance(model, DecoderModule):
        raise ValueError(f"{folder} holds no decoder; this command continues texts and needs one")
    return model, Tokenizer.load(found)


def model_folder(path: Path) -> Path:
    """A run stands for its newest whole checkpoint, a name for the installed model."""
    path = locate(path)
    if not (path / "checkpoints").is_dir():
        return path
    from regard.training.run import Run

    newest = Run.open(path).latest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet; train on with: regard train --resume {path}")
    return newest


def is_stored(name: str) -> bool:
    """Whether this is a model with its weights, and not a recipe."""
    found = locate(name)
    return found.is_dir() or found.suffix == ".gguf"


def read_spec(name: str, overrides: list[str], pattern: str | None = None) -> "Decoder":
    """The decoder in a recipe, in a file of its own, or in a model's folder."""
    from regard.models.decoder import Decoder

    spec = read_model(name, overrides, pattern)
    if not isinstance(spec, Decoder):
        raise ValueError(f"{name} holds a model of kind {spec.kind}; this command reads decoders")
    return spec


def read_model(name: str, overrides: list[str], pattern: str | None = None) -> "Model":
    """The same of any kind of model, with a pattern in place of its layers, if one is given."""
    from regard.models.base import Model
    from regard.models.decoder import Decoder
    from regard.models.pattern import retile
    from regard.spec import SpecError, read

    spec = read(tables_of(name, overrides), "model", Decoder)
    if not isinstance(spec, Model):
        raise SpecError(f"{name} holds no model, but a {spec.kind}")
    return spec if pattern is None else retile(spec, pattern)


def tables_of(name: str, overrides: list[str]) -> "Mapping[str, Any]":
    """A model's spec as plain data."""
    from regard.checkpoint.model_folder import understand
    from regard.spec import read
    from regard.training.recipe import Vocabulary, dotted, find_recipe, override, read_recipe

    if is_stored(name):
        if overrides:
            raise ValueError(f"{name} is a model as it is; {overrides[0]} cannot change it. Override a recipe instead")
        return understand(model_folder(Path(name)))[0].to_dict()
    path = find_recipe(name)
    if path.suffix == ".json":
        return override(json.loads(path.read_text(encoding="utf-8")), dotted(overrides))
    tables = read_recipe(path, dotted(overrides))
    model = tables.get("model", tables)
    if "model" in tables and "vocab" not in model and model.get("kind", "decoder") == "decoder":
        vocabulary = read(tables.get("tokenizer", {}), "tokenizer", Vocabulary)
        assert isinstance(vocabulary, Vocabulary)
        model = {"vocab": vocabulary.expected, **model}
    return model
