"""`regard models`: what there is to talk to, open and compare."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from regard.packaged import PACKAGED


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]…", help="Where to look; by default runs and models here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the models at hand: your runs, folders, GGUF files, and pretrained ones that packages carry.

    \b
    Examples:
      regard models
      regard models ~/models --json
    """
    found = [*at_hand(folders or [Path("runs"), Path("models")]), *packaged()]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for entry in found:
        print(f"{entry['name']}: {entry['what']}")
        print(f"    {entry['where']}" if entry["where"] else f"    not installed; get it with: {entry['remedy']}")


def packaged() -> Iterator[dict[str, str | None]]:
    for name, model in PACKAGED.items():
        remedy = None if model.path else model.remedy
        yield {"name": name, "what": model.what, "where": str(model.path) if model.path else None, "remedy": remedy}


def at_hand(folders: list[Path]) -> Iterator[dict[str, str | None]]:
    """Models in these folders or right below them."""
    for folder in folders:
        for path in [folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())]:
            if (what := kind_of(path)) is not None:
                yield {"name": str(path), "what": what, "where": str(path.absolute()), "remedy": None}


def kind_of(path: Path) -> str | None:
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
    return "a model of ours" if kind == "regard" else f"a Hugging Face folder ({kind})" if kind else None
