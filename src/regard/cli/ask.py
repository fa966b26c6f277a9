"""`regard ask`: answer a question from the documents of an index, with citations."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.index import IndexArgument, RerankOption, embedder, open_index, open_reranker
from regard.cli.open_model import DeviceOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regard.language_model import LanguageModel
    from regard.text.source_prompt import PromptSource

DEFAULT_MAX_NEW = 256


def ask(
    index: IndexArgument,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question; - reads it from standard input.")],
    model: Annotated[
        Path | None,
        typer.Option(help="A chat model that answers from the sources; without it, the sources are printed."),
    ] = None,
    count: Annotated[int, typer.Option("--sources", min=1, max=100, help="Chunks that are searched for.")] = 5,
    method: Annotated[
        Literal["hybrid", "vectors", "words"],
        typer.Option(help="Search by words (BM25), by vectors, or by both rankings (hybrid)."),
    ] = "hybrid",
    rerank: RerankOption = None,
    budget: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens of the sources in the prompt; by default half of the model's context."),
    ] = None,
    max_new: Annotated[
        int | None, typer.Option(min=1, help=f"Generate at most this many tokens; by default {DEFAULT_MAX_NEW}.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0, the default, always takes the most likely token.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the answer, all sources, and those it cites.")
    ] = False,
) -> None:
    """Find the parts of documents that answer a question, and let a model answer from them.

    Each source has a number, which the answer cites, and leads to a file and its lines. The text of a source is data:
    it is encoded without special tokens, and cannot end its own element in the prompt.

    \b
    Examples:
      regard ask docs.index "How is a model quantized?"
      regard ask docs.index "How is a model quantized?" --model smollm2
      regard ask docs.index "How is a model quantized?" --rerank runs/reranker --model smollm2
      regard ask docs.index "sliding window" --method words --sources 10 --json
    """
    text = sys.stdin.read() if question == "-" else question
    if model is not None:
        find_model(model)  # before torch is imported: a mistyped name is refused at once
    elif any(option is not None for option in (budget, max_new, temperature)):
        raise ValueError("--budget, --max-new and --temperature are of the answer; add --model, or leave them out")
    order = None if rerank is None else open_reranker(rerank, device)
    opened, encoder = open_index(index, device)
    from regard.retrieval.search import search
    from regard.retrieval.sources import choose_sources

    found = search(opened, text, embedder(encoder), count, method, order)
    hits = [hit._replace(path=shown_path(hit.path)) for hit in found]
    if model is None:
        sources = choose_sources(hits, len, sys.maxsize)
        return print_json(None, sources) if as_json else print_sources(sources, texts=True)
    llm = open_chat_model(model, device)
    capacity = llm.engine.capacity
    budget, max_new = budget or capacity // 2, max_new or DEFAULT_MAX_NEW
    if budget + max_new >= capacity:
        raise ValueError(f"--budget {budget} and --max-new {max_new} need more than the {capacity} tokens of {model}")
    sources = choose_sources(hits, lambda prompt: len(llm.tokenizer.encode(prompt)), budget)
    if hits and not sources:
        typer.echo(f"no source fits into --budget {budget}, so the model answers without any; raise it", err=True)
    answer(llm, text, sources, max_new, temperature or 0.0, as_json)


def shown_path(path: str) -> str:
    """Relative, if it is below the current folder."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def open_chat_model(model: Path, device: str) -> "LanguageModel":
    from regard.cli.open_model import open_model

    llm = open_model(model, device)
    if llm.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template, so it cannot answer; leave --model out to see the sources")
    llm.rows = 1  # the engine reserves memory for one request
    return llm


def answer(
    llm: "LanguageModel",
    question: str,
    sources: "Sequence[PromptSource]",
    max_new: int,
    temperature: float,
    as_json: bool,
) -> None:
    from regard.text.source_prompt import cited_sources, question_messages

    pieces = []
    for piece in llm.stream(question_messages(question, sources), max_new=max_new, temperature=temperature):
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)
    text = "".join(pieces)
    if as_json:
        return print_json(text, sources)
    print("\n")
    print_sources(cited_sources(text, sources) or sources, texts=False)


def print_sources(sources: "Sequence[PromptSource]", texts: bool) -> None:
    for source in sources:
        section = f"  ({' > '.join(source.section)})" if source.section else ""
        print(f"[{source.number}] {source.place}{section}")
        if texts:
            print("\n".join(f"    {line}" for line in source.text.splitlines()), end="\n\n")
    if not sources:
        print("nothing was found")


def print_json(text: str | None, sources: "Sequence[PromptSource]") -> None:
    from regard.text.source_prompt import cited_sources

    rows = [source.data for source in sources]
    cited = [] if text is None else [source.number for source in cited_sources(text, sources)]
    print(json.dumps({"answer": text, "cited": cited, "sources": rows}))
