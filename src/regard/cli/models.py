"""`regard models`: the models on this machine."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from regard.packaged import PACKAGED

DEFAULT_FOLDERS = (Path("runs"), Path("models"))


def models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="Folders to search; by default ./runs and ./models."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List runs, model folders, GGUF files and pretrained models.

    \b
    Examples:
      regard models
      regard models ~/models --json
    """
    for folder in folders or ():
        if not folder.exists():
            raise ValueError(f"there is no folder {folder}; give a folder that holds models")
    entries = [*stored_models(folders or DEFAULT_FOLDERS), *packaged_models()]
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    for entry in entries:
        print(f"{entry['name']}: {entry['what']}")
        print(f"    {entry['where']}" if entry["where"] else f"    not installed; get it with: {entry['remedy']}")


def packaged_models() -> Iterator[dict[str, str | None]]:
    for name, model in PACKAGED.items():
        remedy = None if model.path else model.install_command
        yield {
            "name": name,
            "what": model.description,
            "where": str(model.path) if model.path else None,
            "remedy": remedy,
        }


def stored_models(folders: Iterable[Path]) -> Iterator[dict[str, str | None]]:
    """The models in these folders, and the folders themselves if they are models."""
    for folder in folders:
        for path in [folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())]:
            if (description := describe(path)) is not None:
                yield {"name": str(path), "what": description, "where": str(path.absolute()), "remedy": None}


def describe(path: Path) -> str | None:
    """The kind of model at a path, or None if there is no model."""
    if path.name.startswith("."):
        return None
    if (path / "checkpoints").is_dir():
        return "a run"
    if path.suffix == ".gguf" and path.is_file():
        return "a GGUF file"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return "a regard model folder" if kind == "regard" else f"a Hugging Face folder ({kind})" if kind else None
