"""Evaluation tasks that are written as files: a table of rows, and a small TOML file that says how to ask.

    kind = "choice"                      # perplexity, choice or generation
    data = "capitals.jsonl"              # beside this file: JSON Lines, JSON, CSV, Parquet; texts for perplexity
    prompt = "Q: {{ question }}\\nA:"     # a Jinja template of the columns
    choices = "options"                  # the column of the choices, or a list of templates: ["no", "yes"]
    answer = "label"                     # the column of the answer
    shots = "examples.jsonl"             # rows for --shots; none may be in `data`

| key         | kinds              | default       | meaning                                                       |
| ----------- | ------------------ | ------------- | ------------------------------------------------------------- |
| text        | perplexity         | {{ text }}    | the text                                                      |
| prompt      | choice, generation | {{ prompt }}  | what is asked                                                 |
| choices     | choice             | choices       | a column with a list of strings, or templates                 |
| answer      | choice, generation | answer        | the index or text of the right choice; one or more references |
| delimiter   | choice, generation | one space     | between a prompt and its answer                               |
| description | choice, generation | nothing       | before the examples and the prompt                            |
| separator   | choice, generation | two line ends | after each example                                            |
| stop        | generation         | the separator | strings that end an output; with --chat by default none       |
| max_new     | generation         | 64            | tokens of an output                                           |

A file of rows is a task itself, with these defaults: rows with `choices` are of the kind choice, with `answer` of the
kind generation, with `text` of the kind perplexity. A text file is one text.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError

from regard.data.file_index import FileError
from regard.data.readers import ExampleFile, find_files, open_file
from regard.spec import suggest_name
from regard.text.chat import TEMPLATE_FAULTS
from regard.text.jinja_sandbox import BoundedEnvironment

ASKING = ("choice", "generation")
KEYS: dict[str, tuple[type | tuple[type, ...], tuple[str, ...]]] = {  # of the TOML file: types and kinds
    "data": (str, ("perplexity", *ASKING)),
    "text": (str, ("perplexity",)),
    "prompt": (str, ASKING),
    "choices": ((str, list), ("choice",)),
    "answer": (str, ASKING),
    "delimiter": (str, ASKING),
    "description": (str, ASKING),
    "separator": (str, ASKING),
    "shots": (str, ASKING),
    "stop": (list, ("generation",)),
    "max_new": (int, ("generation",)),
}
KINDS = ("perplexity", *ASKING)


@dataclass(frozen=True)
class EvalQuestion:
    """A row of a task as it is asked. where: the file and line, for errors."""

    where: str
    prompt: str
    answers: tuple[str, ...]  # the references; of a choice the right one
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    name: str
    kind: str
    questions: Sequence[EvalQuestion]  # of perplexity: the texts, as prompts
    shots: Sequence[EvalQuestion] = ()
    delimiter: str = " "
    description: str = ""
    separator: str = "\n\n"
    stop: tuple[str, ...] | None = None  # None: the separator, in a chat nothing
    max_new: int = 64


@dataclass(frozen=True)
class RowReader:
    """The rows of a file with where each stands, and how they become questions."""

    kind: str
    path: Path
    table: Mapping[str, Any] = field(default_factory=dict)

    def questions(self) -> list[EvalQuestion]:
        found: list[EvalQuestion] = []
        for file in open_rows(self.path):
            for index, row in enumerate(file):
                found.append(self.question(row, file.origin(index)))
        if not found:
            raise FileError(f"{self.path} is empty; give a file with at least one row")
        return found

    def question(self, row: Mapping[str, Any], where: str) -> EvalQuestion:
        if self.kind == "perplexity":
            return EvalQuestion(where, render(self.table.get("text", "{{ text }}"), row, where), ())
        prompt = render(self.table.get("prompt", "{{ prompt }}"), row, where)
        answer = column(self.table.get("answer", "answer"), row, where)
        if self.kind == "generation":
            return EvalQuestion(where, prompt, references(answer, where))
        choices = read_choices(self.table.get("choices", "choices"), row, where)
        return EvalQuestion(where, prompt, (choices[right_choice(answer, choices, where)],), choices)


def read_task(path: str | Path) -> EvalTask:
    """The task of a TOML file, or of a file of rows or text. FileError names the file, the line and the fault."""
    path = Path(path)
    if path.suffix != ".toml":
        return EvalTask(path.stem, kind := kind_of(path), RowReader(kind, path).questions())
    table = read_table(path)
    kind, data = table.pop("kind"), path.parent / table.pop("data")
    questions = RowReader(kind, data, table).questions()
    shots: list[EvalQuestion] = []
    if "shots" in table:
        shots = RowReader(kind, path.parent / table["shots"], table).questions()
        check_disjoint(questions, shots)
    names = {"delimiter", "description", "separator", "max_new"} & table.keys()
    stop = tuple(table["stop"]) if "stop" in table else None
    return EvalTask(path.stem, kind, questions, shots, **{name: table[name] for name in names}, stop=stop)


def read_table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path} does not exist; give a task in a TOML file, or a file of rows") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is not TOML: {error}") from None
    kind = table.get("kind")
    if kind not in KINDS:
        raise FileError(f"{path}: kind = {kind!r} is not a kind of task; choose one of {', '.join(KINDS)}")
    if "data" not in table:
        raise FileError(f"{path}: `data` is missing; name the file of the rows")
    for name, value in table.items():
        if name == "kind":
            continue
        if name not in KEYS:
            raise FileError(f"{path}: there is no key {name!r}; {suggest_name(name, ['kind', *KEYS])}")
        types, kinds = KEYS[name]
        if kind not in kinds:
            raise FileError(f"{path}: {name!r} has no effect in a task of kind {kind}; leave it out")
        listed = isinstance(value, list)
        if not isinstance(value, types) or (listed and not all(isinstance(item, str) and item for item in value)):
            raise FileError(f"{path}: {name} = {value!r} has the wrong type; see docs/how-to/evaluate.md")
    if table.get("max_new", 1) < 1:
        raise FileError(f"{path}: max_new = {table['max_new']} must be at least 1")
    return table


def open_rows(path: Path) -> list[ExampleFile]:
    """Texts are whole files."""
    files, format = find_files(path)
    return [open_file(file, "files" if format == "text" else format) for file in files]


def kind_of(path: Path) -> str:
    for file in open_rows(path):
        for row in file:
            for name, kind in (("choices", "choice"), ("answer", "generation"), ("text", "perplexity")):
                if name in row:
                    check_columns(row, kind, file.origin(0))
                    return kind
            raise FileError(
                f"{file.origin(0)}: the columns {', '.join(row)} do not tell the kind of the task; use prompt, choices "
                "and answer, prompt and answer, or text, or describe the task in a TOML file"
            )
    raise FileError(f"{path} is empty; give a file with at least one row")


def check_columns(row: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse a column whose name is nearly one that decides the kind: without it, another kind would be evaluated."""
    for name in row.keys() - {"choices", "answer", "text", "prompt"}:
        close = get_close_matches(name, ("choices", "answer"), n=1, cutoff=0.75)
        if close and close[0] not in row:
            raise FileError(
                f"{where}: the column {name!r} has no effect in a task of kind {kind}; did you mean {close[0]!r}? If "
                "not, describe the task in a TOML file"
            )


def render(template: str, row: Mapping[str, Any], where: str) -> str:
    """A Jinja template of the columns of a row, in a sandbox."""
    environment = BoundedEnvironment()
    environment.undefined, bounded = StrictUndefined, environment.finalize
    assert bounded is not None, "the environment bounds the size of values"
    environment.finalize = lambda value: printable(bounded(value))  # of every {{ }}
    try:
        return environment.render_bounded(template, dict(row))
    except TemplateError as error:
        raise FileError(f"{where}: {error.message}; the columns are {', '.join(row) or 'none'}") from None
    except TEMPLATE_FAULTS as error:
        raise FileError(f"{where}: the template {template!r} failed on this row: {error}") from None


def printable(value: Any) -> Any:
    """Refuse what str() would write as Python text, such as None or a dictionary."""
    if isinstance(value, str) or is_number(value):
        return value
    raise ValueError(f"{value!r:.60} is neither a string nor a finite number; correct the row, or convert it there")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value)


def column(name: str, row: Mapping[str, Any], where: str) -> Any:
    if name not in row:
        raise FileError(f"{where}: no column {name!r}; it has {', '.join(row) or 'none'}; {suggest_name(name, row)}")
    return row[name]


def read_choices(choices: str | list[str], row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if isinstance(choices, list):
        found = [render(choice, row, where) for choice in choices]
    else:
        found = column(choices, row, where)
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(choice, str) for choice in found):
        raise FileError(f"{where}: the choices must be a list of at least two strings, found {found!r:.80}")
    if empty := [index for index, choice in enumerate(found) if not choice.strip()]:
        raise FileError(f"{where}: choice {empty[0]} is empty, and an empty text has no likelihood")
    if len(set(found)) < len(found):
        raise FileError(f"{where}: two choices are equal, so no answer can be told from the other: {found!r:.80}")
    return tuple(found)


def right_choice(answer: Any, choices: tuple[str, ...], where: str) -> int:
    """The answer is the text of a choice or its index, which CSV files write as digits."""
    if answer in choices:
        return choices.index(answer)
    index = int(answer) if isinstance(answer, str) and answer.isascii() and answer.isdigit() else answer
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        raise FileError(
            f"{where}: the answer {answer!r:.60} is neither a choice nor an index from 0 to {len(choices) - 1}"
        )
    return index


def references(answer: Any, where: str) -> tuple[str, ...]:
    found = answer if isinstance(answer, list) else [answer]
    texts = [str(each) if is_number(each) else each for each in found]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise FileError(
            f"{where}: the answer must be a text, a finite number or a list of them, none empty; found {answer!r:.60}"
        )
    return tuple(texts)


def check_disjoint(questions: Sequence[EvalQuestion], shots: Sequence[EvalQuestion]) -> None:
    asked = {(question.prompt, question.choices): question.where for question in questions}
    for shot in shots:
        if (shot.prompt, shot.choices) in asked:
            other = asked[shot.prompt, shot.choices]
            raise FileError(f"{shot.where}: this example is also a test row ({other}); remove it from one of the files")
