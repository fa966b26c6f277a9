"""A model as a folder: `config.json`, `model.safetensors`, and the tokenizer's files beside them.

    save(model, folder)              our own format: the config holds the spec
    load(folder)                     ours, or a Hugging Face folder of a family that is known, or a GGUF file
    export(model, folder, "llama")   a Hugging Face folder that `transformers` loads

Before a byte of weights is read, the sizes in the config are held against the sizes of the files, and every name and
shape against the headers. Then tensors stream in one by one, read into the memory they keep: the peak is one copy of
the model and, where they are cast or turned, one tensor.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.checkpoint.folder import MANIFEST, CheckpointError, check_folder, write_folder
from regard.checkpoint.gguf import open_gguf
from regard.checkpoint.sentence_transformers import sentence_head
from regard.checkpoint.weight_files import find, read_json, write
from regard.families import family
from regard.families.common.detect import family_config
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.meta_device import build_on_meta, meta_device
from regard.models.stack import Repeat, Stack, stacks_of, without_repeats
from regard.packaged import locate
from regard.spec import SpecError, read
from regard.weights.table import IDENTITY, Chain, Table

OURS = "regard"
REFUSED = {
    "auto_map": "it asks for code from the folder, and none is ever run; if the plain model is meant, remove the key",
    "quantization_config": "quantized weights are not read; fetch the model in full precision",
}
ALONG = ("generation_config.json", "preprocessor_config.json")
Progress = Callable[[int, int], object]


class Saves(Protocol):
    """What is asked of a tokenizer: to write its files."""

    def save(self, folder: Path) -> None: ...


def save(
    model: nn.Module, folder: str | Path, tokenizer: Saves | None = None, along: Mapping[str, bytes] | None = None
) -> None:
    """`along`: files that go with the model as they are."""
    with write_folder(folder) as partial:
        write_files(model, partial, tokenizer)
        write_along(partial, along)


def write_files(model: nn.Module, folder: Path, tokenizer: Saves | None = None) -> None:
    """What `save` puts into its folder, into one that is being written."""
    spec = model.spec
    assert isinstance(spec, Model), f"a model keeps its spec; found {spec!r:.80}"
    strange = sorted(weights(model).keys() ^ weights(build_on_meta(spec)).keys())
    if strange:
        raise CheckpointError(f"{strange[0]} does not go with the spec; merge adapters before saving the model")
    write_model(folder, {"model_type": OURS, "spec": spec.to_dict()}, weights(model), tokenizer)


def export(
    model: nn.Module,
    folder: str | Path,
    model_type: str,
    tokenizer: Any | None = None,
    along: Mapping[str, bytes] | None = None,
) -> None:
    foreign, spec = family(model_type), model.spec
    assert isinstance(spec, Model), f"a model keeps its spec; found {spec!r:.80}"
    marks = {f"{name}_token_id": getattr(tokenizer, name, None) for name in ("bos", "eos", "pad")}
    config = (
        marks | family_config(model_type, spec) | {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    )
    with write_folder(folder) as partial:
        write_model(partial, config, dict(foreign.table(spec).write(weights(model))), tokenizer)
        write_along(partial, along)


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    checked: bool = False,
    progress: Progress | None = None,
    mapped: bool = False,
) -> nn.Module:
    """The model of a folder or GGUF file, in eval mode. Without a dtype the stored one, on a CPU at least float32.

    A folder of ours is held against its manifest, unless that has just been done (`checked`). `progress` is told after
    every tensor how many parameters are there, and of how many. The model owns its memory; if it is `mapped`, tensors
    that need no cast are read from their file when they are used, which must then stay as it is. A GGUF file is never
    mapped: its tensors are turned or unpacked on the way.
    """
    folder, device = locate(folder), torch.device(device)
    if folder.suffix == ".gguf":
        spec, table, found = open_gguf(folder)
    else:
        spec, table = understand(folder)
        if table is IDENTITY and (folder / MANIFEST).is_file() and not checked:
            check_folder(folder)
        found = find(folder, partial(kept, device, dtype), mapped)
    layers = sum(len(run.blocks) for runs, _ in stacks_of(spec) for run in runs)
    if layers > 1000 + 4 * len(found):  # they are not even counted
        raise CheckpointError(f"{folder}: the config asks for {layers} layers, the files have {len(found)} tensors")
    stored, needed = sum(math.prod(tensor.shape) for tensor in found.values()), parameters(spec)
    if needed > 4 * stored:  # some tensors are read more than once
        raise CheckpointError(f"{folder}: the config asks for {needed} parameters, the files have {stored}")
    model = build_on_meta(spec)
    wanted = weights(model)
    tensors, arrived, total = {}, 0, count(model)
    for name, tensor in table.read(found, wanted):
        tensors[name] = nn.Parameter(arrive(tensor, device, dtype), wanted[name].requires_grad)
        arrived += tensor.numel()
        if progress is not None:
            progress(arrived, total)
    for name, parameter in tied(model):
        tensors[name] = tensors[parameter]
    model.load_state_dict(tensors, assign=True)
    return model.to(device).eval()


def understand(folder: Path) -> tuple[Model, Table | Chain]:
    """What the folder's config says: the spec, and how its tensors are named."""
    if folder.suffix == ".gguf":
        return open_gguf(folder)[:2]
    config = read_json(folder / "config.json")
    if config.get("model_type") == OURS:
        try:
            spec = read(config.get("spec", {}), "spec", Decoder)
        except RecursionError as error:
            raise CheckpointError(f"{folder}: the spec in config.json is nested too deeply") from error
        if not isinstance(spec, Model):
            raise SpecError(f"{folder}: the spec in config.json is no model, but a {spec.kind}")
        return spec, IDENTITY
    for key, why in REFUSED.items():
        if config.get(key) is not None:
            raise CheckpointError(f"{folder}: config.json has {key!r}: {why}")
    foreign = family(config.get("model_type"))
    spec = foreign.spec(config)
    table = foreign.table(spec)
    if isinstance(spec, Encoder) and spec.head is None:
        spec = replace(spec, head=sentence_head(folder))
    return spec, table


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, under its first name: tied ones are one."""
    return dict(model.named_parameters())


def tied(model: nn.Module) -> Iterable[tuple[str, str]]:
    """The other names of parameters that have more than one, each with its first name."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            yield name, first[id(parameter)]


def parameters(spec: Model) -> int:
    """How many there will be, from one of every run of layers: a config may claim any depth, and it is not built."""
    runs = [(run, width) for layers, width in stacks_of(spec) for run in layers if run.times > 1]
    try:
        with meta_device():
            more = {(run, width): added(run, width) for run, width in runs}
        built = count(build_on_meta(without_repeats(spec)))
    except (RuntimeError, TypeError) as error:  # what torch raises for a size past 64 bits
        raise CheckpointError(f"the config asks for tensors past all measure ({error})") from error
    return built + sum((run.times - 1) * more[run, width] for run, width in runs)


def added(run: Repeat, width: int) -> int:
    """By the blocks of a run where they stand once more; what layers share is there already."""
    once, twice = (count(Stack((replace(run, times=times),), width)) for times in (1, 2))
    return twice - once


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def kept(device: torch.device, dtype: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    """The dtype that stored numbers are kept in."""
    return dtype or (torch.promote_types(stored, torch.float32) if device.type == "cpu" else stored)


def arrive(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """The tensor in memory of its own, and in no more than it needs."""
    dtype = kept(device, dtype, tensor.dtype)
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    if alone and (tensor.dtype, tensor.device) == (dtype, device):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def write_model(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], tokenizer: Saves | None) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    write(tensors, folder)
    if tokenizer is not None:
        tokenizer.save(folder)


def along_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder that say how its model is used, each a JSON object; they are kept as they are."""
    found = [folder / name for name in ALONG if (folder / name).is_file()]
    for file in found:
        read_json(file)
    return {file.name: file.read_bytes() for file in found}


def write_along(folder: Path, along: Mapping[str, bytes] | None) -> None:
    for name, content in (along or {}).items():
        (folder / name).write_bytes(content)
