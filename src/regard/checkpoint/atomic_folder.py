"""Folders and files that are written completely or not at all.

A folder is written under a hidden name next to its destination. Every file is synced to disk, a manifest with the size
and SHA-256 sum of each file is added, and then the folder is renamed. A writer killed at any moment therefore leaves
the old folder or the new one, never a mixture. The hidden folders that it leaves (`.name.partial`, `.name.old`) are
deleted by the next writer, or renamed back if the destination is missing. `check_folder` compares every file with the
manifest.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A damaged, incomplete or unsupported checkpoint; the message names the file and its fault."""


@contextmanager
def write_folder(path: str | Path) -> Generator[Path]:
    """Yield a temporary folder to fill; it replaces the one at `path` if the block raises no error."""
    path = Path(path)
    make_folder(path.parent)
    partial, old = hidden_sibling(path, "partial"), hidden_sibling(path, "old")
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
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)  # if this fails, the next writer deletes it


def check_new(path: Path) -> None:
    """Raise ValueError if a file or folder of this name exists, or cannot be created."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        check_writable(next(parent for parent in path.absolute().parents if parent.exists()), str(path))
    else:
        raise ValueError(f"{path} exists; choose another name")


def check_writable(folder: Path, name: str) -> None:
    """Raise ValueError if no file can be created in the folder. name: what is to be written there."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{name}: files cannot be written in {folder} ({error.strerror})") from error


def check_folder(path: str | Path) -> None:
    """Raise CheckpointError unless every file in the manifest exists with the same bytes."""
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
                raise CheckpointError(
                    f"{file} was changed: its SHA-256 sum differs from the manifest; use another checkpoint"
                )


def remove_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so that no reader finds a part of it."""
    old = hidden_sibling(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    sync_folder(path.parent)
    shutil.rmtree(old)


def write_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace a file; at any moment the disk holds the old content or the new one."""
    partial = hidden_sibling(path, "partial")
    try:
        with partial.open("wb") as stream:
            stream.writelines([content] if isinstance(content, bytes) else content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and sync their names to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Sync all files in a folder and its subfolders to disk."""
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    for directory in [folder, *filter(Path.is_dir, folder.rglob("*"))]:
        sync_folder(directory)


def recover(path: Path) -> None:
    """Delete the folders that a killed writer left; an old folder without a replacement is renamed back."""
    old = hidden_sibling(path, "old")
    if old.exists() and not path.exists():
        old.rename(path)
    for leftover in (old, hidden_sibling(path, "partial")):
        if leftover.exists():
            shutil.rmtree(leftover)


def hidden_sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def write_manifest(folder: Path) -> None:
    """Write the manifest, and sync every file and folder to disk."""
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
    mode = (folder / MANIFEST).stat().st_mode  # as the umask says; safetensors writes its files with 0600
    for name in entries:
        (folder / name).chmod(mode)
    for directory in [folder, *filter(Path.is_dir, folder.rglob("*"))]:
        sync_folder(directory)


def read_manifest(folder: Path) -> dict[str, dict]:
    file = folder / MANIFEST
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            inside = folder.resolve() in (folder / name).resolve().parents
            if not inside or not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
                raise ValueError(f"entry {name!r}")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {folder} is not a complete checkpoint; use another one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a valid manifest ({error}); use another checkpoint") from None
    return files


def sync_folder(folder: Path) -> None:
    """Sync the names of the files in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
