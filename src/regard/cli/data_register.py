"""`regard data register`: documents of the simulated world with questions, to measure retrieval on."""

import json
from pathlib import Path
from typing import Annotated

import typer

SECTIONS = 20  # per document


def register(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; must not exist.")],
    people: Annotated[int, typer.Option(min=2, help="Sections with facts about one person each.")] = 1000,
    questions: Annotated[int, typer.Option(min=1, help="Each is answered by one section.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Another number gives other people and facts.")] = 0,
) -> None:
    """Write a register of people as Markdown documents, and questions about them with their answers.

    The facts are random, so no model knows them without reading. Names recur, so that many sections are similar. No
    surname occurs in the training data of the recipes reranker and reader.

    \b
    Examples:
      regard data register --out register
      regard index register/documents --out register.index
      regard eval index register.index register/questions.jsonl
    """
    from random import Random

    from regard.checkpoint.atomic_folder import write_folder
    from regard.data.world import register as world

    if out.exists():
        raise ValueError(f"{out} exists; choose another folder")
    found = world.register(seed, people, "held-out")
    rng = Random(f"questions of a register/{seed}")
    asked = [world.draw_question(found, rng) for _ in range(questions)]
    with write_folder(out) as folder:
        (folder / "documents").mkdir()
        places = {}  # (file, line) of the name of each person
        for start in range(0, people, SECTIONS):
            part = start // SECTIONS + 1
            file, members = world.file_name(part), found[start : start + SECTIONS]
            text = world.document(members, world.title(part))
            (folder / "documents" / file).write_text(text, encoding="utf-8")
            lines = text.splitlines()
            places |= {start + i: (file, lines.index(f"## {person.name}") + 1) for i, person in enumerate(members)}
        rows = [
            {"question": question.text, "answer": question.answer, "path": file, "line": line}
            for question in asked for file, line in [places[question.person]]
        ]  # fmt: skip
        (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    typer.echo(f"{out}: {len(list((out / 'documents').iterdir()))} documents, {people} people, {questions} questions")
    typer.echo(f"next: regard index {out / 'documents'} --out {out}.index")
