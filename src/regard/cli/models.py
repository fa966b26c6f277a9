"""`regard models`: the models on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from regard.find_model import DEFAULT_FOLDERS, PACKAGED, stored_models


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
        yield {
            "name": name,
            "what": model.description,
            "where": str(model.path) if model.path else None,
            "remedy": None if model.path else model.install_command,
        }
