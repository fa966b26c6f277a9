"""The state of training as files, so that a resumed run is bit-identical to an uninterrupted one.

    model.safetensors …     the model's folder; for an adapted model only its adapters, in PEFT's format
    optimizer.safetensors   the optimizer's moments, by parameter name
    rng.safetensors         the states of torch's random generators, which dropout uses
    training.json           the step, the number of tokens so far, and the loader's state

No file is a pickle.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.adapt.adapters import adapters
from regard.adapt.peft import restore_adapter, save_adapter
from regard.adapt.targets import AdapterError
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import SavesFiles, write_model
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
    """Steps and tokens so far."""

    step: int = 0
    tokens: int = 0


def write_state(
    folder: Path,
    position: TrainingPosition,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: StatefulLoader,
    tokenizer: SavesFiles | None = None,
    base: str | None = None,
) -> None:
    """base: the folder of the model that adapters belong to."""
    write_weights(folder, model, tokenizer, base)
    save_file(optimizer_state(optimizer), folder / "optimizer.safetensors")
    save_file(rng_states(), folder / "rng.safetensors")
    saved = {"step": position.step, "tokens": position.tokens, "loader": loader.state_dict()}
    (folder / "training.json").write_text(json.dumps(saved), encoding="utf-8")


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, loader: StatefulLoader
) -> TrainingPosition:
    """Restore model, optimizer, loader and random generators from a folder whose checksums were verified."""
    load_weights(folder, model)
    # Copies, because loaded tensors are views into the file.
    moments = {name: tensor.clone() for name, tensor in load_file(folder / "optimizer.safetensors").items()}
    load_optimizer_state(optimizer, moments)
    saved = read_json(folder / "training.json")
    loader.load_state_dict(saved["loader"])
    set_rng_states(load_file(folder / "rng.safetensors"))
    return TrainingPosition(saved["step"], saved["tokens"])


def write_weights(folder: Path, model: nn.Module, tokenizer: SavesFiles | None, base: str | None) -> None:
    if adapters(model):
        save_adapter(model, folder, base=base)
    else:
        write_model(model, folder, tokenizer)


@torch.no_grad()
def load_weights(folder: Path, model: nn.Module) -> None:
    """Copy the saved weights or adapters into the model, which must have the same spec and adapters."""
    mismatch = f"{folder} holds another model than the one that is trained; use the config of the run"
    if adapters(model):
        try:
            return restore_adapter(model, folder)
        except AdapterError as error:
            raise CheckpointError(f"{mismatch} ({error})") from error
    file, weights = folder / "model.safetensors", dict(model.named_parameters())
    saved = load_file(file) if file.exists() else {}
    same_shapes = {name: t.shape for name, t in saved.items()} == {name: p.shape for name, p in weights.items()}
    if not same_shapes or Spec.from_dict(read_json(folder / "config.json")["spec"]) != model.spec:
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
