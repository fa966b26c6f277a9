"""Tensors of a sharded model as safetensors files, independent of the number of processes.

    model-00001-of-00004.safetensors …     whole tensors, each written by one process
    model.safetensors.index.json           tensor -> file, as in Hugging Face folders

Each tensor is gathered when it is written, and only its process keeps a copy, so all processes write equal shares and
none holds the model. Such a folder is an ordinary one: it is loaded, exported and resumed by any number of processes,
which read only their own slices of the tensors. One process writes a single file. No file is a pickle.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import MAX_INDEX_BYTES, read_json
from regard.training.parallel.mesh import Processes


@dataclass(frozen=True)
class Share:
    """The tensors that this process writes to `file`, whole and on the CPU; `index` is written by the main process."""

    tensors: dict[str, Tensor]
    file: str | None  # None: there are more processes than tensors
    index_file: str
    index: dict[str, Any] | None

    def write(self, folder: Path) -> None:
        if self.file is not None:
            save_file(self.tensors, folder / self.file, metadata={"format": "pt"})
            sync_file(folder / self.file)
        if self.index is not None:
            (folder / self.index_file).write_text(json.dumps(self.index, indent=2) + "\n", encoding="utf-8")


def collect_share(tensors: Mapping[str, Tensor], stem: str, processes: Processes) -> Share:
    """Gather the tensors of all processes; each keeps a share. All processes must call it with the same names."""
    writers = assign_writers({name: tensor.nbytes for name, tensor in tensors.items()}, processes.count)
    ranks = sorted(set(writers.values()))
    files = {
        rank: f"{stem}.safetensors" if len(ranks) == 1 else f"{stem}-{number:05}-of-{len(ranks):05}.safetensors"
        for number, rank in enumerate(ranks, start=1)
    }
    kept = {}
    for name, tensor in tensors.items():  # gathering is collective: in the same order in all processes
        whole = whole_tensor(tensor)
        if writers[name] == processes.rank:
            kept[name] = whole.detach().to("cpu", copy=True).contiguous()
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: files[writer] for name, writer in writers.items()},
    }
    has_index = processes.is_main and len(files) > 1
    return Share(kept, files.get(processes.rank), index_name(stem), index if has_index else None)


def assign_writers(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """The process that writes each tensor, so that all write about equally many bytes."""
    totals, writers = [0] * processes, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writers[name] = totals.index(min(totals))
        totals[writers[name]] += max(sizes[name], 1)
    return {name: writers[name] for name in sizes}


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor of which this process has a shard; collective."""
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor, whose import takes a second
    return tensor if gather is None else gather()


def local_tensor(tensor: Any) -> Any:
    """The shard of a tensor in this process, which shares its memory; a plain tensor, or None, is returned as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_like(whole: Any, like: Tensor) -> Tensor:
    """A whole tensor, or a slice of a file, sharded like `like`; without communication."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local = torch.empty(shape, dtype=like.dtype) if 0 in shape else whole[slices].clone()
    return DTensor.from_local(
        local.to(like.device), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def index_name(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


class ShardedFiles:
    """The tensors of all shares, by name; only the slices that are read are loaded."""

    def __init__(self, folder: Path, stem: str, missing_ok: bool = False):
        single, index = folder / f"{stem}.safetensors", folder / index_name(stem)
        if single.is_file():
            names = [single.name]
        elif index.is_file():
            names = sorted(set(read_json(index, MAX_INDEX_BYTES).get("weight_map", {}).values()))
        elif missing_ok:
            names = []
        else:
            raise CheckpointError(f"{folder} has neither {single.name} nor {index.name}; use another checkpoint")
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{index}: {outside[0]!r} must be a file in the folder; use another checkpoint")
        self._files = [safe_open(folder / name, "pt") for name in names]
        self._owner = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a mapping)
        self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name, file in self._owner.items()}

    def read(self, name: str) -> Tensor:
        return self._owner[name].get_tensor(name).clone()  # a copy: loaded tensors are views into the file

    def read_like(self, name: str, like: Tensor) -> Tensor:
        """The tensor, sharded like `like`, which has the same whole shape."""
        if not hasattr(like, "device_mesh"):
            return self.read(name).to(like.device)
        return shard_like(self._owner[name].get_slice(name), like)
