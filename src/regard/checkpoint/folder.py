"""Folders that are either whole or not there.

A folder is written under a hidden name beside its place, every file is forced to disk, a manifest with the size and
SHA-256 sum of each is added, and only then is it renamed: a writer killed at any moment leaves the old folder or the
new one, never a mixture. What it left besides (`.name.partial`, `.name.old`) is cleared, or put back where the place is
empty, by the next writer. `check_folder` reads everything again and names the file and its fault.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A folder that must not be used: the message names the file and what is wrong with it."""


@contextmanager
def write_folder(path: str | Path) -> Generator[Path]:
    """Fill the folder that is yielded; after a block without errors it stands at `path`, in place of the old."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, old = beside(path, "partial"), beside(path, "old")
    recover(path)
    partial.mkdir()
    try:
        yield partial
        write_manifest(partial)
    except BaseException:
        shutil.rmtree(partial)
        raise
    if path.exists():
        path.rename(old)
    partial.rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)  # the new folder stands; a rest of the old is cleared by the next writer


def check_folder(path: str | Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there, byte for byte."""
    path = Path(path)
    for name, entry in read_manifest(path).items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; use another checkpoint, or copy this one again")
        size = file.stat().st_size
        if size != entry["bytes"]:
            fault = "truncated" if size < entry["bytes"] else "too long"
            raise CheckpointError(
                f"{file} is {fault}: {size} bytes instead of {entry['bytes']}; use another checkpoint"
            )
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry["sha256"]:
                raise CheckpointError(f"{file} was changed: its SHA-256 is not the manifest's; use another checkpoint")


def remove_folder(path: Path) -> None:
    """Take a folder away at once: it disappears from its place before its files are deleted one by one."""
    old = beside(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old)


def recover(path: Path) -> None:
    """Clear what a killed writer of this folder left; a replaced folder without its successor is put back."""
    old = beside(path, "old")
    if old.exists() and not path.exists():
        old.rename(path)
    for rest in (old, beside(path, "partial")):
        if rest.exists():
            shutil.rmtree(rest)


def beside(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def write_manifest(folder: Path) -> None:
    """The sums of all files."""
    entries = {}
    for file in sorted(filter(Path.is_file, folder.rglob("*"))):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
        entries[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": digest}
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({"files": entries}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for inner in [folder, *filter(Path.is_dir, folder.rglob("*"))]:
        sync(inner)


def read_manifest(folder: Path) -> dict[str, dict]:
    file = folder / MANIFEST
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            inside = folder.resolve() in (folder / name).resolve().parents
            if not inside or not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
                raise ValueError(f"entry {name!r}")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {folder} is no complete checkpoint; use another one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise CheckpointError(f"{file} cannot be read ({fault}); use another checkpoint") from None
    return files


def sync(folder: Path) -> None:
    """Force a folder's own entries (names, renames) to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
