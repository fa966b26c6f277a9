"""`regard agent`: the tools that it offers, its trace, its exit code, and what it refuses."""

import json
import shlex
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from regard.agents.loop import AgentMessage, Reply
from regard.agents.model_writer import ModelWriter
from regard.agents.tool import Toolbox
from tests.agents.scripted import call
from tests.cli.conftest import regard


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE things(name TEXT, price INTEGER)")
        connection.execute("INSERT INTO things VALUES ('ball', 29)")
    connection.close()
    return path


def script(monkeypatch: pytest.MonkeyPatch, *replies: str) -> list[list[AgentMessage]]:
    """The model replies with these, one after the other. Returns the conversations that it read."""
    read: list[list[AgentMessage]] = []

    def write(self: ModelWriter, messages: Sequence[AgentMessage], tools: Toolbox, max_new: int) -> Reply:
        assert self.encode(messages, tools)
        read.append(list(messages))
        return Reply(replies[(len(read) - 1) % len(replies)], 10)

    monkeypatch.setattr(ModelWriter, "write", write)
    return read


@pytest.mark.ledger("tool.agent")
def test_a_question_is_answered_in_two_steps(
    demo_run: Path, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = call("sql", '{"query": "SELECT price FROM things WHERE name = \'ball\'"}')
    script(monkeypatch, query, call("calculator", '{"expression": "29 * 12"}'), "348")
    trace = tmp_path / "trace.jsonl"
    result = regard("agent", demo_run, "What do 12 balls cost?", "--database", shop, "--trace", trace)
    assert (result.exit_code, result.stdout) == (0, "348\n") and "no tool was called" not in result.stderr
    assert "calculator(expression='29 * 12')" in result.stderr and "   348" in result.stderr
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert events[0] == {
        "event": "question", "step": 0, "text": "What do 12 balls cost?", "tools": ["calculator", "sql"],
    }  # fmt: skip
    assert [event["text"] for event in events if event["event"] == "result"] == ["price\n29", "348"]
    assert events[-1] == {"event": "end", "step": 3, "reason": "answer", "answer": "348"}


def test_tools_of_an_mcp_server_are_called(demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = shlex.join([sys.executable, str(Path(__file__).parents[1] / "agents" / "fake_mcp_server.py")])
    script(monkeypatch, call("upper", '{"text": "a"}'), "A it is.")
    result = regard("agent", demo_run, "?", "--mcp", server)
    assert result.stdout == "A it is.\n" and "upper(text='a')" in result.stderr
    dead = regard("agent", demo_run, "?", "--mcp", f"{server} dead")
    assert dead.exit_code == 1 and "has ended with exit code 1: no licence" in str(dead.exception)
    twice = regard("agent", demo_run, "?", "--mcp", server, "--mcp", server)
    assert "two tools have the name 'upper'" in str(twice.exception)


def test_a_conversation_keeps_its_messages(demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = script(monkeypatch, call("calculator", '{"expression": "6 * 7"}'), "42", "Yes.")
    result = regard("agent", demo_run, "--system", "Be brief.", stdin="What is 6 * 7?\n\nSure?\n")
    assert result.stdout == "42\nYes.\n" and result.exit_code == 0
    assert result.stderr.count("(no tool was called)") == 1  # for the second question
    assert [message["role"] for message in read[-1]] == ["system", "user", "assistant", "tool", "assistant", "user"]


def test_no_answer_is_a_failure(demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, call("calculator", '{"expression": "6 * 7"}'))
    result = regard("agent", demo_run, "?", "--trace", tmp_path / "trace.jsonl")
    assert result.exit_code == 1 and "repeats the same call" in result.stderr and result.stdout == ""
    result = regard("agent", demo_run, "?", "--max-steps", 2, "--trace", tmp_path / "trace.jsonl")
    assert result.exit_code == 1 and "no answer after 2 replies; raise --max-steps" in result.stderr
    ends = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in ends if event["event"] == "end"] == ["repeated", "steps"]


def test_a_conversation_that_is_too_long_is_refused(demo_run: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    result = regard("agent", demo_run, "Where is Anna? " * 200, "--trace", trace, "--python")
    assert result.exit_code == 1 and "tokens, but the model reads" in str(result.exception)
    (event,) = [json.loads(line) for line in trace.read_text().splitlines()]
    assert event["event"] == "question" and event["tools"] == ["calculator", "python"]


def test_mistakes_are_refused(demo_run: Path, shop: Path, tmp_path: Path) -> None:
    refused = {
        (
            demo_run,
            "?",
            "--tools",
            "web",
        ): "there is no tool 'web'; choose from calculator, search, sql, or add --python",
        (demo_run, "?", "--tools", "sql"): "sql needs --database; add it, or leave sql out",
        (demo_run, "?", "--database", shop, "--tools", "calculator"): "--database is for the tool sql; add it to",
        (demo_run, "?", "--database", tmp_path / "none.db"): "does not exist; give a SQLite database",
        (demo_run, "?", "--index", shop): "is not an index",
        (demo_run, "?", "--trace", tmp_path / "none" / "t.jsonl"): "does not exist; make it",
        (demo_run, " "): "the question is empty",
        ("smol", "?"): "did you mean 'smollm2'",
    }
    for arguments, message in refused.items():
        result = regard("agent", *arguments)
        assert result.exit_code == 1 and message in str(result.exception), (arguments, result.exception)
