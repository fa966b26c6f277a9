"""Tasks with tools: their answers are those of the real tools, held-out ones are not in training."""

from collections import Counter
from pathlib import Path

import pytest

from regard.agents.calculator import calculator
from regard.agents.model_writer import ModelWriter
from regard.agents.sql import sql_tool
from regard.agents.tool import Toolbox
from regard.data.world.tool_tasks import ARGUMENTS, KINDS, tool_task, tool_trace
from regard.text.chat import encode_chat
from regard.text.tools import parse_tool_calls
from regard.text.train import byte


@pytest.mark.parametrize("level", [1, 4])
def test_traces_are_those_of_the_real_tools(level: int, tmp_path: Path) -> None:
    """Their prompts, calls and results, and the answer follows from the last result."""
    writer = ModelWriter(byte(), None, None)
    for seed in range(120):
        task, trace = tool_task(seed, level, "train"), tool_trace(seed, level, "train")["messages"]
        database = tmp_path / f"{seed}.db"
        task.facts.write(database)
        box = Toolbox([calculator(), sql_tool(database)])
        results = [box.run(name, {ARGUMENTS[name]: argument}) for name, argument in task.calls]
        assert results == list(task.results)
        assert task.answer.removeprefix("the ") == results[-1].splitlines()[-1]
        assert trace[-1] == {"role": "assistant", "content": task.answer}
        if trace[0]["role"] == "system":
            question = [{"role": "user", "content": task.question}]
            assert writer.encode(question, box) == encode_chat(byte(), trace[:2])
            calls = [parse_tool_calls(message["content"], writer.style, box.names).calls for message in trace[2:-1:2]]
            assert [call.name for (call,) in calls] == [name for name, _ in task.calls]
        else:
            assert trace[0]["content"] == task.question and len(trace) == 2


def test_held_out_tasks_are_not_in_training() -> None:
    splits = {split: [tool_task(seed, 1, split) for seed in range(3000)] for split in ("train", "held-out")}
    sums = {split: {task.question for task in tasks if task.kind == "arithmetic"} for split, tasks in splits.items()}
    expressions = {
        split: {task.calls[0][1] for task in tasks if task.kind == "arithmetic"} for split, tasks in splits.items()
    }
    assert not expressions["train"] & expressions["held-out"] and len(sums["held-out"]) > 300
    kinds = Counter(task.kind for task in splits["held-out"])
    assert set(kinds) == set(KINDS) and min(kinds.values()) > 400


def test_one_example_in_four_has_no_tools() -> None:
    traces = [tool_trace(seed, 1, "train")["messages"] for seed in range(2000)]
    assert 0.2 < sum(trace[0]["role"] == "user" for trace in traces) / 2000 < 0.3
