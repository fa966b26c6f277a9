"""A run of a few steps that several processes train; as a script, a run of torchrun whose first attempt is killed.

python -m torch.distributed.run --nproc-per-node=2 --max-restarts=1 tests/training/parallel/runs.py FOLDER STEP
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from regard.data.batch import Batch
from regard.training.loop import Trainer
from regard.training.parallel.mesh import Parallel, Processes, is_restart, make_processes, process_group
from regard.training.parallel.shared_run import SharedRun
from regard.training.recipe import Training
from regard.training.run import Run
from regard.training.schedule import Cosine
from tests.training.parallel.processes import SPEC, batches, objective

SETTINGS = Training(steps=8, lr=1e-2, schedule=Cosine(warmup=2), save_every=3, evaluate_every=4, keep=9)


class RandomLoader:
    """The rows of this process in an endless sequence of batches."""

    def __init__(self, processes: Processes, kill_at: int | None = None, dtype: torch.dtype = torch.float32):
        self.data, self.next, self.kill_at = batches(20, processes, dtype), 0, kill_at

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self.next == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.next += 1
            yield self.data[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def run_trainer(
    processes: Processes,
    path: Path,
    settings: Training = SETTINGS,
    kill_at: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    """Start or resume the run at this path."""
    if processes.is_main and not (path / "config.json").exists():
        Run.create(path, {"train": settings.to_dict()})
    processes.wait_for_all()
    trainer = Trainer(
        SPEC.build(seed=0).to(dtype),
        RandomLoader(processes, kill_at, dtype),
        objective,
        settings,
        SharedRun(path, processes),
        held_out=batches(2, processes, dtype),
        processes=processes,
    )
    trainer.train()
    return trainer


def curve(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group("cpu") as device:
        opened = make_processes(Parallel(), device)
        killed = opened.rank == 1 and not is_restart()
        run_trainer(opened, Path(sys.argv[1]), kill_at=int(sys.argv[2]) if killed else None)
