"""The tensors of a Hugging Face folder: one `model.safetensors`, or shards named by `model.safetensors.index.json`.

Only headers are read here, each held against its file (`header`); a tensor's bytes are read when it is asked for.
Nothing is ever unpickled. What would be a file of more than 5 GB is written as shards.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from regard.checkpoint import safetensors_header
from regard.checkpoint.folder import CheckpointError
from regard.weights.table import StoredTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_JSON, LARGEST_INDEX = 4 << 20, 12 << 20  # a config is kilobytes, the index of the largest models 9 MB
LARGEST_FILE = 5 * 10**9


def read_json(path: Path, largest: int = LARGEST_JSON) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a model folder holds config.json and {SINGLE}")
    if path.stat().st_size > largest:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; more than {largest} are not read")
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
    places = read_json(folder / INDEX, LARGEST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map should say the file of every tensor")
    for name in set(places.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX}: {name!r} should be the name of a .safetensors file beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / INDEX}: {name} is missing from the folder; fetch it")
    return [folder / name for name in sorted(set(places.values()))]


def find(folder: Path, cast: safetensors_header.Cast, mapped: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, nothing read but headers."""
    found: dict[str, StoredTensor] = {}
    for path in files(folder):
        for name, tensor in safetensors_header.tensors(path, cast, mapped).items():
            if name in found:
                raise CheckpointError(f"{path}: {name} stands in {found[name].file} too")
            found[name] = tensor
    return found


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    parts = shards(tensors, LARGEST_FILE)
    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    for part, name in zip(parts, names if len(parts) > 1 else [SINGLE], strict=True):
        contiguous = {key: tensors[key].detach().contiguous() for key in part}
        save_file(contiguous, folder / name, metadata={"format": "pt"})
    if len(parts) > 1:
        places = {key: name for part, name in zip(parts, names, strict=True) for key in part}
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def shards(tensors: Mapping[str, Tensor], largest: int) -> list[list[str]]:
    """Names in their order, file by file; a tensor that is larger than a file may be has one of its own."""
    parts, size = [[]], 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > largest and parts[-1]:
            parts.append([])
            size = tensor.nbytes
        parts[-1].append(name)
    return parts
