"""The state of training that is distributed over processes, as the files of resume_state.py.

Weights and moments are whole tensors, of which each process writes a share (sharded_files.py). Every process writes the
state of its own random generators. An adapted model is written in PEFT's format by the main process, and its trained
parameters are written by all processes once more, because these can be read in slices.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.adapt.adapters import adapters, resolve_adapter
from regard.adapt.peft import adapter_tensors
from regard.checkpoint.model_folder import SavesFiles, own_config, unique_parameters
from regard.training.parallel.mesh import Processes
from regard.training.parallel.sharded_files import Share, collect_share, whole_tensor
from regard.training.resume_state import InputState, TrainingPosition, adapter_writer, rng_file, trained_parameters


@dataclass(frozen=True)
class SharedSnapshot:
    """The files of this process, as a copy in the memory of the CPU."""

    step: int
    write_weights: Callable[[Path], None]
    shares: tuple[Share, ...]
    rng: dict[str, Tensor]
    rng_name: str
    training: str | None  # the contents of training.json, in the main process

    def write(self, folder: Path) -> None:
        self.write_weights(folder)
        for share in self.shares:
            share.write(folder)
        save_file(self.rng, folder / self.rng_name)
        if self.training is not None:
            (folder / "training.json").write_text(self.training, encoding="utf-8")


@torch.no_grad()
def take_shared_snapshot(
    position: TrainingPosition,
    weights: Callable[[Path], None],
    states: Mapping[str, Mapping[str, Tensor]],
    input_state: InputState,
    details: Mapping[str, Any],
    processes: Processes,
) -> SharedSnapshot:
    """All processes must call it; the arguments are those of take_snapshot."""
    training = {**asdict(position), "loader": input_state.loader, "processes": processes.count, **details}
    return SharedSnapshot(
        position.step,
        weights,
        tuple(collect_share(tensors, name, processes) for name, tensors in states.items()),
        input_state.rng,
        rng_file(processes.rank),
        json.dumps(training) if processes.is_main else None,
    )


@torch.no_grad()
def copy_shared_weights(
    model: nn.Module,
    tokenizer: SavesFiles | None,
    base: str | None,
    source_family: str | None,
    with_head: bool,
    processes: Processes,
) -> Callable[[Path], None]:
    """As copy_weights; the function writes the share of this process. All processes must call it."""
    if adapters(model):
        name = resolve_adapter(model, None, "save")
        matrices = {key: whole_tensor(tensor).cpu() for key, tensor in adapter_tensors(model, name).items()}
        share = collect_share(trained_parameters(model), "trained", processes)
        write_rest = adapter_writer(model, name, base, with_head, matrices)
    else:
        share = collect_share(unique_parameters(model), "model", processes)
        write_rest = partial(write_config, config=own_config(model, source_family), tokenizer=tokenizer)

    def write(folder: Path) -> None:
        share.write(folder)
        if processes.is_main:
            write_rest(folder)

    return write


def write_config(folder: Path, config: dict[str, Any], tokenizer: SavesFiles | None) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
