"""An exponential moving average of the weights. Polyak & Juditsky 1992; Tarvainen & Valpola 2017.

    e = θ after the first step, then e = d e + (1 - d) θ after every step

The average is kept in float32 beside the weights, which training uses as before. Evaluations and samples use the
average. A checkpoint has both: `model.safetensors` holds the weights, from which training resumes, `ema.safetensors`
the average. At the end of a run the averaged model is written to the run's folder `ema/`, which loads like any other.
If several processes share the weights, each averages its own share.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import CheckpointError
from regard.training.parallel.sharded_files import ShardedFiles, local_tensor

EMA = "ema"  # of the file in a checkpoint, and of the folder with the averaged model


class MovingAverage:
    """The average of the model's trainable parameters by name; always empty with decay=0."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        if self.decay == 0:
            return
        current = {name: p.detach().to(average_dtype(p)) for name, p in self.parameters.items()}
        if self.average:
            averages, weights = ([local_tensor(t) for t in group.values()] for group in (self.average, current))
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        else:
            self.average = {name: tensor.clone() for name, tensor in current.items()}

    @contextmanager
    def applied(self) -> Generator[None]:
        """In this context the model has the averaged weights, if there are any."""
        trained = {name: self.parameters[name].detach().clone() for name in self.average}
        self.copy_to_model(self.average)
        try:
            yield
        finally:
            self.copy_to_model(trained)

    @torch.no_grad()
    def copy_to_model(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def load(self, folder: Path) -> None:
        """Restore the average of a checkpoint; one without the file was saved before the first step."""
        saved = ShardedFiles(folder, EMA, missing_ok=True)
        if self.decay == 0 or not saved.shapes:
            return
        if saved.shapes != {name: p.shape for name, p in self.parameters.items()}:
            raise CheckpointError(f"{folder / EMA} is the average of another model; use the config of the run")
        self.average = {name: saved.read_like(name, p) for name, p in self.parameters.items()}


def average_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
