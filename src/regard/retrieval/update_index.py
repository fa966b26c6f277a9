"""Bring an index up to date with files: only new and changed ones are read, chunked and embedded.

    unchanged    the size and the time of change are those of the index, or else the digest is
    removed      a file of the index below a given folder that no longer exists

Memory is bounded by the largest file and one batch of chunks. After an interruption the same call continues.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from regard.retrieval.chunks import DocumentChunk, chunk_document
from regard.retrieval.document_index import DocumentIndex, FileRecord
from regard.retrieval.documents import DocumentError, document_files, parse_document, read_bytes

BATCH = 64  # chunks that are embedded and stored together
Embed = Callable[[Sequence[str]], np.ndarray]  # (N, D) vectors of length 1
FileProgress = Callable[[int, int, str, int], None]
TokenStarts = Callable[[str], Sequence[int]]  # the first character of each token of a text


@dataclass
class IndexUpdate:
    """What an update has done."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    chunks: int = 0  # that were embedded
    skipped: list[str] = field(default_factory=list)  # why files could not be read


def update_index(
    index: DocumentIndex,
    paths: Sequence[str | Path],
    token_starts: TokenStarts,
    embed: Embed,
    progress: FileProgress = lambda done, total, file, chunks: None,
) -> IndexUpdate:
    """progress(files that are done, all files, the file that is read, chunks that were embedded)"""
    files = list(dict.fromkeys(file.resolve() for path in paths for file in document_files(path)))
    update = IndexUpdate()
    with index.updating():
        known = index.files()
        for done, file in enumerate(files):
            progress(done, len(files), str(file), update.chunks)
            try:
                for _ in add_file(index, file, known.get(str(file)), token_starts, embed, update):
                    progress(done, len(files), str(file), update.chunks)
            except (DocumentError, OSError) as error:
                update.skipped.append(str(error))
        remove_missing(index, known.keys() - set(map(str, files)), paths, update)
        index.build_cells()
    progress(len(files), len(files), "", update.chunks)
    return update


def remove_missing(
    index: DocumentIndex, known: Iterable[str], paths: Sequence[str | Path], update: IndexUpdate
) -> None:
    """Remove the files below the given folders that no longer exist."""
    roots = [Path(path).resolve() for path in paths]
    for path in known:
        if any(Path(path).is_relative_to(root) for root in roots) and not Path(path).exists():
            index.remove(path)
            update.removed += 1


def add_file(
    index: DocumentIndex,
    file: Path,
    known: FileRecord | None,
    token_starts: TokenStarts,
    embed: Embed,
    update: IndexUpdate,
) -> Iterator[None]:
    """Yields after each batch of chunks."""
    if not is_unicode(str(file)):
        raise DocumentError(f"{file!r}: the name is not UTF-8; rename it")
    status = file.stat()
    if known is not None and (known.size, known.changed) == (status.st_size, status.st_mtime_ns):
        update.unchanged += 1
        return
    data = read_bytes(file)
    digest = hashlib.sha256(data).digest()
    if known is not None and known.digest == digest:
        index.touch(str(file), status.st_mtime_ns)
        update.unchanged += 1
        return
    document = parse_document(data, file.suffix.lower(), str(file))
    id, stored = index.begin(str(file), len(data), status.st_mtime_ns, digest, document.unit)
    settings = index.settings
    chunks = chunk_document(document, token_starts(document.text), settings.limit, settings.overlap)
    for batch in batches(islice(chunks, stored, None)):
        index.add(id, batch, embed([embedded_text(chunk) for chunk in batch]))
        update.chunks += len(batch)
        yield
    index.finish(id)
    update.added, update.changed = update.added + (known is None), update.changed + (known is not None)


def is_unicode(name: str) -> bool:
    """Python reads bytes of a file's name that are not UTF-8 as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def embedded_text(chunk: DocumentChunk) -> str:
    """The titles of a chunk's section and its text: a paragraph may not name what it is about."""
    return "\n".join([" > ".join(chunk.section), chunk.text]) if chunk.section else chunk.text


def batches(chunks: Iterator[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    while batch := list(islice(chunks, BATCH)):
        yield batch
