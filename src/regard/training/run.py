"""The directory of a run: its outputs, and everything that is needed to resume it.

    tokenizer/                  the tokenizer, and the image processor of the model that the run starts from
    run.json                    the run's id, and the SHA-256 sums of its config and tokenizer (run_identity.py)
    config.json                 the resolved recipe, written once, last
    changes.jsonl               settings that were changed on resume (run_identity.py)
    metrics.jsonl, tensorboard/ one line per step and per evaluation (log.py)
    samples.txt                 text that the model generates during training
    checkpoints/step-000250/    the state of training (resume_state.py) with a manifest of SHA-256 sums
    best.json                   the checkpoint with the lowest held-out loss, which is never deleted
    references/                 the checkpoints that other runs need to be resumed, which are never deleted
    reference.safetensors       log-probabilities under the initial weights, if the objective needs them (reference.py)
    lock                        held by the process that trains here

A checkpoint is either complete or absent. One that is damaged later, or copied from another run, is skipped and
renamed. The directory can be moved.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from regard.checkpoint.atomic_folder import (
    CheckpointError,
    check_folder,
    make_folder,
    remove_folder,
    sync_folder,
    sync_tree,
    write_file,
    write_folder,
)
from regard.checkpoint.model_folder import SavesFiles
from regard.find_model import find_model
from regard.training.run_identity import CHANGES, CONFIG, RUN, TOKENIZER, RunIdentity, read_changes
from regard.training.run_summary import take_lock

REFERENCES = "references"


class Run:
    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        tokenizer: SavesFiles | None = None,
        base: str | None = None,
    ) -> "Run":
        """Create the directory of a run with this resolved recipe. A directory without its config is not a run, so the
        config is written last. base: the fingerprint of the model that the run starts from."""
        run = cls(path)
        run.check_new()
        make_folder(run.path)
        partial = run.path / f".{TOKENIZER}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        if tokenizer is not None:
            tokenizer.save(partial)
            sync_tree(partial)
        content = json.dumps(config, indent=2, allow_nan=False).encode()
        RunIdentity.create(run.path, content, partial, base)
        if tokenizer is not None:
            shutil.rmtree(run.path / TOKENIZER, ignore_errors=True)  # that of a start that was killed
            partial.rename(run.path / TOKENIZER)
            sync_folder(run.path)
        write_file(run.config_file, content)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        run = cls(path)
        if run.path.parent.name == "checkpoints":
            raise ValueError(f"{path} is a checkpoint; give the directory of its run: {run.path.parent.parent}")
        if not run.config_file.exists():
            raise ValueError(
                f"{path} holds no run: it has no config.json; start one with: regard train llama --out {path}"
            )
        return run

    def check_new(self) -> None:
        """Raise ValueError if the directory already holds a run, or is a file."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; choose another directory for the run")
        if self.config_file.exists():
            raise ValueError(
                f"{self.path} already holds a run; resume it (regard train --resume {self.path}) or choose another "
                "directory"
            )
        if (self.path / TOKENIZER).exists() and not (self.path / RUN).exists():
            raise ValueError(
                f"{self.path / TOKENIZER} exists and belongs to no run, and a new run would replace it; choose another "
                "directory"
            )

    def discard_unused(self) -> None:
        """Delete the files of a run that has taken no step; other files of the directory remain."""
        log = self.path / "metrics.jsonl"
        if self.checkpoints or log.exists() and log.stat().st_size:
            return
        files = [self.path / name for name in (CONFIG, RUN, "lock", log.name, "samples.txt")]
        for file in (*files, *self.path.glob("reference.safetensors"), *self.path.glob("reference-*.safetensors")):
            file.unlink(missing_ok=True)
        for name in (TOKENIZER, "tensorboard", "checkpoints"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.config_file.read_text(encoding="utf-8"))

    def check_files(self) -> None:
        """Raise CheckpointError unless config and tokenizer are those with which the run was created."""
        RunIdentity.read(self.path).check_files(self.path)

    def stamp(self) -> dict[str, Any]:
        """The entries of a checkpoint's training.json that identify its run."""
        return {"run": RunIdentity.read(self.path).stamp(), "changes": read_changes(self.path)}

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, newest first; damaged ones included, unfinished ones not."""
        folders = [f for f in (self.path / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
        return sorted(folders, key=step_of, reverse=True)

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    @property
    def step(self) -> int:
        """The step of the newest checkpoint, which may be damaged."""
        return max((step_of(folder) for folder in self.checkpoints), default=0)

    @contextmanager
    def saving(self, step: int, keep: int) -> Generator[Path]:
        """A folder to write the checkpoint of this step to; afterwards the newest `keep`, the best one and those that
        other runs refer to remain."""
        with write_folder(self.checkpoint(step)) as folder:
            yield folder
        kept = {self.record_best(), *self.referenced}
        for old in self.checkpoints[keep:]:
            if old not in kept:
                remove_folder(old)

    def reference(self, checkpoint: Path, user: "Run") -> Path:
        """Keep a checkpoint that another run needs when it is resumed; returns the file that says so."""
        folder = self.path / REFERENCES
        make_folder(folder)
        file = folder / f"{RunIdentity.read(user.path).id}-{checkpoint.name}.json"
        if not file.exists():
            content = {"checkpoint": checkpoint.name, "run": str(user.path.absolute())}
            write_file(file, json.dumps(content).encode())
        return file

    @property
    def referenced(self) -> set[Path]:
        files = (self.path / REFERENCES).glob("*.json")
        return {self.path / "checkpoints" / json.loads(file.read_bytes())["checkpoint"] for file in files}

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """A folder to fill, which becomes the folder of this name in the run."""
        return write_folder(self.path / name)

    def record_best(self) -> Path | None:
        """Write best.json; returns the checkpoint with the lowest held-out loss, the older one of two equals."""
        losses = {folder: held_out_loss(folder) for folder in reversed(self.checkpoints)}
        evaluated = {folder: loss for folder, loss in losses.items() if loss is not None}
        if not evaluated:
            return None
        best = min(evaluated, key=lambda folder: evaluated[folder])
        content = json.dumps({"step": step_of(best), "held_out_loss": evaluated[best]}).encode()
        file = self.path / "best.json"
        if not file.exists() or file.read_bytes() != content:
            write_file(file, content)
        return best

    def check_checkpoint(self, folder: Path) -> None:
        """Raise CheckpointError if the checkpoint is damaged, or of another run or step."""
        check_folder(folder)
        saved = read_training(folder)
        if saved.get("step") != step_of(folder):
            raise CheckpointError(f"{folder} holds the state of step {saved.get('step')}; use another checkpoint")
        if not (self.path / RUN).exists():  # a model can be loaded, but training does not continue
            return
        identity = RunIdentity.read(self.path).stamp()
        if saved.get("run") != identity:
            raise CheckpointError(
                f"{folder} belongs to another run: its id, config and tokenizer are {saved.get('run')}, those in "
                f"{self.path / RUN} are {identity}; use a checkpoint of this run"
            )

    def check_changes(self, folder: Path) -> None:
        """Raise CheckpointError if the checkpoint was written after a change that is not recorded in the run."""
        changes = read_training(folder)["changes"]
        if changes != read_changes(self.path)[: len(changes)]:
            raise CheckpointError(
                f"{self.path / CHANGES} does not contain all changes that were made before {folder} was written: "
                f"{changes}; restore it from a copy, or start a new run"
            )

    def latest(self, note: Callable[[str], None] = print, folders: Sequence[Path] | None = None) -> Path | None:
        """The newest undamaged checkpoint, or None if there is no checkpoint; damaged ones are skipped with a note.

        folders: those to choose from, newest first.
        """
        errors = []
        for folder in self.checkpoints if folders is None else folders:
            try:
                self.check_checkpoint(folder)
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
        for later in [f for f in self.checkpoints if step_of(f) > step]:
            shutil.rmtree(later.with_suffix(".damaged"), ignore_errors=True)
            later.rename(later.with_suffix(".damaged"))
        if folder.exists():
            sync_folder(folder)

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        for later in [f for f in self.checkpoints if step_of(f) > step]:
            remove_folder(later)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock of the directory; the operating system releases it when the process ends, however it ends."""
        with (self.path / "lock").open("w") as stream:
            try:
                take_lock(stream)
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
    if not (path / "checkpoints").is_dir() and not (path / RUN).is_file():
        return path
    newest = Run.open(path).latest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet; continue its training with: regard train --resume {path}")
    return newest


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def read_training(checkpoint: Path) -> dict[str, Any]:
    """The contents of training.json."""
    file = checkpoint / "training.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); use another checkpoint") from error


def held_out_loss(checkpoint: Path) -> float | None:
    """The held-out loss at the checkpoint's step; None if there was no evaluation, or the file is damaged."""
    try:
        loss = read_training(checkpoint).get("held_out_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) else None
