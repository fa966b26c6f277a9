"""`regard index`: documents in one searchable file, for `regard ask`."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import DeviceOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from rich.console import Console

    from regard.language_model import LanguageModel
    from regard.retrieval.document_index import DocumentIndex, IndexSettings

DEFAULT_MODEL, DEFAULT_TOKENS, DEFAULT_OVERLAP = "minilm", 192, 32
SPARE = 8  # tokens of the context: special ones, and other borders of tokens where texts meet
SHOWN_SKIPPED = 10
REPLACEMENT = "\ufffd"  # of control characters
IndexArgument = Annotated[Path, typer.Argument(metavar="INDEX", help="The file that `regard index` has written.")]
RerankOption = Annotated[
    Path | None,
    typer.Option(help="A cross-encoder, which reads each of the best results with the question and orders them."),
]


def index(
    documents: Annotated[
        list[Path],
        typer.Argument(metavar="DOCUMENTS...", help="Files, or folders: Markdown, text, HTML, PDF and source code."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The index; updated if it exists. By default, the name of the first document with .index."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"An encoder or decoder that embeds the chunks; by default {DEFAULT_MODEL}.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=8, help=f"Tokens per chunk at most; by default {DEFAULT_TOKENS}.")
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help=f"Tokens that a chunk repeats of the one before; by default {DEFAULT_OVERLAP}."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Index documents: split them into chunks, and store their words and vectors in one file.

    The same command updates the index: new and changed files are read, removed ones dropped. After an interruption it
    continues. Chunks follow the structure of a document, and know their lines or pages. PDF files need pypdf.

    \b
    Examples:
      regard index docs
      regard index docs notes.md --out everything.index
      regard index docs --model runs/encoder --chunk-tokens 128 --overlap 16
      regard ask docs.index "How is a model quantized?"
    """
    from regard.retrieval.document_index import DocumentIndex
    from regard.retrieval.documents import SUFFIXES, DocumentError, document_files
    from regard.retrieval.update_index import knows, update_index

    named = out is not None
    out = out or Path(f"{documents[0].resolve().name}.index")
    earlier = DocumentIndex(out) if out.exists() and out.stat().st_size else None
    stored, known = (earlier.settings, earlier.files()) if earlier else (None, {})
    if earlier:
        earlier.close()
    if known and not named and not any(knows(known, path) for path in documents):
        raise DocumentError(f"{out} has other documents; name another index, or add these to it: --out {out}")
    unread: list[str] = []
    if not known and not any(file for path in documents for file in document_files(path, unread)):
        reason = f" ({unread[0]})" if unread else ""
        raise DocumentError(f"{documents[0]} has no documents{reason}; regard reads {', '.join(sorted(SUFFIXES))}")
    missing = next((path for path in documents if not path.exists() and not knows(known, path)), None)
    if missing is not None:
        raise DocumentError(f"{missing} does not exist, and {out} has nothing of it; give a file or a folder")
    name = model or (stored.model if stored else DEFAULT_MODEL)
    find_model(Path(name))  # before torch is imported: a mistyped name is refused at once
    if Path(name).exists():
        name = str(Path(name).resolve())  # the index may be asked from another folder
    from rich.console import Console

    from regard.cli.chat_terminal import CONTROL
    from regard.engine.inputs import context_limit
    from regard.load_model import load

    llm = load(Path(name), device)
    opened = DocumentIndex(out, new_settings(name, llm, stored, chunk_tokens, overlap))
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    context = context_limit(llm.model)
    titles = None if context is None else max(0, context - SPARE - opened.settings.limit)
    with progress_of_files(console) as progress:
        update = update_index(opened, documents, starts_of(llm), embedder(llm), progress, titles)
    for reason in update.skipped[:SHOWN_SKIPPED]:
        console.print(f"skipped: {CONTROL.sub(REPLACEMENT, reason)}")
    if len(update.skipped) > SHOWN_SKIPPED:
        console.print(f"skipped: {len(update.skipped) - SHOWN_SKIPPED} more")
    if update.replaced:
        more = f" and {len(update.replaced) - SHOWN_SKIPPED} more" if len(update.replaced) > SHOWN_SKIPPED else ""
        files = CONTROL.sub(REPLACEMENT, ", ".join(update.replaced[:SHOWN_SKIPPED]))
        console.print(f"not UTF-8, some characters were replaced: {files}{more}")
    if update.others:
        kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in update.others.most_common())
        console.print(f"not indexed, because files of these kinds are not read: {kinds}")
    count = opened.chunk_count()
    typer.echo(
        f"{counted(update.added, 'file')} added, {update.changed} changed, {update.removed} removed, "
        f"{update.unchanged} unchanged; {counted(update.chunks, 'chunk')} embedded, {count} in the index"
    )
    typer.echo(f'written: {out}; try: regard ask {out} "…"' if count else f"{out} is empty: the documents have no text")


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def new_settings(
    name: str, llm: "LanguageModel", stored: "IndexSettings | None", limit: int | None, overlap: int | None
) -> "IndexSettings":
    """The given settings; those that are not given are of the existing index, or the defaults."""
    from regard.engine.inputs import context_limit
    from regard.models.encoder import EncoderModule
    from regard.objectives.base import takes_tokens
    from regard.retrieval.document_index import IndexSettings
    from regard.training.base_model import fingerprint_model

    assert llm.folder is not None
    limit = limit or (stored.limit if stored else DEFAULT_TOKENS)
    if overlap is None:
        overlap = stored.overlap if stored else min(DEFAULT_OVERLAP, limit // 4)
    if overlap >= limit:
        raise ValueError(f"--overlap {overlap} must be less than --chunk-tokens {limit}")
    if isinstance(llm.model, EncoderModule) and not takes_tokens(llm.model.spec):
        raise ValueError(f"--model {name} does not read texts; choose an encoder or a decoder of texts")
    dim = llm.embed("a text").shape[-1]  # ValueError if the model cannot embed
    context = context_limit(llm.model)
    if context is not None and limit > context - SPARE:
        raise ValueError(f"--chunk-tokens {limit}: {name} reads {context} tokens; choose at most {context - SPARE}")
    return IndexSettings(name, fingerprint_model(llm.folder), dim, limit, overlap)


def open_index(path: Path, device: str) -> "tuple[DocumentIndex, LanguageModel]":
    """An index and the model that embeds its queries. ValueError if that has other weights now."""
    from regard.retrieval.document_index import DocumentIndex, DocumentIndexError

    index = DocumentIndex(path)
    name = index.settings.model
    find_model(Path(name))  # before torch is imported
    from regard.load_model import load
    from regard.training.base_model import fingerprint_model

    llm = load(Path(name), device)
    assert llm.folder is not None
    if fingerprint_model(llm.folder) != index.settings.fingerprint:
        raise DocumentIndexError(f"{name} has other weights than those that made {path}; make the index again")
    return index, llm


def open_reranker(name: Path, device: str) -> Callable[[str, Sequence[str]], list[float]]:
    """The scores of texts for a query. ValueError if the model is not a cross-encoder."""
    find_model(name)  # before torch is imported: a mistyped name is refused at once
    from regard.load_model import load
    from regard.models.encoder import EncoderModule
    from regard.models.heads import Classification

    llm = load(name, device)
    head = llm.model.spec.head if isinstance(llm.model, EncoderModule) else None
    if not isinstance(head, Classification) or head.labels != 1:
        raise ValueError(
            f"--rerank {name}: this model gives no score for a pair of texts; train one: regard train reranker"
        )
    return lambda query, texts: [prediction.value for prediction in llm.classify([(query, text) for text in texts])]


def starts_of(llm: "LanguageModel") -> "Callable[[str], list[int]]":
    return lambda text: llm.tokenizer.encode_with_starts(text)[1]


def embedder(llm: "LanguageModel") -> "Callable":
    return lambda texts: llm.embed(list(texts)).double().cpu().numpy()


@contextmanager
def progress_of_files(console: "Console") -> Generator[Callable[[int, int, str, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.cli.chat_terminal import CONTROL

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("files, {task.fields[chunks]} chunks"), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None, chunks=0)

        def update(done: int, total: int, file: str, chunks: int) -> None:
            name = CONTROL.sub(REPLACEMENT, Path(file).name)
            bar.update(task, completed=done, total=total, description=name[-30:], chunks=chunks)

        yield update
