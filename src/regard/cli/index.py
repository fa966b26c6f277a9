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
SHOWN_SKIPPED = 10
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
    from regard.retrieval.documents import DocumentError

    missing = next((path for path in documents if not path.exists()), None)
    if missing is not None:
        raise DocumentError(f"{missing} does not exist; give a file, or a folder of documents")
    out = out or Path(f"{documents[0].resolve().name}.index")
    stored = DocumentIndex(out).settings if out.exists() else None
    name = model or (stored.model if stored else DEFAULT_MODEL)
    find_model(Path(name))  # before torch is imported: a mistyped name is refused at once
    from rich.console import Console

    from regard.load_model import load
    from regard.retrieval.update_index import update_index

    llm = load(Path(name), device)
    opened = DocumentIndex(out, new_settings(name, llm, stored, chunk_tokens, overlap))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_of_files(console) as progress:
        update = update_index(opened, documents, starts_of(llm), embedder(llm), progress)
    for reason in update.skipped[:SHOWN_SKIPPED]:
        console.print(f"skipped: {reason}")
    if len(update.skipped) > SHOWN_SKIPPED:
        console.print(f"skipped: {len(update.skipped) - SHOWN_SKIPPED} more")
    typer.echo(
        f"{update.added} files added, {update.changed} changed, {update.removed} removed, {update.unchanged} "
        f"unchanged; {update.chunks} chunks embedded, {opened.chunk_count()} in the index"
    )
    typer.echo(f'written: {out}; try: regard ask {out} "…"')


def new_settings(
    name: str, llm: "LanguageModel", stored: "IndexSettings | None", limit: int | None, overlap: int | None
) -> "IndexSettings":
    """The given settings; those that are not given are of the existing index, or the defaults."""
    from regard.retrieval.document_index import IndexSettings
    from regard.training.base_model import fingerprint_model

    assert llm.folder is not None
    limit = limit or (stored.limit if stored else DEFAULT_TOKENS)
    if overlap is None:
        overlap = stored.overlap if stored else min(DEFAULT_OVERLAP, limit // 4)
    if overlap >= limit:
        raise ValueError(f"--overlap {overlap} must be less than --chunk-tokens {limit}")
    context = llm.model.spec.context
    if context is not None and limit >= context:
        raise ValueError(f"--chunk-tokens {limit}: {name} reads {context} tokens; choose fewer")
    dim = llm.embed("a text").shape[-1]
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

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("files, {task.fields[chunks]} chunks"), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None, chunks=0)

        def update(done: int, total: int, file: str, chunks: int) -> None:
            bar.update(task, completed=done, total=total, description=Path(file).name[-30:], chunks=chunks)

        yield update
