"""The tensors of a Hugging Face folder: one `model.safetensors`, or shards named by `model.safetensors.index.json`.

Only headers are read here; a tensor's bytes are read when it is asked for, the file opened for it alone, because the
pages of a mapped file count as memory for as long as it is open. Nothing is ever unpickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.checkpoint.folder import CheckpointError
from regard.weights.table import Found

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_JSON = 32 << 20  # a config is kilobytes, the index of the largest models some megabytes


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a model folder holds config.json and {SINGLE}")
    if path.stat().st_size > LARGEST_JSON:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; more than {LARGEST_JSON} is not read")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch or save it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected an object")
    return value


def files(folder: Path) -> list[Path]:
    """The files that hold the weights, each inside the folder."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{folder} holds {pickled[0]}, a pickle that can run code when opened; it is not read. Convert it "
                f"where you trust it: transformers' from_pretrained, then save_pretrained, writes {SINGLE}"
            )
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map should say the file of every tensor")
    for name in set(places.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX}: {name!r} should be the name of a .safetensors file beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / INDEX}: {name} is missing from the folder; fetch it")
    return [folder / name for name in sorted(set(places.values()))]


def find(folder: Path) -> dict[str, Found]:
    """Every tensor of the folder by name, nothing read but headers."""
    found: dict[str, Found] = {}
    for path in files(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    if name in found:
                        raise CheckpointError(f"{path}: {name} stands in {found[name].file} too")
                    part = opened.get_slice(name)
                    found[name] = Found(str(path), tuple(part.get_shape()), part.get_dtype(), reader(path, name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file ({error}); fetch it again") from error
    return found


def reader(path: Path, name: str):
    def read() -> Tensor:
        with safe_open(path, framework="pt") as opened:
            return opened.get_tensor(name)

    return read


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / SINGLE, metadata={"format": "pt"})
