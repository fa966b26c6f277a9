"""The state of training as files, so that a resumed run is bit-identical to an uninterrupted one.

    model.safetensors …     the model's folder; for an adapted model its adapter in PEFT's format, and in
                            trained.safetensors all other trained parameters, such as those of a new head
    optimizer.safetensors   the optimizer's moments, by parameter name
    rng.safetensors         the states of torch's random generators, which dropout uses
    training.json           steps, tokens and batches so far, the loader's state, the run's identity

A snapshot is a copy of all of this in the memory of the CPU, so it can be written while training continues. No file is
a pickle.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.adapt.adapters import adapters, resolve_adapter
from regard.adapt.peft import adapter_config, adapter_tensors, restore_adapter, write_adapter
from regard.adapt.targets import AdapterError
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import SavesFiles, own_config, unique_parameters, write_files
from regard.data.batch import Batch
from regard.spec import Spec
from regard.training.optimizer import load_optimizer_state, optimizer_state


class StatefulLoader(Protocol):
    """An endless iterable of batches, whose state can be written as JSON."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
    optimizer: torch.optim.Optimizer,
    input_state: "InputState",
    details: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> TrainingSnapshot:
    """weights: writes a copy of them; details: further entries of training.json; tensors: further files by name."""
    training = {**asdict(position), "loader": input_state.loader, **details}
    files = {"optimizer.safetensors": optimizer_state(optimizer), "rng.safetensors": input_state.rng, **(tensors or {})}
    copies = {name: copy_to_cpu(contents) for name, contents in files.items()}
    return TrainingSnapshot(weights, copies, json.loads(json.dumps(training)))


@dataclass(frozen=True)
class InputState:
    """The state of everything that a step reads beside weights and moments: the loader and the random generators."""

    loader: dict[str, Any]
    rng: dict[str, Tensor]

    @classmethod
    def now(cls, loader: StatefulLoader) -> "InputState":
        return cls(loader.state_dict(), rng_states())


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore model, optimizer and random generators from a folder whose checksums were verified.

    Returns the contents of training.json.
    """
    load_weights(folder, model)
    # Copies, because loaded tensors are views into the file.
    moments = {name: tensor.clone() for name, tensor in load_file(folder / "optimizer.safetensors").items()}
    load_optimizer_state(optimizer, moments)
    set_rng_states(load_file(folder / "rng.safetensors"))
    return read_json(folder / "training.json")


def copy_weights(
    model: nn.Module, tokenizer: SavesFiles | None = None, base: str | None = None
) -> Callable[[Path], None]:
    """Copy the weights, or only the trained ones of an adapted model; returns a function that writes the copy.

    base: the folder of the model that adapters belong to.
    """
    if not adapters(model):
        return partial(
            write_files,
            config=own_config(model),
            tensors=copy_to_cpu(unique_parameters(model)),
            tokenizer=tokenizer,
        )
    name = resolve_adapter(model, None, "save")
    config, tensors = adapter_config(model, name, base=base), copy_to_cpu(adapter_tensors(model, name))
    others = copy_to_cpu(trained_beside_adapter(model))

    def write(folder: Path) -> None:
        write_adapter(folder, config, tensors)
        if others:
            save_file(others, folder / "trained.safetensors")

    return write


def trained_beside_adapter(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}


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
    file, weights = folder / "model.safetensors", dict(model.named_parameters())
    if adapters(model):
        try:
            restore_adapter(model, folder)
        except AdapterError as error:
            raise CheckpointError(f"{mismatch} ({error})") from error
        file, weights = folder / "trained.safetensors", trained_beside_adapter(model)
    elif not file.exists() or Spec.from_dict(read_json(folder / "config.json")["spec"]) != model.spec:
        raise CheckpointError(mismatch)
    saved = load_file(file) if file.exists() else {}
    if {name: t.shape for name, t in saved.items()} != {name: p.shape for name, p in weights.items()}:
        raise CheckpointError(mismatch)
    for name, parameter in weights.items():
        parameter.copy_(saved[name])


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def set_rng_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
