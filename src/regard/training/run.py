"""A run's directory: everything that a training leaves, and all that is needed to go on.

    tokenizer/                  how text became ids
    config.json                 the resolved settings, written once, when all above is there
    metrics.jsonl, tensorboard/ one line a step, one more an evaluation (log.py)
    samples.txt                 what the model writes as it learns
    checkpoints/step-000250/    the state of training (state.py) with a manifest of SHA-256 sums
    lock                        held by the process that trains here

A checkpoint is whole or not there; one that was damaged later is passed over and set aside.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.checkpoint.atomic_folder import CheckpointError, check_folder, remove_folder, write_folder
from regard.text.tokenizer import Tokenizer


class Run:
    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> "Run":
        """A new run with these resolved settings (plain data). The config comes last: with it, the run is whole."""
        run = cls(path)
        if run.config_file.exists():
            raise ValueError(
                f"{path} already holds a run; resume it (regard train --resume {path}) or name another place"
            )
        run.path.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            tokenizer.save(run.path / "tokenizer")
        draft = run.path / ".config.json"
        draft.write_text(json.dumps(config, indent=2, allow_nan=False), encoding="utf-8")
        draft.rename(run.config_file)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        run = cls(path)
        if not run.config_file.exists():
            raise ValueError(f"{path} holds no run: it has no config.json; start one with regard train --out {path}")
        return run

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.config_file.read_text(encoding="utf-8"))

    @property
    def checkpoints(self) -> list[Path]:
        """Newest first; whole or damaged, but no half-written ones."""
        folders = [f for f in (self.path / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
        return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")), reverse=True)

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    @contextmanager
    def saving(self, step: int, keep: int) -> Generator[Path]:
        """A folder to fill with the checkpoint of this step; once it stands, only the newest `keep` remain."""
        with write_folder(self.checkpoint(step)) as folder:
            yield folder
        for old in self.checkpoints[keep:]:
            remove_folder(old)

    def latest(self, say: Callable[[str], None] = print) -> Path | None:
        """The newest checkpoint that is whole; None before the first. A damaged one is passed over and named."""
        faults = []
        for folder in self.checkpoints:
            try:
                check_folder(folder)
            except CheckpointError as fault:
                faults.append(str(fault))
                say(f"passing over a damaged checkpoint: {fault}")
            else:
                return folder
        if faults:
            raise CheckpointError(f"no checkpoint in {self.path} can be used: {'; '.join(faults)}")
        return None

    def forget_after(self, step: int) -> None:
        """Before going on from this step: clear what was half written, and set aside what was passed over."""
        folder = self.path / "checkpoints"
        for rest in [*folder.glob(".*.partial"), *folder.glob(".*.old")]:
            shutil.rmtree(rest)
        for later in [f for f in self.checkpoints if int(f.name.removeprefix("step-")) > step]:
            shutil.rmtree(later.with_suffix(".damaged"), ignore_errors=True)
            later.rename(later.with_suffix(".damaged"))

    @contextmanager
    def locked(self) -> Generator[None]:
        """Two processes must not train in one directory. The lock ends with its process, however that ends."""
        with (self.path / "lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is training in {self.path}; wait for it or name another place"
                ) from None
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            yield
