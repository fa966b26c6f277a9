"""Pairs labelled by a judge: their lines, what is dropped, and files that are continued after an interruption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.data.readers import read_examples
from regard.feedback.label import Labeller
from regard.feedback.output import PromptOutput
from regard.objectives.preference import DPO
from regard.text.train import byte
from tests.feedback.conftest import BiasedJudge
from tests.feedback.test_judge import Replies

ANSWERS = {0: "longest", 1: "long", 2: "a", 3: "abc", 4: "same", 5: "same ", 6: "ab", 7: "abcd"}  # by their numbers
QUESTION = [{"role": "user", "content": "Where?"}]


def answer(prompts: Sequence[Any], numbers: Sequence[int]) -> list[str]:
    return [f" {ANSWERS[number % 8]}" for number in numbers]


def examples(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"Where is {number}?"}]} for number in range(count)]


@pytest.mark.ledger("cai.rlaif")
def test_the_better_of_two_answers_is_chosen_whatever_the_bias() -> None:
    labeller = Labeller(answer, BiasedJudge(bias=2.5))
    lines = labeller([QUESTION] * 4, range(4))
    assert [line and (line["chosen"], line["rejected"]) for line in lines] == [
        ("longest", "long"),
        None,  # two characters apart: the verdicts of the two orders differ
        None,  # equal
        None,
    ]
    assert (labeller.equal, labeller.dropped, len(labeller.verdicts)) == (1, 2, 3)
    averaged = Labeller(answer, BiasedJudge(bias=2.5), inconsistent="average")
    lines = averaged([QUESTION] * 4, range(4))
    assert [line and (line["chosen"], line["rejected"]) for line in lines[1:]] == [("abc", "a"), None, ("abcd", "ab")]
    assert lines[1] is not None and not lines[1]["consistent"] and lines[1]["preference"] == pytest.approx(0.880797)
    assert averaged.dropped == 0
    with pytest.raises(ValueError, match="must be one of drop, average"):
        Labeller(answer, BiasedJudge(), inconsistent="keep")


def test_a_silent_judge_is_refused_unless_it_has_labelled_earlier_prompts() -> None:
    with pytest.raises(ValueError, match="replied to none of 6 questions"):
        Labeller(answer, Replies(None))([QUESTION] * 4, range(4))
    later = Labeller(answer, Replies(None), inconsistent="average", answered=True)
    assert later([QUESTION] * 4, range(4, 8)) == [None] * 4 and later.dropped == 3


@pytest.mark.ledger("cai.rlaif")
def test_the_lines_are_pairs_of_dpo(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with PromptOutput(path, examples(8), {}) as output:
        output.write(Labeller(answer, BiasedJudge()))
    rows, tokenizer = read_examples(path), byte()
    assert len(rows) == 6  # without those of equal answers
    columns = DPO().tokenize(rows[0], tokenizer)
    for side, text in (("chosen", "longest"), ("rejected", "long")):
        learned = columns[f"{side}_ids"][columns[f"{side}_weights"] > 0]
        assert tokenizer.decode(learned.tolist()).removesuffix("<|end|>").strip() == text


def test_an_interrupted_file_is_continued_with_the_same_lines(tmp_path: Path) -> None:
    path, asked = tmp_path / "pairs.jsonl", list[int]()

    def counted(prompts: Sequence[Any], numbers: Sequence[int]) -> list[str]:
        asked.extend(numbers[::2])
        return answer(prompts, numbers)

    with PromptOutput(path, examples(70), {"seed": 1}) as output:
        output.write(Labeller(counted, BiasedJudge()))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:40]) + lines[40][:9])  # killed while it wrote line 41
    asked.clear()
    with PromptOutput(path, examples(70), {"seed": 1}) as output:
        assert output.start == 53  # three lines per four prompts
        output.write(Labeller(counted, BiasedJudge()))
    assert path.read_bytes() == whole and asked == [2 * number for number in range(53, 70)]


def test_other_prompts_settings_and_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with PromptOutput(path, examples(4), {"seed": 1}) as output:
        output.write(Labeller(answer, BiasedJudge()))
    before = path.read_bytes()
    for rows, settings in ((examples(4), {"seed": 2}), (examples(5)[::-1], {"seed": 1})):
        with pytest.raises(ValueError, match="line 1: not written by this command with these prompts and settings"):
            PromptOutput(path, rows, settings)
    with PromptOutput(path, examples(6), {"seed": 1}) as output:  # more prompts
        assert output.start == 4
        with pytest.raises(ValueError, match="another process is writing"):
            PromptOutput(path, examples(4), {"seed": 1})
    weights = before.splitlines()[0].partition(b'", ')[0].rpartition(b"-")[2]
    path.write_bytes(before.replace(weights, b"0" * len(weights)))
    with pytest.raises(ValueError, match="line 1: written with another model, or with other weights"):
        PromptOutput(path, examples(4), {"seed": 1})
    path.write_bytes(before + before.splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="line 4"):
        PromptOutput(path, examples(4), {"seed": 1})


@pytest.mark.parametrize(
    "content", ["my notes", '{"id": "7", "text": "mine"}', '{"id": "7", "text": "mine', "5", "null", '{"prompt": "a"}']
)
def test_a_file_of_somebody_else_stays_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not written by this command"):
        PromptOutput(path, examples(4), {"seed": 1})
    assert path.read_text(encoding="utf-8") == content


def test_a_line_of_which_only_the_end_is_missing_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with PromptOutput(path, examples(2), {}) as output:
        output.write(Labeller(answer, BiasedJudge()))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with PromptOutput(path, examples(2), {}) as output:
        assert output.start == 2
    assert path.read_bytes() == whole


def test_a_failure_before_the_first_line_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for existed in (False, True):
        with pytest.raises(ValueError, match="no judge"), PromptOutput(path, examples(2), {}):
            raise ValueError("no judge")
        assert path.exists() == existed  # a file of the user stays
        path.touch()
