"""The state of a training as files, so that what follows a checkpoint is bit-identical:

    model.safetensors …     the model's folder; of an adapted model the adapters alone, in PEFT's layout
    optimizer.safetensors   the optimizer's moments, by parameter name
    rng.safetensors         torch's generators (dropout draws from them)
    training.json           step, tokens seen, and the loader's place

No file is a pickle.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.adapt.lora import adapters
from regard.adapt.peft import save_adapter
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import SavesFiles, write_model
from regard.data.batch import Batch
from regard.models.decoder import DecoderModule
from regard.training.optimizer import load_optimizer_state, optimizer_state


class StatefulLoader(Protocol):
    """Batches without end, whose place can be told as plain data that JSON can hold."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingPosition:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0


def write_state(
    folder: Path,
    place: TrainingPosition,
    model: DecoderModule,
    optimizer: torch.optim.Optimizer,
    loader: StatefulLoader,
    tokenizer: SavesFiles | None = None,
) -> None:
    write_weights(folder, model, tokenizer)
    save_file(optimizer_state(optimizer), folder / "optimizer.safetensors")
    save_file(generators(), folder / "rng.safetensors")
    place_and_loader = {"step": place.step, "tokens": place.tokens, "loader": loader.state_dict()}
    (folder / "training.json").write_text(json.dumps(place_and_loader), encoding="utf-8")


def load_state(
    folder: Path, model: DecoderModule, optimizer: torch.optim.Optimizer, loader: StatefulLoader
) -> TrainingPosition:
    """Bring everything to where it was; the folder has been checked."""
    load_weights(folder, model)
    # Copies: what is loaded is a view into the file.
    moments = {name: tensor.clone() for name, tensor in load_file(folder / "optimizer.safetensors").items()}
    load_optimizer_state(optimizer, moments)
    saved = read_json(folder / "training.json")
    loader.load_state_dict(saved["loader"])
    set_generators(load_file(folder / "rng.safetensors"))
    return TrainingPosition(saved["step"], saved["tokens"])


def write_weights(folder: Path, model: DecoderModule, tokenizer: SavesFiles | None) -> None:
    if adapters(model):
        save_adapter(model, folder)
    else:
        write_model(model, folder, tokenizer)


@torch.no_grad()
def load_weights(folder: Path, model: DecoderModule) -> None:
    """Into the model as it stands, adapters and all; what was saved must be what is there."""
    adapted = bool(adapters(model))
    file = folder / ("adapter_model.safetensors" if adapted else "model.safetensors")
    saved = {
        name.removeprefix("base_model.model."): t for name, t in (load_file(file) if file.exists() else {}).items()
    }
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad or not adapted}
    alike = {name: t.shape for name, t in saved.items()} == {name: p.shape for name, p in weights.items()}
    if not alike or not adapted and read_json(folder / "config.json")["spec"] != model.spec.to_dict():
        raise CheckpointError(f"{folder} holds another model than the one to go on with; use the run's own config")
    for name, parameter in weights.items():
        parameter.copy_(saved[name])


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
