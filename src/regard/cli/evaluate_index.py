"""`regard eval index`: how well an index finds what answers questions, and how well a model answers from it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.ask import budget_of, shown_path
from regard.cli.index import IndexArgument, RerankOption, embedder, open_index, open_reranker
from regard.cli.open_model import DeviceOption, open_chat_model
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.language_model import LanguageModel
    from regard.retrieval.document_index import Hit
    from regard.retrieval.quality import LabelledQuestion

BATCH = 16  # questions that a model answers at once
DEFAULT_SOURCES, DEFAULT_MAX_NEW = 4, 64


def evaluate_index(
    index: IndexArgument,
    questions: Annotated[
        Path,
        typer.Argument(metavar="QUESTIONS", help="JSONL with question, path, and optionally line and answer."),
    ],
    rerank: RerankOption = None,
    model: Annotated[
        Path | None, typer.Option(help="A chat model that answers the questions, with and without sources.")
    ] = None,
    sources: Annotated[
        int | None, typer.Option(min=1, max=10, help=f"Chunks in a prompt of --model; by default {DEFAULT_SOURCES}.")
    ] = None,
    max_new: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of an answer of --model, at most; by default {DEFAULT_MAX_NEW}.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Only the first questions.")] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how well an index finds the passages that answer questions, and how well a model answers from them.

    Each line of QUESTIONS names the file that answers it, and maybe the line (or page) that has the answer:
    {"question": "…", "path": "notes.md", "line": 12, "answer": "…"}. Searches by words, by vectors and by both are
    compared; with --rerank also the order of a cross-encoder, from which --model then has its sources, else hybrid.
    An answer is correct if it is `answer` but for citations, case, white space and a period; its citations are compared
    with the passage. Without sources, the model has only what it knows. --json has ranks and outputs.

    \b
    Examples:
      regard data register --out register
      regard index register/documents --out register.index
      regard eval index register.index register/questions.jsonl
      regard eval index register.index register/questions.jsonl --rerank runs/reranker --model runs/reader
    """
    if model is None and (sources, max_new) != (None, None):
        raise ValueError("--sources and --max-new are of the answers; add --model, or leave them out")
    for name in (rerank, model):
        if name is not None:
            find_model(name)  # before torch is imported: a mistyped name is refused at once
    from rich.console import Console
    from rich.progress import Progress

    from regard.retrieval.quality import SearchQuality, read_questions

    asked = read_questions(questions)[:count]
    if model is not None and any(question.answer is None for question in asked):
        raise ValueError(f"--model needs an `answer` in every line of {questions}; add them, or leave it out")
    order = None if rerank is None else open_reranker(rerank, device)
    opened, encoder = open_index(index, device)
    files = opened.files()
    for each in asked:
        about = [file for file in files if each.is_about(file)]
        if not about:
            raise ValueError(f"{questions}: the index has no file {each.path!r}; correct the path, or update the index")
        line = each.line
        if line is not None and not any(opened.has_place(file, line) for file in about):
            raise ValueError(
                f"{questions}: no chunk of {each.path!r} has line (or page) {line}; correct it, or update the index"
            )
    methods = {"words": ("words", None), "vectors": ("vectors", None), "hybrid": ("hybrid", None)}
    methods |= {} if order is None else {"reranked": ("hybrid", order)}
    result: dict[str, Any] = {"questions": len(asked), "chunks": opened.chunk_count(), "search": {}}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        found: list[list[Hit]] = []
        for name, (method, reranker) in methods.items():
            task = bar.add_task(name, total=len(asked))
            found, seconds = [], []
            for hits, elapsed in searched(opened, embedder(encoder), asked, method, reranker):
                found.append(hits)
                seconds.append(elapsed)
                bar.advance(task)
            ranks = [question.rank(hits) for question, hits in zip(asked, found, strict=True)]
            milliseconds = 1000 * sorted(seconds)[len(seconds) // 2]
            result["search"][name] = SearchQuality.of(ranks).as_dict() | {"ms": milliseconds, "ranks": ranks}
        if model is not None:
            llm = open_chat_model(model, device)
            llm.rows = BATCH
            task = bar.add_task("answers", total=2 * len(asked))
            best = [hits[: sources or DEFAULT_SOURCES] for hits in found]
            for name, given in {"answers": best, "without_sources": [[] for _ in asked]}.items():
                result[name] = grade_answers(
                    llm, asked, given, max_new or DEFAULT_MAX_NEW, lambda: bar.advance(task, BATCH)
                )
    print(json.dumps(result) if as_json else format_result(result))


def searched(
    index: Any, embed: Any, questions: "Sequence[LabelledQuestion]", method: Any, rerank: Any
) -> "Iterator[tuple[list[Hit], float]]":
    """The hits of each question, and the seconds of the search."""
    import time

    from regard.retrieval.quality import DEPTHS
    from regard.retrieval.search import search

    for question in questions:
        start = time.perf_counter()
        hits = search(index, question.text, embed, max(DEPTHS), method, rerank)
        yield hits, time.perf_counter() - start


def grade_answers(
    llm: "LanguageModel",
    questions: "Sequence[LabelledQuestion]",
    found: "Sequence[Sequence[Hit]]",
    max_new: int,
    advance: Any,
) -> dict[str, Any]:
    """The shares of answers that are correct, and that cite a passage with the answer."""
    from regard.retrieval.quality import is_correct
    from regard.retrieval.sources import choose_sources
    from regard.text.source_prompt import cited_sources, question_messages

    correct, cited, outputs = 0, 0, []
    for start in range(0, len(questions), BATCH):
        batch = questions[start : start + BATCH]
        sources = [
            choose_sources(
                hits, lambda prompt: len(llm.tokenizer.encode(prompt)), budget_of(llm, question.text, max_new)
            )
            for question, hits in zip(batch, found[start : start + BATCH], strict=True)
        ]
        for question, hits, given in zip(batch, found[start : start + BATCH], sources, strict=True):
            if hits and not given:
                raise ValueError(
                    f"no source fits into the {llm.engine.capacity} tokens of the model beside the question "
                    f"{question.text!r} and --max-new {max_new}; index smaller chunks, or use a longer context"
                )
        prompts = [
            question_messages(question.text, [replace(source, path=shown_path(source.path)) for source in given])
            for question, given in zip(batch, sources, strict=True)
        ]
        answers = llm.chat(prompts, max_new=max_new, temperature=0)
        for question, given, answer in zip(batch, sources, answers, strict=True):
            assert question.answer is not None
            right = is_correct(answer, question.answer)
            right_source = any(map(question.is_in, cited_sources(answer, given)))
            correct += right
            cited += right and right_source
            outputs.append(
                {
                    "question": question.text, "answer": question.answer, "output": answer.strip(), "correct": right,
                    "cited": right_source,
                }
            )  # fmt: skip
        advance()
    return {"correct": correct / len(questions), "correct_and_cited": cited / len(questions), "outputs": outputs}


def format_result(result: dict[str, Any]) -> str:
    lines = [f"{result['questions']} questions, {result['chunks']:,} chunks", ""]
    lines.append(f"{'':10} recall@1  recall@5  recall@10  MRR              ms")
    for name, values in result["search"].items():
        recall = "".join(f"{values[f'recall@{depth}']:<{width}.3f}" for depth, width in ((1, 10), (5, 10), (10, 11)))
        error = "" if values["error"] is None else f"± {values['error']:.3f}"
        lines.append(f"{name:10} {recall}{values['mrr']:.3f} {error:7}    {values['ms']:.0f}")
    for name, label in (("answers", "answers from the sources"), ("without_sources", "without sources")):
        if name in result:
            graded = result[name]
            lines += [""] * (name == "answers")
            lines.append(f"{label}: {graded['correct']:.1%} correct, {graded['correct_and_cited']:.1%} with a citation")
    lines += ["", "± is the standard error over the questions; ms the median of a search"]
    return "\n".join(lines)
