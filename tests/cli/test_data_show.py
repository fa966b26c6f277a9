"""`regard data show`: the first batch of a recipe, and what counts in it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import regard

SMALL = ("--data.rows=2", "--data.length=48", "--tokenizer.by=byte")


def test_a_conversation_is_shown_with_the_tokens_that_count(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Where is Anna?"}, {"role": "assistant", "content": "In the barn."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    result = regard("data", "show", "demo", "--data", tmp_path / "chats.jsonl", *SMALL, "--rows", "1")
    assert result.exit_code == 0, result.exception
    marked = "".join(f"⟦{char}⟧" for char in " In the barn.")
    assert f"<|user|> Where is Anna?<|assistant|>{marked}⟦<|end|>⟧" in result.output
    assert "1 examples; objective next_token" in result.output and "count in the loss" in result.output


def test_overrides_may_precede_the_recipe() -> None:
    assert regard("data", "show", *SMALL, "demo").exit_code == 0
    assert "give a recipe" in str(regard("data", "show", "--data.rows=2").exception)


def test_held_out_examples_can_be_shown() -> None:
    result = regard("data", "show", "demo", *SMALL, "--split", "held-out")
    assert result.exit_code == 0 and "held-out" in result.output and "document 0" in result.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("demo", "--split", "test"), 2, "choose train or held-out"),
        (("dmo",), 1, "no recipe dmo"),
        ((), 1, "give a recipe"),
        (("demo", "--data.rws=2"), 1, "did you mean 'rows'"),
    ],
)
def test_wrong_arguments_are_refused(options: tuple[str, ...], code: int, message: str) -> None:
    result = regard("data", "show", *options)
    assert result.exit_code == code
    assert message in f"{result.output} {result.exception}"
