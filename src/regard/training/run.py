"""The directory of a run: its outputs, and everything that is needed to resume it.

    tokenizer/                  the tokenizer
    config.json                 the resolved recipe, written once, after the tokenizer
    metrics.jsonl, tensorboard/ one line per step and per evaluation (log.py)
    samples.txt                 text that the model generates during training
    checkpoints/step-000250/    the state of training (resume_state.py) with a manifest of SHA-256 sums
    lock                        held by the process that trains here

A checkpoint is either complete or absent. One that is damaged later is skipped and renamed.
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
from regard.find_model import find_model
from regard.text.tokenizer import Tokenizer


class Run:
    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> "Run":
        """Create the directory of a run with this resolved recipe. A directory without its config is not a run, so the
        config is written last."""
        run = cls(path)
        run.check_new()
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
            raise ValueError(
                f"{path} holds no run: it has no config.json; start one with: regard train llama --out {path}"
            )
        return run

    def check_new(self) -> None:
        """Raise ValueError if the directory already holds a run."""
        if self.config_file.exists():
            raise ValueError(
                f"{self.path} already holds a run; resume it (regard train --resume {self.path}) or choose another "
                "directory"
            )

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.config_file.read_text(encoding="utf-8"))

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, newest first; damaged ones included, unfinished ones not."""
        folders = [f for f in (self.path / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
        return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")), reverse=True)

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    @contextmanager
    def saving(self, step: int, keep: int) -> Generator[Path]:
        """A folder to write the checkpoint of this step to; afterwards only the newest `keep` checkpoints remain."""
        with write_folder(self.checkpoint(step)) as folder:
            yield folder
        for old in self.checkpoints[keep:]:
            remove_folder(old)

    def latest(self, note: Callable[[str], None] = print) -> Path | None:
        """The newest undamaged checkpoint, or None if there is no checkpoint; damaged ones are skipped with a note."""
        errors = []
        for folder in self.checkpoints:
            try:
                check_folder(folder)
            except CheckpointError as error:
                errors.append(str(error))
                note(f"skipping a damaged checkpoint: {error}")
            else:
                return folder
        if errors:
            raise CheckpointError(f"all checkpoints in {self.path} are damaged: {'; '.join(errors)}; start a new run")
        return None

    def discard_after(self, step: int) -> None:
        """Before resuming from this step: delete unfinished checkpoints, and rename later ones, which are damaged."""
        folder = self.path / "checkpoints"
        for unfinished in [*folder.glob(".*.partial"), *folder.glob(".*.old")]:
            shutil.rmtree(unfinished)
        for later in [f for f in self.checkpoints if int(f.name.removeprefix("step-")) > step]:
            shutil.rmtree(later.with_suffix(".damaged"), ignore_errors=True)
            later.rename(later.with_suffix(".damaged"))

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock of the directory; the operating system releases it when the process ends, however it ends."""
        with (self.path / "lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is training in {self.path}; wait for it or choose another directory"
                ) from None
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            yield


def newest_checkpoint(name: str | Path) -> Path:
    """The newest complete checkpoint of a run; the path of any other file, folder or packaged model."""
    path = find_model(name)
    if not (path / "checkpoints").is_dir():
        return path
    newest = Run.open(path).latest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet; continue its training with: regard train --resume {path}")
    return newest
