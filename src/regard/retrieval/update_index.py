"""Bring an index up to date with files: only new and changed ones are read, chunked and embedded.

    unchanged    the size and the time of change are those of the index, or else the digest is
    removed      a file of the index, given or below a given folder, that no longer exists

Memory is bounded by the largest file and one batch of chunks. After an interruption the same call continues.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from regard.retrieval.chunks import DocumentChunk, chunk_document
from regard.retrieval.document_index import DocumentIndex, FileRecord
from regard.retrieval.documents import (
    SURROGATES,
    DocumentError,
    document_files,
    other_suffixes,
    parse_document,
    read_bytes,
)

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
    skipped: list[str] = field(default_factory=list)  # why files and folders could not be read
    replaced: list[str] = field(default_factory=list)  # files with characters that are not UTF-8
    others: Counter[str] = field(default_factory=Counter)  # suffixes of files that are no documents


def update_index(
    index: DocumentIndex,
    paths: Sequence[str | Path],
    token_starts: TokenStarts,
    embed: Embed,
    progress: FileProgress = lambda done, total, file, chunks: None,
    title_tokens: int | None = None,
) -> IndexUpdate:
    """progress(files that are done, all files, the file that is read, chunks that were embedded)

    title_tokens: tokens that the model's context leaves for the titles of a chunk; None: any number.
    """
    update = IndexUpdate()
    with index.updating():
        known, stored = index.files(), index.paths()
        present = [path for path in paths if not is_missing(path) or not knows(known, path)]
        files = list(dict.fromkeys(file.resolve() for path in present for file in document_files(path, update.skipped)))
        update.others = other_suffixes(present, index.path)
        for done, file in enumerate(files):
            progress(done, len(files), str(file), update.chunks)
            try:
                for _ in add_file(index, file, known.get(str(file)), token_starts, embed, update, title_tokens):
                    progress(done, len(files), str(file), update.chunks)
            except OSError as error:
                update.skipped.append(str(error))
            except DocumentError as error:
                update.skipped.append(str(error) + drop_earlier(index, str(file), stored, known, update))
        remove_missing(index, stored - set(map(str, files)), paths, known, update)
        index.build_cells()
    progress(len(files), len(files), "", update.chunks)
    return update


def knows(files: Iterable[str], path: str | Path) -> bool:
    """Whether the path is one of these files, or a folder that has one."""
    return any(Path(file).is_relative_to(Path(path).resolve()) for file in files)


def remove_missing(
    index: DocumentIndex,
    stored: Iterable[str],
    paths: Sequence[str | Path],
    known: Collection[str],
    update: IndexUpdate,
) -> None:
    """Remove the stored files that are given or below the given folders, and no longer exist."""
    roots = [Path(path).resolve() for path in paths]
    for path in stored:
        other = os.path.exists(path) and not os.path.isfile(path)  # such as a folder of this name
        if any(Path(path).is_relative_to(root) for root in roots) and (other or is_missing(path)):
            index.remove(path)
            update.removed += path in known


def is_missing(path: str | Path) -> bool:
    """Whether there is nothing; what is in a folder that cannot be read is not missing."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def drop_earlier(
    index: DocumentIndex, path: str, stored: Collection[str], known: Collection[str], update: IndexUpdate
) -> str:
    """Remove what is stored of a file that is no document now, and say so."""
    if path in stored:
        index.remove(path)
    if path not in known:
        return ""
    update.removed += 1
    return "; its earlier text was removed from the index"


def add_file(
    index: DocumentIndex,
    file: Path,
    known: FileRecord | None,
    token_starts: TokenStarts,
    embed: Embed,
    update: IndexUpdate,
    title_tokens: int | None,
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
        index.set_changed(str(file), status.st_mtime_ns)
        update.unchanged += 1
        return
    document = parse_document(data, file.suffix.lower(), str(file))
    if data.strip() and not document.text.strip():
        raise DocumentError(f"{file}: no text found; text in images, as in a scan, is not read")
    if document.replaced:
        update.replaced.append(str(file))
    id, stored = index.begin(str(file), len(data), status.st_mtime_ns, digest, document.unit)
    settings = index.settings
    chunks = chunk_document(document, token_starts(document.text), settings.limit, settings.overlap)
    for batch in batches(islice(chunks, stored, None)):
        index.add(
            id, batch, embed([embedded_text(shorten_titles(chunk, token_starts, title_tokens)) for chunk in batch])
        )
        update.chunks += len(batch)
        yield
    index.finish(id)
    if known is None:
        update.added += 1
    else:
        update.changed += 1


def is_unicode(name: str) -> bool:
    """Python reads bytes of a file's name that are not UTF-8 as surrogates."""
    return SURROGATES.search(name) is None


def shorten_titles(chunk: DocumentChunk, token_starts: TokenStarts, most: int | None) -> DocumentChunk:
    """The last tokens of the titles, which are of the innermost section, so that the model also reads the text."""
    titles = " > ".join(chunk.section)
    if most is None or not titles or len(starts := token_starts(titles)) <= most:
        return chunk
    return replace(chunk, section=(titles[starts[-most] :].lstrip(" >"),) if most else ())


def embedded_text(chunk: DocumentChunk) -> str:
    """The titles of a chunk's section and its text: a paragraph may not name what it is about."""
    return "\n".join([" > ".join(chunk.section), chunk.text]) if chunk.section else chunk.text


def batches(chunks: Iterator[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    while batch := list(islice(chunks, BATCH)):
        yield batch
