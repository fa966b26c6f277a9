"""The identity of a run, and the changes of its settings.

    run.json        {"id": "5d0c…", "files": {"config.json": "9f86…", "tokenizer/tokenizer.json": "60a7…"}, "base": …}
    changes.jsonl   {"step": 250, "overrides": {"train.lr": 0.0001}, "sha256": "2c26…"}

The identity is a random id, the SHA-256 sums of the files that determine what is trained and, for a run that starts
from a model, the fingerprint of its weights (checkpoint/weight_files.py). It is written once, when the run is created.
Before a run is resumed, files and weights are compared with it, and every checkpoint holds the identity of its run, so
one that was copied from another run is not used.

The config is never rewritten. Settings that are changed on resume are appended to changes.jsonl, and every later resume
applies all of them, so a run that is killed after a change continues with it. A checkpoint holds the changes that were
made before it, and every line has a sum, so that a lost or damaged change is detected.
"""

import json
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from regard.checkpoint.atomic_folder import CheckpointError, write_file

RUN, CONFIG, TOKENIZER = "run.json", "config.json", "tokenizer"
CHANGES = "changes.jsonl"
Change = dict[str, Any]  # step, overrides


@dataclass(frozen=True)
class RunIdentity:
    id: str
    files: dict[str, str]  # SHA-256 sums by path, relative to the run's directory
    base: str | None = None  # the fingerprint of the initial weights, if they are those of a model

    @classmethod
    def create(cls, folder: Path, config: bytes, tokenizer: Path, base: str | None = None) -> "RunIdentity":
        """Write run.json for a config that is not written yet, and a tokenizer that is not in its place yet."""
        files = sorted(filter(Path.is_file, tokenizer.rglob("*")))
        names = [(Path(TOKENIZER) / file.relative_to(tokenizer)).as_posix() for file in files]
        sums = {name: sha256(file.read_bytes()).hexdigest() for name, file in zip(names, files, strict=True)}
        identity = cls(secrets.token_hex(16), {CONFIG: sha256(config).hexdigest(), **sums}, base)
        content = json.dumps({"id": identity.id, "files": identity.files, **identity.base_entry}, indent=1)
        write_file(folder / RUN, content.encode())
        return identity

    @classmethod
    def read(cls, folder: Path) -> "RunIdentity":
        file = folder / RUN
        try:
            data = json.loads(file.read_bytes())
            identity = cls(data["id"], dict(data["files"]), data.get("base"))
            if not isinstance(identity.id, str) or CONFIG not in identity.files:
                raise ValueError("it has no id, or no sum of the config")
            if not isinstance(identity.base, str | None):
                raise ValueError("the fingerprint of the base is not a string")
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, so the run cannot be verified; restore it from a copy") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); restore it from a copy, or start a new run") from None
        return identity

    def check_files(self, folder: Path) -> None:
        """Raise CheckpointError unless the config and the tokenizer are those with which the run was created."""
        for name, expected in self.files.items():
            file = folder / name
            if not file.is_file():
                raise CheckpointError(
                    f"{file} is missing, but {folder / RUN} lists it; restore it from a copy, or start a new run"
                )
            if sha256(file.read_bytes()).hexdigest() != expected:
                raise CheckpointError(
                    f"{file} was changed after the run was created: its SHA-256 sum differs from {folder / RUN}; "
                    "restore it, change settings with overrides on resume, or start a new run"
                )

    @property
    def base_entry(self) -> dict[str, str]:
        return {} if self.base is None else {"base": self.base}

    def stamp(self) -> dict[str, Any]:
        """The identity as every checkpoint holds it."""
        tokenizer = json.dumps({name: value for name, value in self.files.items() if name != CONFIG})
        return {
            "id": self.id,
            "config": self.files[CONFIG],
            "tokenizer": sha256(tokenizer.encode()).hexdigest(),
            **self.base_entry,
        }


def read_changes(folder: Path) -> list[Change]:
    """All changes so far, without their sums."""
    file, changes = folder / CHANGES, []
    lines = file.read_bytes().splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            change = json.loads(line)
            expected = change.pop("sha256")
            intact = checksum(change) == expected
        except (ValueError, KeyError, TypeError, AttributeError):
            intact = False
        if not intact:
            raise CheckpointError(f"{file}, line {number} is damaged; restore the file from a copy, or start a new run")
        changes.append(change)
    return changes


def append_change(folder: Path, change: Change) -> None:
    changes = [*read_changes(folder), change]
    lines = [json.dumps({**change, "sha256": checksum(change)}) + "\n" for change in changes]
    write_file(folder / CHANGES, "".join(lines).encode())


def checksum(change: Change) -> str:
    return sha256(json.dumps(change, sort_keys=True).encode()).hexdigest()
