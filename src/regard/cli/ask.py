"""`regard ask`: answer a question from the documents of an index, with citations."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.index import SPARE, IndexArgument, RerankOption, embedder, open_index, open_reranker
from regard.cli.open_model import DeviceOption, open_chat_model
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
    count: Annotated[
        int,
        typer.Option(
            "--sources", min=1, max=100, help="Number of chunks to retrieve; overlapping ones become one source."
        ),
    ] = 5,
    method: Annotated[
        Literal["hybrid", "vectors", "words"],
        typer.Option(help="Search by words (BM25), by vectors, or by both scores (hybrid)."),
    ] = "hybrid",
    rerank: RerankOption = None,
    budget: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens of the sources in the prompt; by default half of the model's context."),
    ] = None,
    max_new: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Generate at most this many tokens; by default {DEFAULT_MAX_NEW}, or a quarter of a short context.",
        ),
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
    if not text.strip():
        raise ValueError("the question is empty; ask for something")
    if model is not None:
        find_model(model)  # before torch is imported: a mistyped name is refused at once
    elif any(option is not None for option in (budget, max_new, temperature)):
        raise ValueError("--budget, --max-new and --temperature are of the answer; add --model, or leave them out")
    order = None if rerank is None else open_reranker(rerank, device)
    from regard.retrieval.document_index import DocumentIndex
    from regard.retrieval.search import search
    from regard.retrieval.sources import choose_sources

    if method == "words":  # which needs no encoder
        opened, embed = DocumentIndex(index), None
    else:
        opened, encoder = open_index(index, device)
        embed = embedder(encoder)
    found = search(opened, text, embed, count, method, order)
    hits = [hit._replace(path=shown_path(hit.path)) for hit in found]
    if model is None:
        sources = choose_sources(hits, len, sys.maxsize)
        return print_json(None, sources) if as_json else print_sources(sources, texts=True)
    llm = open_chat_model(model, device)
    capacity = llm.engine.capacity
    max_new = max_new or min(DEFAULT_MAX_NEW, capacity // 4)
    room = budget_of(llm, text, max_new)
    if (budget or 1) > room:
        raise ValueError(
            f"the sources need more than the {max(room, 0)} tokens that {model} has for them beside the question and "
            f"--max-new {max_new}; lower --budget or --max-new"
        )
    budget = budget or min(capacity // 2, room)
    sources = choose_sources(hits, lambda prompt: len(llm.tokenizer.encode(prompt)), budget)
    if hits and not sources:
        typer.echo(f"no source fits into --budget {budget}, so the model answers without any; raise it", err=True)
    answer(llm, text, sources, max_new, temperature or 0.0, as_json)


def shown_path(path: str) -> str:
    """Relative, if it is below the current folder."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def budget_of(llm: "LanguageModel", question: str, max_new: int) -> int:
    """The tokens that a prompt has for its sources."""
    from regard.text.source_prompt import question_messages

    return llm.engine.capacity - max_new - len(llm.encode_chat(question_messages(question, ()))) - SPARE


def answer(
    llm: "LanguageModel",
    question: str,
    sources: "Sequence[PromptSource]",
    max_new: int,
    temperature: float,
    as_json: bool,
) -> None:
    from regard.text.source_prompt import cited_sources, question_messages

    pieces, finish = [], "stop"
    messages = question_messages(question, sources)
    for token, piece in llm.stream_tokens(messages, max_new=max_new, temperature=temperature):
        pieces.append(piece)
        finish = token.finish or "stop"
        if not as_json:
            print(printable(piece), end="", flush=True)
    text = "".join(pieces)
    if as_json:
        return print_json(text, sources, finish)
    print("\n")
    if finish == "length":
        typer.echo(f"the answer was cut off after {max_new} tokens; raise --max-new", err=True)
    cited = cited_sources(text, sources)
    if sources and not cited:
        print("the answer cites no source; the model had:")
    if sources:
        print_sources(cited or sources, texts=False)


def print_sources(sources: "Sequence[PromptSource]", texts: bool) -> None:
    for source in sources:
        section = f"  ({' > '.join(source.section)})" if source.section else ""
        print(printable(f"[{source.number}] {source.place}{section}"))
        if texts:
            print(printable("\n".join(f"    {line}" for line in source.text.splitlines())), end="\n\n")
    if not sources:
        print("nothing was found")


def printable(text: str) -> str:
    """On a terminal, without control characters: a document or a model must not send it escape sequences."""
    from regard.cli.chat_terminal import CONTROL

    return CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text


def print_json(text: str | None, sources: "Sequence[PromptSource]", finish: str | None = None) -> None:
    from regard.text.source_prompt import cited_sources

    rows = [source.data for source in sources]
    cited = [] if text is None else [source.number for source in cited_sources(text, sources)]
    print(json.dumps({"answer": text, "finish": finish, "cited": cited, "sources": rows}))
