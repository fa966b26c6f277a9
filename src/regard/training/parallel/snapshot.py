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
from regard.adapt.peft import adapter_config, adapter_tensors, write_adapter
from regard.checkpoint.model_folder import SavesFiles, own_config, unique_parameters
from regard.training.optimizer import optimizer_state
from regard.training.parallel.mesh import Processes
from regard.training.parallel.sharded_files import Share, collect_share, whole_tensor
from regard.training.resume_state import InputState, TrainingPosition, copy_to_cpu, rng_file, trained_parameters


@dataclass(frozen=True)
class SharedSnapshot:
    """The files of this process, as a copy in the memory of the CPU."""

    step: int
    shares: tuple[Share, ...]
    rng: dict[str, Tensor]
    rng_name: str
    write_rest: Callable[[Path], None] | None  # in the main process

    def write(self, folder: Path) -> None:
        for share in self.shares:
            share.write(folder)
        save_file(self.rng, folder / self.rng_name)
        if self.write_rest is not None:
            self.write_rest(folder)


@torch.no_grad()
def take_shared_snapshot(
    position: TrainingPosition,
    model: nn.Module,
    tokenizer: SavesFiles | None,
    base: str | None,
    processes: Processes,
    optimizer: torch.optim.Optimizer,
    input_state: InputState,
    details: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> SharedSnapshot:
    """All processes must call it; the arguments are those of copy_weights and take_snapshot."""
    training = {**asdict(position), "loader": input_state.loader, "processes": processes.count, **details}
    if adapters(model):
        name = resolve_adapter(model, None, "save")
        matrices = {key: whole_tensor(tensor).cpu() for key, tensor in adapter_tensors(model, name).items()}
        weights = collect_share(trained_parameters(model), "trained", processes)
        write_model = partial(write_adapter, config=adapter_config(model, name, base=base), tensors=matrices)
    else:
        weights = collect_share(unique_parameters(model), "model", processes)
        write_model = partial(write_config, config=own_config(model), tokenizer=tokenizer)

    copies = {file: copy_to_cpu(contents) for file, contents in tensors.items()}

    def write_rest(folder: Path) -> None:
        write_model(folder)
        for file, contents in copies.items():
            save_file(contents, folder / file)
        (folder / "training.json").write_text(json.dumps(training), encoding="utf-8")

    shares = (weights, collect_share(optimizer_state(optimizer), "optimizer", processes))
    return SharedSnapshot(
        position.step, shares, input_state.rng, rng_file(processes.rank), write_rest if processes.is_main else None
    )


def write_config(folder: Path, config: dict[str, Any], tokenizer: SavesFiles | None) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
