"""Tasks are solved by a model that knows the solution, in the real loop; and not without tools."""

from collections.abc import Sequence
from typing import Any

import pytest

from regard.agents.loop import AgentMessage, Reply
from regard.agents.tool import Toolbox
from regard.data.world import EVALUATION_SEED
from regard.data.world.tool_tasks import ARGUMENTS, tool_task
from regard.evals import tool_use
from regard.evals.tool_use import counts_by_kind, solve_tasks
from tests.agents.scripted import ScriptedWriter, call


class Solver(ScriptedWriter):
    """Writes the calls of a task, then what the last result says; every fifth answer is wrong."""

    texts = None

    def __init__(self) -> None:
        super().__init__("")
        self.tasks = {}
        for number in range(40):
            task = tool_task(EVALUATION_SEED + number, 1, "held-out")
            self.tasks[task.question] = (number, task)

    def write(self, messages: Sequence[AgentMessage], tools: Toolbox, max_new: int) -> Reply:
        number, task = self.tasks[messages[0]["content"]]
        done = sum(message["role"] == "tool" for message in messages)
        if done < len(task.calls):
            name, argument = task.calls[done]
            return Reply(call(name, f'{{"{ARGUMENTS[name]}": "{argument}"}}'), 30)
        found = messages[-1]["content"].splitlines()[-1]
        article = "the " if task.answer.startswith("the ") else ""
        return Reply("I forgot." if number % 5 == 0 else article + found, 5)


@pytest.mark.ledger("tool.agent")
def test_answers_with_and_without_tools_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def guesses(texts: Any, tokenizer: Any, tasks: Sequence[Any]) -> list[str]:
        return ["0" if number else task.answer for number, task in enumerate(tasks)]

    monkeypatch.setattr(tool_use, "answers_without_tools", guesses)
    progress: list[int] = []
    solved = solve_tasks(Solver(), 40, on_progress=progress.append)
    assert progress == list(range(1, 41))
    assert sum(each.correct[0] for each in solved) == 32 and sum(each.correct[1] for each in solved) == 1
    assert all(each.calls == len(each.task.calls) for each in solved)
    counts = counts_by_kind(solved)
    assert sum(asked for *_, asked in counts.values()) == 40 and sum(first for first, *_ in counts.values()) == 32
