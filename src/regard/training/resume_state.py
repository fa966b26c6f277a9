"""The state of training as files, so that a resumed run is bit-identical to an uninterrupted one.

    model.safetensors …     the model's folder; for an adapted model its adapter in PEFT's format, and in
                            trained.safetensors all other trained parameters: those of a new head, for which
                            model_spec.json has the spec of the model, or of a value head
    optimizer.safetensors   the optimizer's moments, by parameter name
    rng.safetensors         the states of torch's random generators, which dropout uses; rng-1.safetensors … those of
                            further processes
    training.json           steps, tokens and batches so far, the loader's state, the run's identity

A snapshot is a copy of all of this in the memory of the CPU, so it can be written while training continues. No file is
a pickle.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.adapt.adapters import adapters, resolve_adapter
from regard.adapt.peft import SPEC, adapter_config, adapter_tensors, restore_adapter, spec_of, write_adapter
from regard.adapt.targets import AdapterError
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import SavesFiles, own_config, unique_parameters, write_files
from regard.data.prefetch import StatefulLoader
from regard.models.base import Model
from regard.spec import Spec
from regard.training.optimizer import load_optimizer_state
from regard.training.parallel.sharded_files import ShardedFiles

RESEED = 1_000_003  # per step, if the number of processes changed


@dataclass(frozen=True)
class TrainingPosition:
    """Steps and tokens so far, and batches, which are more than steps after a roll back."""

    step: int = 0
    tokens: int = 0
    batches: int = 0


@dataclass(frozen=True)
class TrainingSnapshot:
    """A copy of the state, independent of the model and the optimizer."""

    write_weights: Callable[[Path], None]
    tensors: dict[str, dict[str, Tensor]]  # by file name
    training: dict[str, Any]  # the contents of training.json

    @property
    def step(self) -> int:
        return self.training["step"]

    def write(self, folder: Path) -> None:
        self.write_weights(folder)
        for name, tensors in self.tensors.items():
            save_file(tensors, folder / name)
        (folder / "training.json").write_text(json.dumps(self.training), encoding="utf-8")


def take_snapshot(
    position: TrainingPosition,
    weights: Callable[[Path], None],
    states: Mapping[str, Mapping[str, Tensor]],
    input_state: "InputState",
    details: Mapping[str, Any],
) -> TrainingSnapshot:
    """weights: writes a copy of them; states: further files of tensors; details: further entries of training.json."""
    training = {**asdict(position), "loader": input_state.loader, **details}
    files = {**states, "rng": input_state.rng}
    copies = {f"{name}.safetensors": copy_to_cpu(tensors) for name, tensors in files.items()}
    return TrainingSnapshot(weights, copies, json.loads(json.dumps(training)))


@dataclass(frozen=True)
class InputState:
    """The state of everything that a step reads beside weights and moments: the loader and the random generators."""

    loader: dict[str, Any]
    rng: dict[str, Tensor]

    @classmethod
    def now(cls, loader: StatefulLoader) -> "InputState":
        return cls(loader.state_dict(), rng_states())


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, processes: int = 1
) -> dict[str, Any]:
    """Restore model, optimizer and random generators from a folder whose checksums were verified.

    It may have been written by another number of processes; the generators are then seeded by the step. Returns the
    contents of training.json.
    """
    training = read_json(folder / "training.json")
    load_weights(folder, model)
    load_optimizer_state(optimizer, read_moments(folder, optimizer))
    if training.get("processes", 1) == processes:
        set_rng_states(load_file(folder / rng_file(rank)))
    else:
        torch.manual_seed(torch.initial_seed() + RESEED * training["step"])
    return training


def rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors" if rank else "rng.safetensors"


def read_moments(folder: Path, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state; moments are sharded like their parameters."""
    files = ShardedFiles(folder, "optimizer")
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    tensors = {}
    for key, shape in files.shapes.items():
        parameter = parameters.get(key.rpartition("/")[0])
        like = parameter is not None and parameter.shape == shape
        tensors[key] = files.read_like(key, parameter) if like else files.read(key)
    return tensors


def copy_weights(
    model: nn.Module,
    tokenizer: SavesFiles | None = None,
    base: str | None = None,
    source_family: str | None = None,
    with_head: bool = False,
) -> Callable[[Path], None]:
    """Copy the weights, or only the trained ones of an adapted model; returns a function that writes the copy.

    base: the folder of the model that adapters belong to. with_head: the head is trained beside the adapter.
    """
    if not adapters(model):
        return partial(
            write_files,
            config=own_config(model, source_family),
            tensors=copy_to_cpu(unique_parameters(model)),
            tokenizer=tokenizer,
        )
    name = resolve_adapter(model, None, "save")
    write_files_of_adapter = adapter_writer(model, name, base, with_head, copy_to_cpu(adapter_tensors(model, name)))
    others = copy_to_cpu(trained_beside_adapter(model))

    def write(folder: Path) -> None:
        write_files_of_adapter(folder)
        if others:
            save_file(others, folder / "trained.safetensors")

    return write


def adapter_writer(
    model: nn.Module, name: str, base: str | None, with_head: bool, tensors: dict[str, Tensor]
) -> Callable[[Path], None]:
    """A function that writes the adapter of this name and, if the head is trained beside it, the spec of the model."""
    assert isinstance(model.spec, Model), f"a model has a spec; found {model.spec!r:.80}"
    config, spec = adapter_config(model, name, base=base), model.spec.to_json() if with_head else None
    base_format = spec_of(model, name).base

    def write(folder: Path) -> None:
        write_adapter(folder, config, tensors, base_format)
        if spec is not None:
            (folder / SPEC).write_text(f"{spec}\n", encoding="utf-8")

    return write


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """With the matrices that PiSSA started from: another machine may decompose the weights into others."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or ".lora_init_" in name}


def trained_beside_adapter(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in trained_parameters(model).items() if "lora_" not in name}


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies, on_gpu = {}, False
    for name, tensor in tensors.items():
        source = tensor.detach()
        on_gpu |= source.is_cuda
        # Copies from a GPU into pinned memory overlap; torch keeps the memory for the next snapshot.
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        copies[name] = target.copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return copies


@torch.no_grad()
def load_weights(folder: Path, model: nn.Module) -> None:
    """Copy the saved weights or adapters into the model, which must have the same spec and adapters."""
    mismatch = f"{folder} holds another model than the one that is trained; use the config of the run"
    stem, weights = "model", dict(model.named_parameters())
    if adapters(model):
        stem, weights = "trained", trained_parameters(model)
        if not any(
            "lora_" in name for name in ShardedFiles(folder, stem, missing_ok=True).shapes
        ):  # one process: only in PEFT's file
            try:
                restore_adapter(model, folder)
            except AdapterError as error:
                raise CheckpointError(f"{mismatch} ({error})") from error
            weights = trained_beside_adapter(model)
    elif Spec.from_dict(read_json(folder / "config.json")["spec"]) != model.spec:
        raise CheckpointError(mismatch)
    files = ShardedFiles(folder, stem, missing_ok=True)
    if files.shapes != {name: p.shape for name, p in weights.items()}:
        raise CheckpointError(mismatch)
    for name, parameter in weights.items():
        parameter.copy_(files.read_like(name, parameter))


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def set_rng_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
