"""The tensors of a Hugging Face folder: one `model.safetensors`, or shards listed in `model.safetensors.index.json`.

Only headers are read here, each checked against its file (safetensors_header.py); the bytes of a tensor are read on
demand. Nothing is unpickled. A model of more than 5 GB is written as shards.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from regard.checkpoint import safetensors_header
from regard.checkpoint.atomic_folder import CheckpointError
from regard.weights.table import StoredTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES, MAX_INDEX_BYTES = 4 << 20, 12 << 20  # a config has kilobytes, the index of the largest models 9 MB
MAX_SHARD_BYTES = 5 * 10**9
HEADER_BYTES, SAMPLE_BYTES, SAMPLES = 1 << 20, 1 << 12, 256  # of a file, for its fingerprint


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a model folder holds config.json and {SINGLE}")
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size} bytes; files of more than {max_bytes} bytes are not read")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or save it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected an object; download or save it again")
    return value


def find_files(folder: Path) -> list[Path]:
    """The files that hold the weights, all directly inside the folder."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{folder} holds {pickled[0]}, a pickle that can run code when it is loaded; it is not read. Convert "
                f"it in a sandbox: load it with transformers' from_pretrained and write {SINGLE} with save_pretrained"
            )
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; download it again")
    weight_map = read_json(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{folder / INDEX}: weight_map must map every tensor to its file; download it again")
    shards = sorted(set(names))
    for name in shards:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX}: {name!r} must be the name of a .safetensors file in the folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / INDEX}: {name} is missing from the folder; download it")
    return [folder / name for name in shards]


def fingerprint(files: Sequence[Path]) -> str:
    """A SHA-256 sum of the sizes of files and a sample of their bytes: the first MiB, which has the names and shapes of
    the tensors, and 256 blocks of 4 KiB at equal distances to the end.

    Other weights differ in almost every block. A few changed bytes between the blocks are not noticed.
    """
    result = sha256()
    for file in files:
        size = file.stat().st_size
        result.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            result.update(stream.read(HEADER_BYTES))
            rest = max(0, size - HEADER_BYTES - SAMPLE_BYTES)
            for sample in range(1, SAMPLES + 1):
                stream.seek(HEADER_BYTES + rest * sample // SAMPLES)
                result.update(stream.read(SAMPLE_BYTES))
    return result.hexdigest()


def open_tensors(folder: Path, cast: safetensors_header.Cast, mmap: bool = False) -> dict[str, StoredTensor]:
    """All tensors of the folder by name; only headers are read."""
    found: dict[str, StoredTensor] = {}
    for path in find_files(folder):
        for name, tensor in safetensors_header.open_tensors(path, cast, mmap).items():
            if name in found:
                raise CheckpointError(f"{path}: {name} is also in {found[name].file}; download the folder again")
            found[name] = tensor
    return found


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    shards = split_shards(tensors, MAX_SHARD_BYTES)
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for shard, name in zip(shards, names if len(shards) > 1 else [SINGLE], strict=True):
        contiguous = {key: tensors[key].detach().contiguous() for key in shard}
        save_file(contiguous, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split_shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names of tensors per file, in order. A tensor above the limit is the only one in its file."""
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > max_bytes and shards[-1]:
            shards.append([])
            size = tensor.nbytes
        shards[-1].append(name)
    return shards
