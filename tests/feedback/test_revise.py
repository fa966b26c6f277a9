"""Critique and revision with a scripted model: the conversations, the principles, and the training data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.data.readers import read_examples
from regard.feedback.constitution import Constitution, Principle, read_constitution
from regard.feedback.output import PromptOutput
from regard.feedback.revise import revise
from regard.objectives.next_token import NextToken
from regard.text.train import byte

RULES = Constitution(
    (Principle("short", "Be short."), Principle("kind", "Be kind.")), "Criticise: {principle}", "Rewrite: {principle}"
)
PROMPTS = ["Where is Anna?", [{"role": "system", "content": "You are a guide."}, {"role": "user", "content": "Why?"}]]


class ScriptedModel:
    """Its replies name the request and the number of the call."""

    def __init__(self) -> None:
        self.requests: list[list[dict[str, Any]]] = []
        self.numbers: list[int] = []

    def __call__(self, prompts: Sequence[Any], numbers: Sequence[int]) -> list[str]:
        self.requests += prompts
        self.numbers += numbers
        kinds = {"Criticise": "critique", "Rewrite": "revision"}
        return [f" {kinds.get(prompt[-1]['content'].partition(':')[0], 'answer')} {number} " for prompt, number in
                zip(prompts, numbers, strict=True)]  # fmt: skip


@pytest.mark.ledger("cai.critique")
def test_the_model_answers_criticises_and_rewrites() -> None:
    model = ScriptedModel()
    found = revise(model, PROMPTS, [4, 5], RULES, rounds=2)
    assert model.numbers == [20, 25, 21, 26, 22, 27, 23, 28, 24, 29]  # no two answers share a seed
    assert [turn.principle for turn in found[0].rounds] in (["short", "kind"], ["kind", "short"])
    first = next(rule for rule in RULES.principles if rule.name == found[0].rounds[0].principle)
    assert model.requests[4] == [  # the first revision of the first prompt
        {"role": "user", "content": "Where is Anna?"},
        {"role": "assistant", "content": "answer 20"},
        {"role": "user", "content": f"Criticise: {first.text}"},
        {"role": "assistant", "content": "critique 21"},
        {"role": "user", "content": f"Rewrite: {first.text}"},
    ]
    assert model.requests[6][:2] == [  # the second round starts from the first revision
        {"role": "user", "content": "Where is Anna?"},
        {"role": "assistant", "content": "revision 22"},
    ]
    assert found[1].as_line() == {
        "messages": [*PROMPTS[1], {"role": "assistant", "content": "revision 29"}],
        "initial": "answer 25",
        "rounds": [turn._asdict() for turn in found[1].rounds],
    }
    assert found == revise(ScriptedModel(), PROMPTS, [4, 5], RULES, rounds=2)


@pytest.mark.ledger("cai.critique")
def test_the_lines_are_examples_whose_revision_is_learned(tmp_path: Path) -> None:
    path = tmp_path / "revised.jsonl"
    with PromptOutput(path, [{"prompt": prompt} for prompt in PROMPTS], {}) as output:
        output.write(
            lambda prompts, numbers: [item.as_line() for item in revise(ScriptedModel(), prompts, numbers, RULES)]
        )
    tokenizer = byte()
    columns = NextToken().tokenize(read_examples(path)[0], tokenizer)
    learned = tokenizer.decode(columns["ids"][columns["weights"] > 0].tolist())
    assert learned.strip() == "revision 2" and "answer" not in tokenizer.decode(columns["ids"].tolist())


def test_principles_of_a_prompt_do_not_depend_on_others() -> None:
    drawn = [RULES.draw(1, number, 3) for number in range(20)]
    assert all(names[0] == names[2] != names[1] for names in drawn)  # again from the first after the last
    assert {names[0].name for names in drawn} == {"short", "kind"} and RULES.draw(1, 7, 3) == drawn[7]


def test_the_package_has_a_constitution_whose_templates_others_inherit(tmp_path: Path) -> None:
    example, path = read_constitution(), tmp_path / "mine.toml"
    assert {"honest", "concise", "polite"} <= {principle.name for principle in example.principles}
    path.write_text('judge = "{prompt} {first} {second}"\n[[principles]]\nname = "a"\ntext = "Be a."', "utf-8")
    mine = read_constitution(path)
    assert mine.texts == ("Be a.",) and mine.critique == example.critique and mine.judge.startswith("{prompt} ")
    assert "Be a." in mine.critique_request(mine.principles[0]) and "{" not in mine.revision_request(mine.principles[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no \\[\\[principles\\]\\]"),
        ("[[principles", "is not TOML"),
        ('[[principles]]\nname = "a"', "a name and a text"),
        ('[[principles]]\nname = "a"\ntext = ""', "a name and a text"),
        ('[[principles]]\nname = "a"\ntext = "b"\n[[principles]]\nname = "a"\ntext = "c"', "the same name"),
        ('critic = "x"\n[[principles]]\nname = "a"\ntext = "b"', "did you mean 'critique'"),
        ('critique = "x"\n[[principles]]\nname = "a"\ntext = "b"', "with {principle} in it"),
    ],
)
def test_wrong_constitutions_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_constitution(path)
