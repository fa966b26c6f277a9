"""The log-probabilities of sequences under the reference: the model before training.

With an adapter, the reference is the model without it, so both are computed in every step (`AdapterReference`). If all
weights are trained, those of the rows that the run will see are computed once, before the first step, and kept in the
run's directory (`ReferenceTable`), by a digest of the row:

    reference.safetensors      digests (n, 16), logprobs (n, 2); reference-1.safetensors … of further processes

Neither needs a second copy of the weights in training, except after a roll-back: the loader goes on, so the run reads
more batches than it has steps, and the initial weights are loaded for their rows.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from regard.adapt.adapters import disable_adapters
from regard.checkpoint.atomic_folder import write_file
from regard.data.batch import Batch
from regard.data.prefetch import StatefulLoader
from regard.objectives.base import LossResult, Objective
from regard.objectives.sequence_logprobs import sequence_logprobs
from regard.training.step import Precision

SEQUENCES = 2  # per row
DIGEST = 16  # bytes
WRITE_EVERY = 60.0  # seconds


@torch.no_grad()
def reference_logprobs(model: nn.Module, batch: Batch, precision: Precision = nullcontext) -> Tensor:
    """log π of both sequences of every row (B, 2), in eval mode."""
    mode = model.training
    model.eval()
    try:
        with precision():
            return sequence_logprobs(model, batch, SEQUENCES)[0]
    finally:
        model.train(mode)


@dataclass(frozen=True)
class AdapterReference:
    """An objective, whose batches get the log-probabilities of the model without its adapter."""

    objective: Objective

    @property
    def scope(self) -> Literal["token", "batch"]:
        return self.objective.scope

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        with disable_adapters(model):
            reference = reference_logprobs(model, batch)
        return self.objective(model, Batch(**batch, reference=reference))


class ReferenceTable:
    """The log-probabilities of rows by their digests. A row is computed when it is first needed.

    reference: loads the model, and is called when a row is missing. file: keeps the rows; None: they are in memory
    only. owner: identifies the run; a file of another one is not used.
    """

    def __init__(
        self,
        reference: Callable[[], nn.Module],
        precision: Precision = nullcontext,
        file: Path | None = None,
        owner: str = "",
    ):
        self.reference, self.precision, self.file, self.owner = reference, precision, file, owner
        self.model: nn.Module | None = None
        self.values = self.read()

    def read(self) -> dict[bytes, list[float]]:
        if self.file is None or not self.file.is_file():
            return {}
        try:
            tensors = load(self.file.read_bytes())
            digests, logprobs, checksum = (tensors[name] for name in ("digests", "logprobs", "checksum"))
        except (SafetensorError, KeyError):
            return {}  # damaged, and computed again
        if not torch.equal(checksum, self.checksum(digests, logprobs)):
            return {}
        return dict(zip(map(bytes, digests.tolist()), logprobs.tolist(), strict=True))

    def write(self) -> None:
        if self.file is None or not self.values:
            return
        digests = torch.tensor([list(digest) for digest in self.values], dtype=torch.uint8)
        logprobs = torch.tensor(list(self.values.values()), dtype=torch.float64)
        tensors = {"digests": digests, "logprobs": logprobs, "checksum": self.checksum(digests, logprobs)}
        write_file(self.file, save(tensors))

    def checksum(self, digests: Tensor, logprobs: Tensor) -> Tensor:
        content = self.owner.encode() + digests.numpy().tobytes() + logprobs.numpy().tobytes()
        return torch.tensor(list(blake2b(content, digest_size=DIGEST).digest()), dtype=torch.uint8)

    def complete(
        self,
        batches: Iterable[Batch],
        model: nn.Module | None = None,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Compute the missing rows of all batches, and write the file now and then, and at the end.

        model: the reference, if it is in memory. It is released afterwards: its weights will be trained.
        """
        self.model, known, written = model, len(self.values), time.monotonic()
        for done, batch in enumerate(batches, start=1):
            self.compute(batch)
            if time.monotonic() - written > WRITE_EVERY:
                self.write()
                written = time.monotonic()
            on_progress(done)
        if len(self.values) > known:
            self.write()
        self.model = None

    def compute(self, batch: Batch) -> None:
        """Compute the rows of a batch that are missing."""
        missing = [row for row, digest in enumerate(row_digests(batch)) if digest not in self.values]
        if not missing:
            return
        self.model = self.model or self.reference()
        batch = batch.rows(missing)
        device = next(self.model.parameters()).device
        logprobs = reference_logprobs(self.model, batch.to(device), self.precision)
        self.values |= zip(row_digests(batch), logprobs.tolist(), strict=True)

    def add_to(self, batch: Batch) -> Batch:
        self.compute(batch)
        reference = torch.tensor([self.values[digest] for digest in row_digests(batch)], dtype=torch.float64)
        return Batch(**batch, reference=reference)


class ReferenceLoader:
    """A loader whose batches get the log-probabilities of a table."""

    def __init__(self, loader: StatefulLoader, table: ReferenceTable):
        self.loader, self.table = loader, table

    def __iter__(self) -> Iterator[Batch]:
        return (self.table.add_to(batch) for batch in self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        """The sizes of the loader, for the summary of the run."""
        return getattr(self.loader, name)


def row_digests(batch: Batch) -> list[bytes]:
    """A digest of the sequences of every row; padding, which depends on the other rows, is left out."""
    digests = []
    for tokens, targets, segments, weights in zip(
        batch.tokens, batch.targets, batch.segments, batch.weights, strict=True
    ):
        inside = segments >= 0
        columns = torch.stack([tokens[inside], targets[inside], segments[inside], weights[inside].to(tokens.dtype)])
        digests.append(blake2b(columns.numpy().tobytes(), digest_size=DIGEST).digest())
    return digests
