"""Tasks in files: their columns and templates, and errors that name the file and the line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from regard.data.file_index import FileError
from regard.evals.task_file import EvalQuestion, read_task
from regard.evals.world_tasks import WORLD_TASKS

CHOICE = {"question": "What?", "options": ["a", "b"], "label": 1}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_task(folder: Path, *lines: str, rows: tuple = (CHOICE,)) -> Path:
    write_rows(folder / "rows.jsonl", *rows)
    path = folder / "task.toml"
    path.write_text("\n".join(('kind = "choice"', 'data = "rows.jsonl"', *lines)))
    return path


def test_a_choice_has_a_prompt_template_and_columns(tmp_path: Path) -> None:
    path = write_task(
        tmp_path, 'prompt = "Q: {{ question | upper }}\\nA:"', 'choices = "options"', 'answer = "label"',
        'delimiter = ""', 'shots = "shots.jsonl"',
    )  # fmt: skip
    write_rows(tmp_path / "shots.jsonl", CHOICE | {"question": "Who?", "label": "a"})
    task = read_task(path)
    assert (task.name, task.kind, task.delimiter, task.separator) == ("task", "choice", "", "\n\n")
    assert task.questions == [EvalQuestion(f"{tmp_path}/rows.jsonl, line 1", "Q: WHAT?\nA:", ("b",), ("a", "b"))]
    assert task.shots[0].prompt == "Q: WHO?\nA:" and task.shots[0].answers == ("a",)


def test_choices_may_be_templates(tmp_path: Path) -> None:
    path = write_task(
        tmp_path, 'prompt = "{{ question }}"', "choices = ['no', 'yes, {{ options[0] }}']", 'answer = "label"'
    )
    assert read_task(path).questions[0].choices == ("no", "yes, a")


def test_files_of_rows_and_texts_are_tasks_themselves(tmp_path: Path) -> None:
    choice = write_rows(tmp_path / "c.jsonl", {"prompt": "a", "choices": ["b", "c"], "answer": "c"})
    assert read_task(choice).questions[0].answers == ("c",)
    generation = read_task(write_rows(tmp_path / "g.jsonl", {"prompt": "a", "answer": ["b", 4]}))
    assert generation.kind == "generation" and generation.questions[0].answers == ("b", "4")
    texts = read_task(write_rows(tmp_path / "t.jsonl", {"text": "a"}, {"text": "b"}))
    assert texts.kind == "perplexity" and [text.prompt for text in texts.questions] == ["a", "b"]
    (tmp_path / "book.txt").write_text("one\n\ntwo\n")
    assert [text.prompt for text in read_task(tmp_path / "book.txt").questions] == ["one\n\ntwo\n"]
    (tmp_path / "t.csv").write_text("prompt,answer\na,b\n")
    assert read_task(tmp_path / "t.csv").questions[0].answers == ("b",)


USES = ('prompt = "{{ question }}"', 'choices = "options"', 'answer = "label"')


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "options": ["a", "b"]}, "rows.jsonl, line 2: no column 'label'"),
        ({"options": ["a", "b"], "label": 0}, "rows.jsonl, line 2: 'question' is undefined; the columns are options"),
        (CHOICE | {"options": ["a"]}, "line 2: the choices must be a list of at least two strings"),
        (CHOICE | {"options": ["a", " "]}, "line 2: choice 1 is empty"),
        (CHOICE | {"options": ["a", "a"]}, "line 2: two choices are equal"),
        (CHOICE | {"options": "ab"}, "line 2: the choices must be a list"),
        (CHOICE | {"label": 2}, "line 2: the answer 2 is neither a choice nor an index from 0 to 1"),
        (CHOICE | {"label": True}, "line 2: the answer True is neither"),
        (CHOICE | {"label": "z"}, "line 2: the answer 'z' is neither"),
        ("text", "line 2: expected an object"),
        (
            CHOICE | {"question": None},
            "rows.jsonl, line 2: the template '{{ question }}' failed on this row: None is neither",
        ),
        (CHOICE | {"question": math.nan}, "line 2: the template '{{ question }}' failed on this row: nan is neither"),
        (CHOICE | {"question": ["x"]}, "['x'] is neither a string nor a finite number"),
        (CHOICE | {"question": {"x": 1}}, "{'x': 1} is neither a string nor a finite number"),
        (CHOICE | {"question": True}, "True is neither a string nor a finite number"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_task(write_task(tmp_path, *USES, rows=(CHOICE, row)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "row", [{"text": None}, {"text": {"a": 1}}, {"text": math.inf}, {"prompt": "a", "answer": math.nan}]
)
def test_rows_without_text_are_refused_in_files_of_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(FileError, match=r"rows\.jsonl, line 1: .* finite number"):
        read_task(write_rows(tmp_path / "rows.jsonl", row))


def test_a_template_writes_numbers_and_items(tmp_path: Path) -> None:
    prompt = "prompt = \"{{ n }} {{ x }} {{ options[0] }} {{ more.a.b }} {{ 'yes' if flag }}\""
    row = CHOICE | {"n": 2, "x": 0.5, "more": {"a": {"b": "c"}}, "flag": True}
    task = read_task(write_task(tmp_path, prompt, *USES[1:], rows=(row,)))
    assert task.questions[0].prompt == "2 0.5 a c yes"


def test_broken_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write_task(tmp_path, *USES)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not valid JSON"):
        read_task(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (('promt = "a"',), "there is no key 'promt'; did you mean 'prompt'?"),
        (('text = "a"',), "'text' has no effect in a task of kind choice"),
        (("max_new = 3",), "'max_new' has no effect in a task of kind choice"),
        (("prompt = 3",), "prompt = 3 has the wrong type"),
        (("choices = ['a', 3]",), "choices = ['a', 3] has the wrong type"),
        (("prompt = ",), "is not TOML"),
        (('prompt = "{{ question"',), "line 1: unexpected end of template"),
        (('shots = "rows.jsonl"', *USES), "rows.jsonl, line 1: this example is also a test row"),
        (('shots = "row.jsonl"', *USES), "did you mean"),
    ],
)
def test_a_bad_task_is_refused(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        read_task(write_task(tmp_path, *lines))
    assert message in str(error.value)


def test_the_kind_and_the_data_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('kind = "choices"\ndata = "a"')
    (tmp_path / "b.toml").write_text('kind = "choice"')
    write_rows(tmp_path / "c.jsonl", {"question": "a"})
    (tmp_path / "d.jsonl").write_text("")
    for name, message in [
        ("a.toml", "choose one of perplexity"), ("b.toml", "`data` is missing"), ("c.jsonl", "do not tell the kind"),
        ("d.jsonl", "is empty"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_task(tmp_path / name)


def test_a_column_that_is_nearly_one_of_the_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "choises": ["b", "c"], "answer": "b"}')
    with pytest.raises(
        FileError, match="the column 'choises' has no effect in a task of kind generation; did you mean"
    ):
        read_task(tmp_path / "rows.jsonl")
    with pytest.raises(FileError, match="none.toml does not exist; give a task"):
        read_task(tmp_path / "none.toml")


def test_tasks_of_the_world_ask_about_held_out_stories() -> None:
    tasks = {name: make() for name, make in WORLD_TASKS.items()}
    assert {name: task.kind for name, task in tasks.items()} == {
        "world-stories": "perplexity", "world-choices": "choice", "world-questions": "generation",
    }  # fmt: skip
    choices = tasks["world-choices"]
    assert all(len(each.choices) >= 2 and each.answers[0] in each.choices for each in choices.questions)
    assert len({each.choices.index(each.answers[0]) for each in choices.questions}) > 2
    for task in (choices, tasks["world-questions"]):
        assert not {each.prompt for each in task.questions} & {each.prompt for each in task.shots}
